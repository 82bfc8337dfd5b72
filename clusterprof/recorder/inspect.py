"""Opens every collector once and says what can be seen here, and who can change what cannot.

A value that is missing is somebody's to give: the user's (an option, a package), the
administrator's (a permission, a kernel setting), or nobody's on this machine.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterprof.collectors.base import Context
from clusterprof.errors import CannotStart, NothingNew, Unavailable
from clusterprof.linux.roots import Roots
from clusterprof.recorder.rundir import choose_base

OWNER_YOU = "you"
OWNER_ADMIN = "cluster admin"
OWNER_NOBODY = "impossible here"
_FOUND_AT_MOST = 4
_PATIENCE_SECONDS = 4.0  # a tool that reports once a second needs two of them
_LOOK_SECONDS = 0.05


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


def look_at(
    collectors: Sequence[type],
    roots: Roots | None = None,
    isolate: Callable[[str, Context], Any] | None = None,
    run_dir: Path | None = None,
) -> list[Look]:
    """Open, sample and close every collector; an isolated one in its helper, with a deadline."""
    context = Context(roots or Roots(), run_dir, lambda: [os.getpid()])
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
    return looks


def look_at_spans(environ: dict[str, str]) -> Look:
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
    mine = ("pip install", "run as the job's user", "--", "set ", "unset ")
    if why.kind != "denied" and any(word in words for word in mine):
        return OWNER_YOU
    if why.kind == "failed" and "bug" in words:
        return OWNER_YOU
    return OWNER_ADMIN


def _look(name: str, collector: Any) -> Look:
    try:
        columns = list(_patiently(collector.open))
        try:
            sample = _patiently(collector.sample)
        finally:
            collector.close()
        if hasattr(collector, "strings"):
            found = f"{len(columns)} values of every row"
            return Look(name, "available", found, "", "", "")
        return _values(name, columns, list(sample))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return _unseen(name, _as_reason(error))


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
    missing: dict[str, list[str]] = {}
    first: Unavailable | None = None
    for (signal, device), value in zip(columns, sample):
        if isinstance(value, Unavailable):
            first = first or value
            text = f"{signal.name}: {value.message}"
            missing.setdefault(text, []).append(device)
    if columns and first is not None and len(columns) == sum(map(len, missing.values())):
        return _unseen(name, first)
    devices = Counter(device for _, device in columns if device)
    signals = len({signal.name for signal, _ in columns})
    found = f"{signals} signals" if columns else "nothing yet"
    if devices:
        shown = list(devices)[:_FOUND_AT_MOST]
        more = ", …" if len(devices) > len(shown) else ""
        found += f" of {', '.join(shown)}{more}"
    return Look(name, "available", found, "", "", "", tuple(sorted(missing)))


def _unseen(name: str, why: Unavailable) -> Look:
    return Look(name, why.kind, "", why.message, why.remedy, owner_of(why))


def _as_reason(error: BaseException) -> Unavailable:
    if isinstance(error, Unavailable):
        return error
    message = f"{type(error).__name__}: {error}"[:300]
    return Unavailable("failed", message, "report this as a bug")
