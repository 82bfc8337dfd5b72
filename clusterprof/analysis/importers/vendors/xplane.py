"""Profiles of JAX, TensorFlow and PyTorch/XLA (`xplane.pb`).

## How to make the file

    with jax.profiler.trace("traces/"):
        for number, batch in enumerate(batches):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                state = train_step(state, batch)
        jax.block_until_ready(state)

Each host writes `traces/plugins/profile/…/HOST.xplane.pb`.

## How to analyze it

    clusterprof analyze traces/

## What is read

The XSpace protobuf: device planes (`/device:TPU:N`, `/device:GPU:N`) and the host plane
(`/host:CPU`). On a TPU the line `XLA Ops` is the work of the core, on a GPU the lines of the
streams. Lines that the profiler derives from others (modules, name scopes, source lines) are not
counted again. The `.trace.json.gz` that JAX writes beside the profile has the same tracks under the
same names and is read as a Chrome trace; give one of the two, not both.

No package is needed: the few fields are read from the bytes, and one plane at a time.

## How the numbers are computed

* **Busy**: XLA operations contain each other (a loop, its body). Each instant counts for the
  innermost operation. The core is busy while an operation runs, except `infeed` and `outfeed`, in
  which it waits for the host.
* **Communication** are operations named all-reduce, all-gather, reduce-scatter, all-to-all or
  collective-permute, `send-done` and `recv-done`, and kernels of NCCL and RCCL. An operation that
  ends a concurrent one (`-done`) is the time in which the core waits for it. One that starts it
  (`-start`) is not communication.
* **Copies between host and device**: `copy-done` and the like, if the HLO text of the operation
  names the memory of the host (`S(5)`), and the `-done` of a send or receive that is a host
  transfer. The core waits for the copy in it, so it is lost time. A `copy-done` between memories
  of the device (a prefetch) counts as work, as a kernel bound by its memory does.
* Any other `async-done` is idle time: the profile does not show what the core waited for.
* **Steps** are the line `Steps` of each device, else ranges with a step number
  (`StepTraceAnnotation`), else the runs of the program that takes most time. A device without steps
  of its own has those of the first device. A step lasts until the next begins, so that the time
  between two programs counts. A device that only copied while others computed is left out.
* **Late host**: calls of CUDA and HIP are matched to kernels by correlation id. A TPU has no such
  calls: its idle time has no cause. What the host did in gaps is shown by the Python functions and
  executions of the thread of the steps, else of the threads that were in one at the launches.

## What it cannot see

The host's Python where it was not traced; the loader; the network; SparseCores. The profile has no
rank: hosts are distinguished by the names of their files. The devices of one host are shown as
processes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.core.wire import (
    WireError,
    convert_signed,
    decode_text,
    read_fields,
    read_message_bytes,
)
from clusterprof.analysis.importers.kineto.event_columns import GatheredEvents
from clusterprof.analysis.importers.kineto.event_stream import Document
from clusterprof.analysis.importers.kineto.importer import build_node
from clusterprof.analysis.importers.kineto.tracks import (
    COLLECTIVE,
    DERIVED,
    DEVICE,
    HOST,
    OPERATIONS,
    Track,
    TrackEvents,
    classify_track,
)

STEP_MARKS = (
    "steps (StepTraceAnnotation)",
    "wrap each step in jax.profiler.StepTraceAnnotation to see steps",
)
_PLANE_NAME = re.compile(rb"\x12[\x01-\x40]/(?:host|device):")
_MAX_HEAD_BYTES = 4096
_MAX_NAME_BYTES = 256  # the name of an operation may be its whole HLO text
_HOSTNAME_FIELD = 4
_MAX_HLO_BYTES = 2048  # the types of the result and the operands precede the rest
_HLO_NAME = re.compile(r"%(\S+) = ")
_DONE = re.compile(r"= (.*?) ([a-z-]+)-done\(")
"""Of the HLO text of an operation that awaits another: the type of its result, and its kind."""
_HOST_MEMORY = "S(5)"
"""Memory space of the host in the layout of a type.

