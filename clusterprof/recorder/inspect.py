"""Opens every collector once and says what can be seen here, and who can change what cannot.

A value that is missing is somebody's to give: the user's (an option, a package), the
administrator's (a permission, a kernel setting), or nobody's on this machine.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clusterprof.collectors.base import Context
from clusterprof.errors import CannotStart, NothingNew, Unavailable
from clusterprof.linux.roots import Roots
from clusterprof.recorder.rundir import choose_base
from clusterprof.signals.elsewhere import NOT_EVERYWHERE, is_elsewhere

OWNER_YOU = "you"
OWNER_ADMIN = "cluster admin"
OWNER_NOBODY = "impossible here"
_FOUND_AT_MOST = 4
_PATIENCE_SECONDS = 4.0  # a tool that reports once a second needs two of them
_LOOK_SECONDS = 0.05
_MINE = re.compile(r"pip install|newer clusterprof|run as the job's user|--|\b(un)?set ")


@dataclass(frozen=True, slots=True)
class Hole:
    """Values of one collector that could not be read, all for one reason."""

    signals: Sequence[str]
    devices: Sequence[str]
    """Of which devices; () = of all that have the signals."""
    kind: str
    message: str
    remedy: str
    owner: str
    """Who can change it: as in `Look`."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one collector found."""

    name: str
    status: str
    """available, absent, denied or failed."""
    found: str
    """What it sees ("7 values of 2 disks: vda, vdb")."""
    message: str
    """Why it sees nothing; "" when it does."""
    remedy: str
    """What would change that; "" = nothing."""
    owner: str
    """Who can do that: "you", "cluster admin", "impossible here"; "" when nothing is amiss."""
    missing: Sequence[str] = ()
    """Single values that could not be read, with the reason."""
    holes: Sequence[Hole] = ()
    """The same by reason, with the remedy and its owner."""
    elsewhere: str = ""
    """What this node does not have, in a word ("Lustre"); "" = it has it, or should."""
    devices: Sequence[Mapping[str, Any]] = ()
    """What its devices are, as the header of a recording has them."""
    users: Sequence[tuple[int, str]] = ()
    """(pid, device): who was seen to use which."""


def look_at(
    collectors: Sequence[type],
    roots: Roots | None = None,
    isolate: Callable[[str, Context], Any] | None = None,
    run_dir: Path | None = None,
    pids: Sequence[int] = (),
) -> list[Look]:
    """Open, sample and close every collector; an isolated one in its helper, with a deadline.

    pids: the processes of the job; this one where nothing else is known. Files of a fixture machine
    go by the names they have there.
    """
    roots, job = roots or Roots(), list(pids) or [os.getpid()]
    context = Context(roots, run_dir, lambda: job)
    looks = []
    for kind in collectors:
        name: str = kind.name  # type: ignore[attr-defined]
        try:
            isolated = kind.isolated and isolate is not None  # type: ignore[attr-defined]
            collector = isolate(name, context) if isolated and isolate else kind(context)
        except Exception as error:
            looks.append(_unseen(name, _as_reason(error)))
            continue
        looks.append(_look(name, collector))
    return _marked([_as_named_there(look, roots) for look in looks])


def _as_named_there(look: Look, roots: Roots) -> Look:
    if roots == Roots():
        return look

    def named(text: str) -> str:
        return text.replace(str(roots.proc), "/proc").replace(str(roots.sys), "/sys")

    holes = [replace(hole, message=named(hole.message)) for hole in look.holes]
    missing = [named(text) for text in look.missing]
    return replace(look, message=named(look.message), missing=tuple(missing), holes=tuple(holes))


def _marked(looks: Sequence[Look]) -> list[Look]:
    """Say of each look whether it found nothing because the node has no such thing."""
    accelerators = any(
        look.status == "available" and look.name.startswith("gpu_") and look.name != "gpu_emulated"
        for look in looks
    )
    return [
        replace(look, elsewhere=NOT_EVERYWHERE[look.name])
        if is_elsewhere(look.name, look.status, look.remedy, accelerators)
        else look
        for look in looks
    ]


