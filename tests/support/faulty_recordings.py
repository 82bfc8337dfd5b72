"""Recordings of several machines: clocks of their own, names, events, and what breaks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clusterprof.analysis.cross_rank.pipeline import analyze_across_ranks
from clusterprof.analysis.cross_rank.state import JobState
from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.node.analyze import NodeResult, analyze_node
from clusterprof.analysis.pipeline import analyze
from clusterprof.report.model import Report
from clusterprof.trace.reader import list_node_folders
from clusterprof.trace.schema import Clock, Columns, Event, Record, Rows, Spans
from clusterprof.trace.writer import RecordingWriter
from tests.support.builders import make_header
from tests.support.recordings import MAIN, SECOND, Script, iterate_seconds
from tests.support.report_laws import check_conservation
from tests.support.waiting_jobs import STEPS, make_scripts, sum_rank_seconds

HOUR = 3600 * SECOND


@dataclass(frozen=True)
class Machine:
    """Where a script runs; times of a script begin at `ahead_ns` of the machine's own clock."""

    name: str
    boot_id: str = ""
    """"" = one of its own."""
    ahead_ns: int = 0
    wall_ns: int = 0
    """What its wall clock shows then."""
    job: str = ""
    """Of the recorder, when all nodes know it by that name."""
    started_ticks: int = 1


def write_on(machine: Machine, script: Script, folder: Path, events: Sequence[Event] = ()) -> Path:
    """Write the recording of a script on a machine; `events` in the script's own time."""
    now = [machine.ahead_ns]

    def clock() -> Clock:
        return Clock(now[0], now[0], now[0] - machine.ahead_ns + machine.wall_ns)

    plain = make_header()
    node = {
        "key": folder.name,
        "hostname": machine.name,
        "display": machine.name,
        "boot_id": machine.boot_id or f"boot-of-{folder.name}",
        "kernel": "6",
    }
    started = {"monotonic_ns": now[0], "boottime_ns": now[0], "realtime_ns": machine.wall_ns}
    launcher = {"job": machine.job, "named": bool(machine.job), "variables": {}}
    head = replace(plain, node=node, started=started, launcher=launcher)
    writer = RecordingWriter(folder, head, clock, keep_free_bytes=0)
    for second, records in enumerate(iterate_seconds(script)):
        now[0] = machine.ahead_ns + second * SECOND
        new = [event for event in events if second * SECOND <= event.t_ns < (second + 1) * SECOND]
        writer.append(*(_shift_clock(value, machine) for value in [*records, *new]))
    writer.close()
    return folder


def _shift_clock(record: Record, machine: Machine) -> Record:
    by = machine.ahead_ns

    def later(column: Any) -> Any:
        return array("q", [value + by for value in column])

    if isinstance(record, Columns):
        return replace(record, t_ns=later(record.t_ns))
    if isinstance(record, Rows):
        columns = [
            later(column)
            if name == "t_ns"
            else array("q", [machine.started_ticks] * len(column))
            if name == "started_ticks"
            else column
            for name, column in zip(record.names, record.columns)
        ]
        return replace(record, columns=columns)
    if isinstance(record, Spans):
        moved = {
            name: later(column) if name in ("start_ns", "end_ns") else column
            for name, column in record.columns.items()
        }
        return replace(record, columns=moved, started_ticks=machine.started_ticks)
    assert isinstance(record, Event)
    values = dict(record.attributes)
    if "started_ticks" in values:
        values["started_ticks"] = machine.started_ticks
    if "start_ns" in values:
        values["start_ns"] += by
    return Event(record.t_ns + by, record.kind, values)


def make_group_event(group: int, ranks: Sequence[int], t_ns: int = SECOND) -> Event:
    """Make the event that announces the members of a process group."""
    return Event(t_ns, "group-announced", {"pid": MAIN, "group": group, "ranks": list(ranks)})


def make_unfinished_operation(
    t_ns: int, start_ns: int, group: int, number: int, operation: int
) -> Event:
    """Make the event of an operation that began and has not ended."""
    reported = {
        "pid": MAIN,
        "started_ticks": 1,
        "start_ns": start_ns,
        "group": group,
        "number": number,
        "bytes": 1000,
        "operation": operation,
    }
    return Event(t_ns, "operation-under-way", reported)


def make_exit_event(t_ns: int, exit_code: int | None, signal: int | None) -> Event:
    """Make the event of a rank's process that ended."""
    reported = {
        "pid": MAIN,
        "started_ticks": 1,
        "wait_status": None,
        "exit_code": exit_code,
        "signal": signal,
    }
    return Event(t_ns, "process-exited", reported)


def truncate_in_a_frame(folder: Path, share: float) -> None:
    """Keep only the beginning of a recording, cut in the middle of a frame."""
    (segment,) = folder.glob("*.cpf")
    data = segment.read_bytes()
    segment.write_bytes(data[: round(share * len(data))])


# What `make_scripts((0.0, 0.3), (0.2, 0.3))` says of rank 0 when both are recorded (test_waits.py).
BLAMED = {"net-transfer": 6.0, "storage-local": 6.0, "cpu-preprocess": 6.0}


def make_two_ranks(steps: int = STEPS) -> list[Script]:
    return make_scripts((0.0, 0.3), (0.2, 0.3), steps=steps)


def add_launcher_variables(script: Script, **variables: str) -> Script:
    script.variables = {**script.variables, **variables}
    return script


def remove_launcher_variables(script: Script, *names: str) -> Script:
    script.variables = {k: v for k, v in script.variables.items() if k not in names}
    return script


def analyze_recordings(folder: Path) -> Report:
    report = analyze(folder)
    check_conservation(report)
    return report


def analyze_nodes(folder: Path) -> list[NodeResult]:
    return [analyze_node(value, build_limits({})) for value in list_node_folders(folder)]


def analyze_together(folder: Path) -> JobState:
    return analyze_across_ranks(analyze_nodes(folder))


def list_lost_by_rank(report: Report, rank: int) -> list[dict[str, float]]:
    """List what each process of this rank lost, in the order of the recordings."""
    rows = [row for row, item in enumerate(report.ranks) if item.rank == rank]
    return [sum_rank_seconds(report, row) for row in rows]
