"""Recordings made from records in memory: one rank, its worker and its device."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from clusterprof.probe import layout
from clusterprof.trace.schema import SPAN_FIELDS, Clock, Columns, Event, Header, Record, Rows, Spans
from clusterprof.trace.writer import RecordingWriter
from tests.support.builders import make_header, ns, parse_activity

MAIN, WORKER = 100, 201
SECOND = 1_000_000_000
_THREAD_COLUMNS = (
    "t_ns",
    "pid",
    "tid",
    "state",
    "on_cpu_ns_total",
    "run_delay_ns_total",
    "user_ns_total",
    "system_ns_total",
    "block_io_delay_ns_total",
    "major_faults_total",
    "wchan",
)
_RUNS = ("R", 0)
_LETTERS = {
    "U": _RUNS,
    "K": _RUNS,
    "R": _RUNS,
    "D": ("D", 1),
    "S": ("S", 2),
    "I": ("S", 3),
    "N": ("D", 4),
    "W": ("S", 5),
    "L": ("S", 6),
    "F": ("D", 7),
}
_RECEIVED = "network.receive_bytes_total"
WCHAN = (
    "0",
    "folio_wait_bit_common",
    "schedule_timeout",
    "do_poll.constprop.0",
    "rpc_wait_bit_killable",
    "sk_wait_data",
    "futex_wait_queue",
    "jbd2_log_wait_commit",
)


@dataclass
class Script:
    """The events of a node in seconds, turned into records by `iterate_seconds`."""

    end: float
    main_spans: list[tuple] = field(default_factory=list)
    """(kind, start, end, a, b, c, d)"""
    worker_spans: list[tuple] = field(default_factory=list)
    main: str = ""
    """Activity of the main thread, as in `builders.activity`."""
    worker: str = ""
    busy: Sequence[tuple[float, float]] | None = None
    """When the device was busy; None = there is no device."""
    unread: Sequence[int] = ()
    """Device samples (10 per second) that failed."""
    sampled: bool = True
    """False = no thread was sampled."""
    written: int = 0
    """Bytes that each process writes per second."""
    variables: dict[str, str] = field(default_factory=lambda: {"RANK": "0"})
    gauges: dict[str, Sequence[tuple[float, float, float]]] = field(default_factory=dict)
    """Signal of the device -> (start, end, value); a reading is the mean since the one before."""
    writes: Sequence[tuple[float, float]] = ()
    """When the main thread writes, 100 MB a second."""
    others: dict[int, tuple[float, str, list[tuple]]] = field(default_factory=dict)
    """Further children of the rank: pid -> (first instant, activity from then on, spans)."""
    network: dict[tuple[str, str], float] = field(default_factory=dict)
    """(signal, device) -> growth of a counter per second, or the value of a gauge."""


def write_recording(script: Script, folder: Path) -> Path:
    """Write the recording of one node as the recorder would, a second at a time."""
    now = [0]

    def clock() -> Clock:
        return Clock(now[0], now[0], now[0])

    writer = RecordingWriter(folder, _make_header(script, folder.name), clock, keep_free_bytes=0)
    for second, records in enumerate(iterate_seconds(script)):
        now[0] = second * SECOND
        writer.append(*records)
    writer.close()
    return folder


def _make_header(script: Script, key: str) -> Header:
    devices = [] if script.busy is None else [{"id": "emulated-0", "emulated": True, "pid": MAIN}]
    plain = make_header()
    node = {**plain.node, "key": key, "display": key, "boot_id": f"boot of {key}"}
    nics = [{"name": d, "physical": True} for n, d in script.network if n == _RECEIVED]
    return replace(plain, node=node, devices=devices, host={**plain.host, "nics": nics})


def iterate_seconds(script: Script) -> Iterator[list[Record]]:
    """Yield the records of each second; spans belong to the second in which they end."""
    rows = {MAIN: parse_activity(script.main), WORKER: parse_activity(script.worker)}
    rows |= {pid: parse_activity(doing, at) for pid, (at, doing, _) in script.others.items()}
    spans_of = {MAIN: script.main_spans, WORKER: script.worker_spans}
    spans_of |= {pid: spans for pid, (_, _, spans) in script.others.items()}
    handed = dict.fromkeys(spans_of, 0)
    spent = {pid: SpentTime(doing) for pid, doing in rows.items()}
    busy = [(ns(begin), ns(end)) for begin, end in script.busy or ()]
    for second in range(int(script.end) + 1):
        low, high = second * SECOND, min((second + 1) * SECOND, ns(script.end))
        times = range(low, high + (1 if high == ns(script.end) else 0), SECOND // 10)
        records: list[Record] = []
        if second == 0:
            records.append(Event(0, "process-registered", _make_registration(script)))
        if script.busy is not None and times:
            records.append(_make_device_columns(script, busy, times))
        if script.network and times:
            records.append(_make_network_columns(script, times[0]))
        if times and script.sampled:
            records.append(_make_thread_rows(spent, times))
            alive = [pid for pid, doing in rows.items() if _is_alive(pid, doing, times[0])]
            records.append(_make_process_rows(times[0], script.written, script.writes, alive))
        for pid, spans in spans_of.items():
            mine = sorted(spans, key=lambda span: span[2])
            new = [span for span in mine[handed[pid] :] if ns(span[2]) <= high]
            if new:
                records.append(_make_spans(pid, handed[pid] + 1, new))
                handed[pid] += len(new)
        yield records


def _make_registration(script: Script) -> dict:
    return {
        "pid": MAIN,
        "started_ticks": 1,
        "role": "python",
        "variables": script.variables,
        "device": "" if script.busy is None else "emulated-0",
    }


def _make_device_columns(
    script: Script, busy: Sequence[tuple[int, int]], times: Sequence[int]
) -> Columns:
    total = [sum(max(0, min(t, e) - s) for s, e in busy if s < t) for t in times]
    mask = bytes(1 if t // (SECOND // 10) in script.unread else 0 for t in times)
    gauges = [array("d", _average_gauge(of, times)) for of in script.gauges.values()]
    return Columns(
        "gpu_emulated",
        ["gpu.busy_ns_total", *script.gauges],
        ["emulated-0"] * (1 + len(gauges)),
        array("q", times),
        [array("q", total), *gauges],
        [mask if any(mask) else None, *(None for _ in gauges)],
    )


def _average_gauge(held: Sequence[tuple[float, float, float]], times: Sequence[int]) -> list[float]:
    tick = SECOND // 10
    return [
        sum(v * max(0, min(t, ns(e)) - max(t - tick, ns(s))) for s, e, v in held) / tick
        for t in times
    ]


def _make_network_columns(script: Script, t_ns: int) -> Columns:
    """One reading a second."""
    values = [
        round(value * t_ns / SECOND) if name.endswith("_total") else round(value)
        for (name, _), value in script.network.items()
    ]
    return Columns(
        "network",
        [name for name, _ in script.network],
        [device for _, device in script.network],
        array("q", [t_ns]),
        [array("q", [value]) for value in values],
        [None] * len(values),
    )


_CPU_TIMES = ("UK", "R", "U", "K")
"""Letters of the columns of a thread: on a CPU, waiting for one; on one in user, in system code."""


class SpentTime:
    """How long an activity has been in which letters, at any time; rows follow each other."""

    def __init__(self, doing: list[tuple[int, int, str]]) -> None:
        self.doing = doing
        self._starts = [start for start, _, _ in doing]
        self._before = [(0,) * len(_CPU_TIMES)]
        for row in doing:
            self._before.append(self._add(self._before[-1], row, row[1]))

    def find_letter(self, t_ns: int) -> str:
        index = bisect_right(self._starts, t_ns) - 1
        return self.doing[index][2] if index >= 0 and t_ns < self.doing[index][1] else "I"

    def sum_ns(self, t_ns: int) -> tuple[int, ...]:
        """Return the time before `t_ns` in each of _CPU_TIMES, ns."""
        index = bisect_right(self._starts, t_ns) - 1
        if index < 0:
            return self._before[0]
        return self._add(self._before[index], self.doing[index], t_ns)

    @staticmethod
    def _add(before: tuple[int, ...], row: tuple[int, int, str], t_ns: int) -> tuple[int, ...]:
        start, end, letter = row
        length = min(end, t_ns) - start
        return tuple(ns + length * (letter in letters) for ns, letters in zip(before, _CPU_TIMES))


def _make_thread_rows(spent: dict[int, SpentTime], times: Sequence[int]) -> Rows:
    table = []
    for t in times:
        for pid, own in spent.items():
            if not _is_alive(pid, own.doing, t):
                continue
            state, wchan = _LETTERS[own.find_letter(t)]
            table.append([t, pid, pid, ord(state), *own.sum_ns(t), -1, 0, wchan])
    columns = [array("q", column) for column in zip(*table)]
    return Rows("threads", _THREAD_COLUMNS, columns, {"wchan": WCHAN})


def _is_alive(pid: int, doing: list, t_ns: int) -> bool:
    """Return whether a process is there; the rank and its first worker are all the time."""
    return pid in (MAIN, WORKER) or doing[0][0] <= t_ns < doing[-1][1]


def _make_process_rows(
    t_ns: int, written: int, writes: Sequence[tuple[float, float]], alive: Sequence[int]
) -> Rows:
    wrote = sum(max(0, min(t_ns, ns(e)) - min(t_ns, ns(s))) for s, e in writes) // 10
    evenly = written * t_ns // SECOND
    names = (
        "t_ns",
        "pid",
        "parent_pid",
        "started_ticks",
        "rss_bytes",
        "read_chars_total",
        "write_chars_total",
        "read_bytes_total",
        "write_bytes_total",
        "threads_count",
        "name",
    )
    table = [
        [
            t_ns,
            pid,
            parent,
            1,
            1 << 20,
            t_ns // 1000,
            evenly,
            t_ns // 1000,
            evenly + wrote * (pid == MAIN),
            1,
            0,
        ]
        for pid, parent in ((pid, 1 if pid == MAIN else MAIN) for pid in alive)
    ]
    return Rows(
        "processes", names, [array("q", column) for column in zip(*table)], {"name": ("python",)}
    )


def _make_spans(pid: int, sequence: int, spans: Sequence[tuple]) -> Spans:
    rows = [[ns(s[1]), ns(s[2]), s[0], *(*s[3:], 0, 0, 0, 0)[:4]] for s in spans]
    columns = {name: array("q", [row[i] for row in rows]) for i, name in enumerate(SPAN_FIELDS)}
    return Spans(pid, 1, sequence, 0, {}, columns)


def make_training(
    steps: Sequence[tuple[float, float]], *, begin: float = 1.0, hidden: bool = False
) -> Script:
    """A job of steps (wait_s, compute_s); for half of each wait a worker reads, then it decodes.

    The device computes for compute_s after each wait; with `hidden` also all through the waits.
    """
    script = Script(end=0.0, busy=[])
    main, worker, busy = [f"U{begin}"], [f"I{begin}"], []
    script.worker_spans.append((layout.WORKER_START, 0.5, 0.5, 0, 1, MAIN))
    at = begin
    for number, (wait, compute) in enumerate(steps):
        half = round(wait / 2, 6)
        cpu = [ns(wait - half), 0]
        script.worker_spans.append((layout.FETCH, at, at + wait, 8, *cpu, 1 << 20))
        script.main_spans.append((layout.DATA_WAIT, at, at + wait, number, WORKER, 1, number == 0))
        script.main_spans.append((layout.STEP, at, at + wait + compute, number))
        busy.append((at if hidden else at + wait, at + wait + compute))
        main += [f"I{wait}", f"U{compute}"]
        worker += [f"D{half}", f"U{wait - half}", f"I{compute}"]
        at = round(at + wait + compute, 6)
    script.main, script.worker = " ".join(main), " ".join(worker)
    script.busy, script.end = busy, at + 1.0
    return script