def look_at_spans(environ: Mapping[str, str]) -> Look:
    """Say whether the probe of a job could report spans here: they travel through memory."""
    base = choose_base(environ)
    try:
        descriptor = os.memfd_create("clusterprof", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.close(descriptor)
        if not os.access(base, os.W_OK | os.X_OK):
            raise CannotStart(f"{base}: not writable")
    except (OSError, CannotStart) as error:
        why = Unavailable("denied", str(error), "set XDG_RUNTIME_DIR or TMPDIR to a local folder")
        return _unseen("spans", why)
    return Look("spans", "available", f"rings in memory, announced in {base}", "", "", "")


def owner_of(why: Unavailable) -> str:
    """Return who can make a missing value readable."""
    if not why.remedy:
        return OWNER_NOBODY
    words = why.remedy.lower()
    if why.kind != "denied" and _MINE.search(words):
        return OWNER_YOU
    if why.kind == "failed" and "bug" in words:
        return OWNER_YOU
    return OWNER_ADMIN


def _look(name: str, collector: Any) -> Look:
    try:
        columns = list(_patiently(collector.open))
        try:
            sample = _patiently(collector.sample)
            devices, users = _devices(collector)
        finally:
            collector.close()
        if hasattr(collector, "strings"):
            found = f"{len(columns)} values of every row"
            return Look(name, "available", found, "", "", "")
        look = _values(name, columns, list(sample))
        return replace(look, devices=devices, users=users)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return _unseen(name, _as_reason(error))


def _devices(collector: Any) -> tuple[tuple[dict[str, Any], ...], tuple[tuple[int, str], ...]]:
    """Return what the devices are, and which process was seen to use which."""
    describe = getattr(collector, "inventory", None)
    events = getattr(collector, "events", None)
    users = [
        (about["pid"], str(about.get("device", "")))
        for kind, about in (events() if events is not None else ())
        if kind in ("device-used", "device-owner") and isinstance(about.get("pid"), int)
    ]
    return tuple(dict(one) for one in describe()) if describe is not None else (), tuple(users)


def _patiently(ask: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """Open or sample; a helper process and its tools may need a while."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return ask()
        except NothingNew:
            if time.monotonic() > end:
                raise Unavailable("failed", "nothing has come") from None
        time.sleep(_LOOK_SECONDS)


def _values(name: str, columns: Sequence[Any], sample: Sequence[Any]) -> Look:
    missing: set[str] = set()
    reasons: dict[Unavailable, list[tuple[str, str]]] = {}
    having: dict[str, list[str]] = {}
    for (signal, device), value in zip(columns, sample):
        having.setdefault(signal.name, []).append(device)
        if isinstance(value, Unavailable):
            missing.add(f"{signal.name}: {value.message}")
            reasons.setdefault(value, []).append((signal.name, device))
    if columns and len(columns) == sum(map(len, reasons.values())):
        return _unseen(name, next(iter(reasons)))
    devices = list(dict.fromkeys(device for _, device in columns if device))
    found = f"{len(having)} signals" if columns else "nothing yet"
    if devices:
        shown = devices[:_FOUND_AT_MOST]
        more = ", …" if len(devices) > len(shown) else ""
        found += f" of {', '.join(shown)}{more}"
    holes = [hole for why, places in reasons.items() for hole in _holes(why, places, having)]
    return Look(name, "available", found, "", "", "", tuple(sorted(missing)), tuple(holes))


def _holes(
    why: Unavailable, places: Sequence[tuple[str, str]], having: dict[str, list[str]]
) -> list[Hole]:
    """Lay together the signals that one reason hides on the same devices."""
    devices_of: dict[str, list[str]] = {}
    for signal, device in places:
        devices_of.setdefault(signal, []).append(device)
    alike: dict[tuple[str, ...], list[str]] = {}
    for signal, devices in devices_of.items():
        everywhere = len(devices) == len(having[signal])
        alike.setdefault(() if everywhere else tuple(devices), []).append(signal)
    return [
        Hole(tuple(signals), devices, why.kind, why.message, why.remedy, owner_of(why))
        for devices, signals in alike.items()
    ]


def _unseen(name: str, why: Unavailable) -> Look:
    return Look(name, why.kind, "", why.message, why.remedy, owner_of(why))


def _as_reason(error: BaseException) -> Unavailable:
    if isinstance(error, Unavailable):
        return error
    message = f"{type(error).__name__}: {error}"[:300]
    return Unavailable("failed", message, "report this as a bug")
