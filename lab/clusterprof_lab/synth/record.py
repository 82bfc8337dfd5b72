"""Write a story as recorders would have seen it: one recording folder per node.

    seen = Seen(clocks=clocks(random, story.nodes), jitter_ns=200_000)
    record(story, folder / "recording", random, seen)

Writes what `clusterprof record` would have written: the same collectors at the same intervals, in
the same units, with the same reasons where there is nothing to read. Faults and truth of the story
stay out of the recording: it shows only what threads, devices and counters did.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import clusterprof
from clusterprof.agent.collectors.registry import select_collectors
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.sampling.service import SelfCollector
from clusterprof.errors import Unavailable
from clusterprof.trace.schema import Clock as ClockRecord
from clusterprof.trace.schema import Columns, Event, Gap, Header, Record, Rows
from clusterprof.trace.writer import RecordingWriter
from clusterprof_lab.synth import record_gpu, record_io, record_node, record_spans, record_tables
from clusterprof_lab.synth.record_node import Column
from clusterprof_lab.synth.recorder_view import (
    TICK_NS,
    UPTIME_NS,
    RecorderView,
    RecordingQuality,
    draw_clocks,
)
from clusterprof_lab.synth.recorder_view import hash_to_number as _number
from clusterprof_lab.synth.story import Node, Story

__all__ = ["RecordingQuality", "draw_clocks", "write_story"]

Int = NDArray[np.int64]

EPOCH_NS = 1_767_225_600_000_000_000
"""What people's clocks showed at true time 0, offsets aside."""
_SECOND_NS = 1_000_000_000
_CLOCK_NS = 10 * _SECOND_NS
_INTEGER_UNITS = frozenset({"ns", "bytes", "count", "bits"})
_SAMPLED: dict[str, Callable[[RecorderView, Int], list[Column]]] = {
    "cpu": record_node.make_cpu_columns,
    "cores": record_node.make_core_columns,
    "pressure": record_node.make_pressure_columns,
    "memory": record_node.make_memory_columns,
    "cgroup": record_node.make_cgroup_columns,
    "disk": record_io.make_disk_columns,
    "mounts": record_io.make_mount_columns,
    "network": record_io.make_network_columns,
    "ethtool": record_io.make_ethtool_columns,
    "rdma": record_io.rdma,
    "sockets": record_io.make_socket_columns,
    "gpu_nvidia": record_gpu.make_nvml_columns,
    "gpu_emulated": record_gpu.make_emulator_columns,
    "self": record_node.make_recorder_columns,
}
_KINDS: tuple[type[Any], ...] = (*select_collectors(Roots(), use_portable=False), SelfCollector)
_TABLES = {"threads": record_tables.make_thread_rows, "processes": record_tables.make_process_rows}
_ABSENT = {
    "mounts": Unavailable("absent", "no NFS file system is mounted", ""),
    "ethtool": Unavailable(
        "absent", "no network card here counts pauses, marks of congestion or drops of its port"
    ),
    "rdma": Unavailable("absent", "/sys/class/infiniband: no such file or directory"),
    "gpu_nvidia": Unavailable(
        "absent",
        "libnvidia-ml.so.1 was not found",
        "install the NVIDIA driver, or run the container with the NVIDIA runtime",
    ),
}
"""Why a collector has no column at all; the others then say nothing."""
_OTHERS = tuple(
    name for kind in _KINDS if (name := kind.name) not in _SAMPLED and name not in _TABLES
)
_ABSENT.update({name: Unavailable("absent", "no synthetic node has it", "") for name in _OTHERS})


def write_story(
    story: Story,
    folder: Path,
    random: np.random.Generator,
    seen: RecordingQuality = RecordingQuality(),  # noqa: B008 - it is frozen
    other_jobs: Sequence[Story] = (),
) -> dict[str, Int]:
    """Write one recording per node into a folder, which is made.

    `other_jobs`: they show in the nodes' counters; each is recorded by a call of its own into the
    same folder. Returns when kernels were resident, by folder of the node and device.
    """
    folder.mkdir(parents=True, exist_ok=True)
    resident: dict[str, Int] = {}
    for node in story.nodes.values():
        sight = RecorderView(story, node, other_jobs, seen, random)
        if sight.ranks or not sight.every:
            key = _record_node(sight, folder)
            for device, times in record_gpu.list_resident_times(sight).items():
                resident[f"{key}/{device}"] = times
    return resident