Source: xla/layout.h, Layout::kHostMemorySpace.
"""
_COPY_SIZE = re.compile(r"size:(\d{1,17})\b")
_MIN_EPOCH_NS = 10**18
_MAX_TIME_NS = 1 << 62
_MAX_LINES, _MAX_NAMES = 1 << 16, 1 << 18
_USED_STATS = ("correlation_id", "step_num", "memcpy_details")


@dataclass(slots=True)
class _Plane:
    """One plane: its lines are decoded once all names are known."""

    name: str = ""
    lines: list[memoryview] = field(default_factory=list)
    events: dict[int, str] = field(default_factory=dict)
    """Name of an event by the id of its metadata."""
    stats: dict[int, str] = field(default_factory=dict)


class XPlane:
    """Importer of XSpace profiles."""

    name: ClassVar[str] = "xplane"
    title: ClassVar[str] = "JAX or XLA profile (xplane.pb)"
    combines_files: ClassVar[bool] = False

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether the file begins with a plane of a host or device."""
        if head[:1] != b"\x0a":
            return False
        return path.name.endswith(".xplane.pb") or bool(_PLANE_NAME.search(head[:_MAX_HEAD_BYTES]))

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield the host of each profile.

        Raises: CannotImportError when a profile has no work of a device.
        """
        for source, account in zip(sources, accounts):
            yield _import_profile(source, account)


def _import_profile(source: Source, account: Account) -> NodeTables:
    data = read_message_bytes(source)
    gathered = GatheredEvents(account)
    tracks, hostname = TrackEvents(gathered), ""
    try:
        for number, value in read_fields(data):
            if number == 1 and not isinstance(value, int):
                _read_plane(value, tracks, account)
            elif number == _HOSTNAME_FIELD:
                hostname = hostname or decode_text(value)[:253]
    except WireError as error:
        account.cut = f"damaged: {error}; everything before was read"
    tracks.finish()
    gathered.finish()
    if not gathered.devices:
        why, account.cut = account.cut, ""
        raise CannotImportError(
            f"{source.path.name}: no work of a TPU or GPU in the profile"
            + (f" ({why}); copy it again in binary" if why else "")
            + "; profile on the device, until after block_until_ready"
        )
    base_ns = tracks.base_ns or 0
    document = Document(base_ns=base_ns if base_ns > _MIN_EPOCH_NS else None)
    node = build_node(gathered, document, source, XPlane.name, STEP_MARKS)
    node.name = hostname
    node.mark_as_xla()
    return node


def _read_plane(data: memoryview, tracks: TrackEvents, account: Account) -> None:
    plane = _Plane()
    damage: WireError | None = None
    try:
        for number, value in read_fields(data):
            if isinstance(value, int):
                continue
            if number == 2:
                plane.name = decode_text(value)[:200]
            elif number == 3 and len(plane.lines) < _MAX_LINES:
                plane.lines.append(value)
            elif number in (4, 5):
                id_, name = _read_metadata(value)
                table = plane.events if number == 4 else plane.stats
                if len(table) < _MAX_NAMES:
                    table[id_] = name
    except WireError as error:
        damage = error
    lines = [(_read_line_head(line), line) for line in plane.lines]
    roles = [classify_track(plane.name, name) for (_, name, _), _ in lines]
    if DEVICE in roles:  # on a GPU the operations are derived from the kernels of the streams
        roles = [DERIVED if role == OPERATIONS else role for role in roles]
    for ((id_, name, timestamp_ns), line), role in zip(lines, roles):
        if role is not None and role != DERIVED:
            track = Track(plane.name, id_, plane.name, name)
            _read_events(line, timestamp_ns, track, role, plane, tracks)
    if damage is not None:
        raise damage


def _read_metadata(entry: memoryview) -> tuple[int, str]:
    """Read an entry of a map of names: its id, and the short name where there is one.

    The name of an operation that waits for a copy from or to the host ends with its direction.
    """
    id_, names, hlo = 0, {}, b""
    for number, value in read_fields(entry):
        if number == 1 and isinstance(value, int):
            id_ = value
        elif number == 2 and not isinstance(value, int):
            for inner, text in read_fields(value):
                if inner in (2, 4) and not isinstance(text, int):
                    names[inner] = decode_text(text[:_MAX_NAME_BYTES])
                    hlo = bytes(text[:_MAX_HLO_BYTES]) if inner == 2 else hlo
    name = names.get(4) or names.get(2, "")
    if written := _HLO_NAME.match(name):  # other operations stand in the text as operands
        name = written[1]
    direction = _find_host_copy(hlo.decode("utf-8", "replace")) if b"-done(" in hlo else ""
    return id_, f"{name} {direction}" if direction else name


def _find_host_copy(hlo: str) -> str:
    """Find which way an awaited copy crosses between host and device: `HtoD`, `DtoH` or empty.

    %copy-done.1 = f32[8]{0:T(8)} copy-done((f32[8]{0:T(8)}, f32[8]{0:T(8)S(5)}, …) …)   HtoD
    """
    if (match := _DONE.search(hlo)) is None:
        return ""
    if match[2] in ("send", "recv"):
        is_host_transfer = "is_host_transfer=true" in hlo
        return ("DtoH" if match[2] == "send" else "HtoD") if is_host_transfer else ""
    if COLLECTIVE.search(match[2]):
        return ""
    if _HOST_MEMORY in match[1]:
        return "DtoH"
    return "HtoD" if _HOST_MEMORY in hlo[match.end() :] else ""


def _read_line_head(line: memoryview) -> tuple[int, str, int]:
    """Read id, name and first instant (ns) of a line."""
    id_, name, timestamp_ns = 0, "", 0
    for number, value in read_fields(line):
        if number == 1 and isinstance(value, int):
            id_ = value
        elif number == 3 and isinstance(value, int):
            timestamp_ns = convert_signed(value)
        elif number == 2 and not isinstance(value, int):
            name = decode_text(value)[:200]
    return id_, name, timestamp_ns


def _read_events(
    line: memoryview, timestamp_ns: int, track: Track, role: int, plane: _Plane, tracks: TrackEvents
) -> None:
    """Read the events of a line; an event begins so many ps after the line."""
    used = {id_: name for id_, name in plane.stats.items() if name in _USED_STATS}
    wants_stats = role in (DEVICE, HOST) and bool(used)
    for number, event in read_fields(line):
        if number != 4 or isinstance(event, int):
            continue
        id_ = offset_ps = duration_ps = 0
        stats: dict[str, int | str] = {}
        for inner, value in read_fields(event):
            if isinstance(value, int):
                if inner == 1:
                    id_ = value
                elif inner == 2:
                    offset_ps = convert_signed(value)
                elif inner == 3:
                    duration_ps = convert_signed(value)
            elif inner == 4 and wants_stats:
                _read_stat(value, used, plane, stats)
        start_ns = timestamp_ns + offset_ps // 1000
        duration_ns = timestamp_ns + (offset_ps + duration_ps) // 1000 - start_ns
        if duration_ns < 0 or abs(start_ns) >= _MAX_TIME_NS or duration_ns >= _MAX_TIME_NS:
            tracks.skip("without a usable time")
            continue
        link, step = stats.get("correlation_id"), stats.get("step_num")
        size = _COPY_SIZE.search(str(stats.get("memcpy_details", "")))
        tracks.add(
            role,
            track,
            plane.events.get(id_, ""),
            start_ns,
            duration_ns,
            link if isinstance(link, int) else -1,
            int(size[1]) if size else -1,
            step=step if isinstance(step, int) else -1,
        )


def _read_stat(
    data: memoryview, used: dict[int, str], plane: _Plane, stats: dict[str, int | str]
) -> None:
    """Add a statistic of an event if it is one of those used."""
    name: str | None = None
    for number, value in read_fields(data):
        if number == 1 and isinstance(value, int):
            name = used.get(value)
        elif name is not None and number in (3, 4) and isinstance(value, int):
            stats[name] = convert_signed(value)
        elif name is not None and number == 5:
            stats[name] = decode_text(value)
        elif name is not None and number == 7 and isinstance(value, int):
            stats[name] = plane.stats.get(value, "")  # the text is a name of the same plane