def _record_node(sight: RecorderView, folder: Path) -> str:
    frames = [frame for name in _SAMPLED for frame in _list_columns(sight, name)]
    tables = [
        _TABLES[name](sight, sight.list_ticks(_count_ticks_between(name)))
        for name in _TABLES
        if not sight.seen.explain_missing(name)
    ]
    rings = record_spans.make_rings(sight)
    events = record_spans.make_events(sight, rings)
    gaps = _list_gaps(sight, frames)
    now = [sight.start_ns]

    def clock() -> ClockRecord:
        return ClockRecord(now[0], now[0], EPOCH_NS + now[0] - UPTIME_NS)

    header = _make_header(sight, {collector for collector, _, _ in frames}, clock())
    path = folder / header.node["key"]
    writer = RecordingWriter(path, header, clock, keep_free_bytes=0)
    written_ns = sight.start_ns
    low_ns = sight.start_ns
    while low_ns <= sight.end_ns:
        high_ns = low_ns + _SECOND_NS
        last = high_ns > sight.end_ns
        until_ns = sight.end_ns if last else high_ns - 1
        now[0] = until_ns
        batch: list[Record] = gaps if low_ns == sight.start_ns else []
        batch = [*batch, *(event for event in events if low_ns <= event.t_ns < high_ns)]
        batch += [spans for ring in rings if (spans := ring.take(until_ns))]
        batch += [column for frame in frames for column in _make_frame(frame, low_ns, high_ns)]
        for table in tables:
            columns = [
                array("q", c.tobytes()) for c in record_tables.split_rows(table, low_ns, high_ns)
            ]
            if columns:
                batch.append(Rows(table.name, table.names, columns, table.strings))
        if now[0] - written_ns >= _CLOCK_NS:
            written_ns = now[0]
            batch.append(clock())
        if last:
            batch += [_make_stop(sight), clock()]
        writer.append(*batch)
        low_ns = high_ns
    writer.close()
    return header.node["key"]


def _count_ticks_between(name: str) -> int:
    """How many ticks there are between two samples of a collector."""
    interval_ns = next(kind.interval_ns for kind in _KINDS if kind.name == name)
    return max(1, int(interval_ns) // TICK_NS)


Frame = tuple[str, Int, list[Column]]


def _list_columns(sight: RecorderView, name: str) -> list[Frame]:
    """The columns of a collector; none when it had none, or could not be read."""
    if sight.seen.explain_missing(name):
        return []
    ticks = sight.list_ticks(_count_ticks_between(name))
    columns = _SAMPLED[name](sight, ticks)
    for column in columns:
        column.why = sight.seen.explain_missing(column.signal.name) or column.why
    return [(name, sight.t_ns[ticks], columns)] if columns else []


def _make_frame(frame: Frame, low_ns: int, high_ns: int) -> list[Columns]:
    name, t_ns, columns = frame
    low, high = np.searchsorted(t_ns, [low_ns, high_ns])
    if low == high:
        return []
    values: list[Any] = []
    masks: list[bytes | None] = []
    for column in columns:
        values_in_window = column.values[low:high]
        if column.why is not None:
            values_in_window = np.zeros(high - low)
        if column.signal.unit in _INTEGER_UNITS:
            values.append(array("q", np.rint(values_in_window).astype(np.int64).tobytes()))
        else:
            values.append(array("d", np.asarray(values_in_window, np.float64).tobytes()))
        masks.append(bytes([1]) * (high - low) if column.why is not None else None)
    names = tuple(column.signal.name for column in columns)
    devices = tuple(column.device for column in columns)
    return [Columns(name, names, devices, array("q", t_ns[low:high].tobytes()), values, masks)]


def _list_gaps(sight: RecorderView, frames: Sequence[Frame]) -> list[Record]:
    """Why collectors and columns have no values."""
    gaps: list[Record] = []
    having = {name for name, _, _ in frames} | set(_TABLES)
    for name in (*_SAMPLED, *_TABLES, *_OTHERS):
        why = sight.seen.explain_missing(name) or (
            _ABSENT.get(name) if name not in having else None
        )
        if why is not None:
            gaps.append(_make_gap(sight.start_ns, name, "", "", why))
    for name, t_ns, columns in frames:
        for column in columns:
            if column.why is not None:
                gaps.append(
                    _make_gap(int(t_ns[0]), name, column.signal.name, column.device, column.why)
                )
    return gaps


def _make_gap(t_ns: int, collector: str, signal: str, device: str, why: Unavailable) -> Gap:
    return Gap(t_ns, collector, signal, device, why.kind, why.message, why.remedy)


def _make_stop(sight: RecorderView) -> Event:
    """A recorder ends after the last process, or when it is stopped."""
    left = [r for r in sight.ranks if sight.exits.get(r.main.pid, sight.end_ns + 1) > sight.end_ns]
    reason = "the duration is over" if left or not sight.ranks else "no process is left"
    pid = _get_recorder_pid(sight)
    return Event(sight.end_ns, "recorder-stopped", {"reason": reason, "pid": pid})


def _get_recorder_pid(sight: RecorderView) -> int:
    return 1_000_000 + _number(sight.story.job) % 1_000_000


def _make_header(sight: RecorderView, having: set[str], begin: ClockRecord) -> Header:
    node, story = sight.node, sight.story
    boot = f"{_number(node.name):08x}-0000-4000-8000-000000000000"
    seconds, rest = divmod(begin.realtime_ns, _SECOND_NS)
    start = time.strftime("%Y%m%dT%H%M%S", time.gmtime(seconds))
    key = f"{node.name}-{boot[:8]}-{start}.{rest // 1_000_000:03d}-{_get_recorder_pid(sight)}"
    status = {
        name: why.kind
        if (why := sight.seen.explain_missing(name) or _list_missing(name, having))
        else "available"
        for name in (*_SAMPLED, *_TABLES, *_OTHERS)
    }
    return Header(
        node={
            "key": key,
            "hostname": node.name,
            "display": node.name,
            "boot_id": boot,
            "kernel": "6.18.0",
        },
        started={
            "monotonic_ns": begin.monotonic_ns,
            "boottime_ns": begin.boottime_ns,
            "realtime_ns": begin.realtime_ns,
        },
        host=_make_host(sight, node),
        devices=_list_devices(sight),
        launcher={"job": story.job, "named": True, "variables": {"TORCHELASTIC_RUN_ID": story.job}},
        versions={"clusterprof": clusterprof.__version__, "python": "3.11.7", "schema": "1"},
        profile={},
        collectors=[
            {
                "name": kind.name,
                "interval_ns": kind.interval_ns,
                "status": status.get(kind.name, "absent"),
            }
            for kind in _KINDS
        ],
    )


def _list_missing(name: str, having: set[str]) -> Unavailable | None:
    return _ABSENT.get(name) if name not in having else None


def _make_host(sight: RecorderView, node: Node) -> dict[str, Any]:
    disks = record_io.list_disks(sight)
    speed = int(record_io.LINK_BYTES_PER_SECOND)
    local = [("/", f"/dev/{disks[0]}", "ext4")]
    local += [
        (f"/data-{d}" if d != disks[-1] else "/local", f"/dev/{d}", "ext4") for d in disks[1:]
    ]
    return {
        "cpus": {"count": node.cpus, "model": "synthetic"},
        "disks": [{"name": disk, "size_bytes": 1 << 40, "rotational": False} for disk in disks],
        "nics": [
            {
                "name": nic,
                "link_bytes_per_second": speed,
                "state": "up",
                "mtu": 9000,
                "physical": True,
            }
            for nic in record_io.list_nics(sight)
        ],
        "hcas": [
            {"name": name}
            for name in sorted(
                {device.split("/")[0] for device in sight.list_story_devices("rdma.")}
            )
        ],
        "mounts": [
            {"point": point, "type": kind, "source": source, "device": f"0:{number}"}
            for number, (point, source, kind) in enumerate([*local, *node.mounts])
        ],
        "memory_bytes": record_node.MEMORY_BYTES,
    }


def _list_devices(sight: RecorderView) -> list[dict[str, Any]]:
    devices = []
    tracks = {id(track.thread): track for track in sight.tracks}
    for index, (name, ranks) in enumerate(record_gpu.list_devices(sight).items()):
        if record_gpu.is_emulated(name):
            main = ranks[0].main
            ticks = record_tables.get_start_ticks(tracks[id(main)])
            devices.append(
                {
                    "id": name,
                    "vendor": "clusterprof",
                    "name": "emulated accelerator",
                    "emulated": True,
                    "pid": main.pid,
                    "started_ticks": ticks,
                }
            )
        else:
            devices.append(
                {
                    "id": name,
                    "vendor": "nvidia",
                    "name": "synthetic",
                    "index": index,
                    "emulated": False,
                    "memory_bytes": record_gpu.MEMORY_BYTES,
                }
            )
    return devices
