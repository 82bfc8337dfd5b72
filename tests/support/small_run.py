"""Two nodes of one rank each, written as a recorder would; every number can be done in one's head.

Common time 0 s is 1,700,000,000 s after 1970. Node a's clock shows the same seconds, node b's is
5 s ahead. Both ranks have pid 100. Times below are common seconds.

    node a   rank 0   step 0 1.0-2.0, data_wait 1.0-1.4, forward 1.4-1.6, tokenise 1.5-1.8
             worker   fetch 1.0-1.3
             GPU-0    busy 50 % 1.0-1.1, not read at 1.2, then busy at 1.3
    node b   rank 1   step 0 1.0-2.1, checkpoint 1.0-2.0
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterprof.analysis.timeline.model import Int
from clusterprof.output.exporters.base import Run, RunNode, RunRank
from clusterprof.probe import layout
from clusterprof.report.history import History, RankHistory, Wait
from clusterprof.report.model import RankLedger, Report
from clusterprof.trace.schema import SPAN_FIELDS, Clock, Columns, Event, Gap, Header, Record, Spans
from clusterprof.trace.writer import RecordingWriter
from tests.support.reports import S, make_clean_report

EPOCH = 1_700_000_000 * S
AHEAD = {"a": 0, "b": 5 * S}
PID, WORKER, TICKS = 100, 201, 7
MS = 1_000_000


def make_time_ns(seconds: float) -> int:
    """Return seconds of the common clock as ns since 1970."""
    return EPOCH + round(seconds * S)


def _make_header(node: str, display: str) -> Header:
    key = f"node-{node}-0badcafe-1"
    own = S + AHEAD[node]
    return Header(
        {"key": key, "hostname": display, "display": display, "boot_id": node, "kernel": "6"},
        {"monotonic_ns": own, "boottime_ns": own, "realtime_ns": EPOCH + S},
        {"mounts": [], "nics": [], "disks": []},
        [{"id": f"GPU-{node}", "pid": PID}],
        {"variables": {}},
        {},
        {},
        [],
    )


def _make_spans(pid: int, ahead: int, rows: list[tuple[Any, ...]], names: dict[int, str]) -> Spans:
    table = [
        (round(s * S) + ahead, round(e * S) + ahead, k, *(*v, 0, 0, 0, 0)[:4])
        for k, s, e, *v in rows
    ]
    columns = {name: array("q", [row[i] for row in table]) for i, name in enumerate(SPAN_FIELDS)}
    return Spans(pid, TICKS, 1, 0, names, columns)


def _make_registration(rank: int, ahead: int) -> Event:
    variables = {"RANK": str(rank), "WORLD_SIZE": "2"}
    reported = {"pid": PID, "started_ticks": TICKS, "role": "python", "variables": variables}
    return Event(S + ahead, "process-registered", {**reported, "rank": rank, "world_size": 2})


def _make_records(node: str, user_span: str) -> list[Record]:
    ahead = AHEAD[node]
    if node == "b":
        rows = [(layout.CHECKPOINT, 1.0, 2.0, 4096), (layout.STEP, 1.0, 2.1, 0, 1, -1, -1)]
        return [_make_registration(1, ahead), _make_spans(PID, ahead, rows, {})]
    times = [S, S + 100 * MS, S + 200 * MS, S + 300 * MS]
    gpu = Columns(
        "gpu_nvidia",
        ("gpu.busy_ns_total", "gpu.power_watts"),
        ("GPU-a", "GPU-a"),
        array("q", times),
        (array("q", [0, 50 * MS, 0, 150 * MS]), array("d", [300, 300, 400, 90])),
        (b"\0\0\1\0", None),
    )
    disk = Columns(
        "disk",
        ("disk.read_bytes_total", "disk.read_bytes_total"),
        ("sda", "sdb"),
        array("q", times[:2]),
        (array("q", [7, 7]), array("q", [0, 1000])),
        (None, None),
    )
    rows = [
        (layout.DATA_WAIT, 1.0, 1.4, 3, WORKER, 1, -1),
        (layout.FORWARD, 1.4, 1.6),
        (layout.FIRST_USER_KIND, 1.5, 1.8),
        (layout.STEP, 1.0, 2.0, 0, 1, 8, -1),
    ]
    worker = [(layout.WORKER_START, 0.5, 0.5, 0, 1, PID), (layout.FETCH, 1.0, 1.3, 8, 5, 6, 4096)]
    return [
        _make_registration(0, ahead),
        Event(S + 50 * MS, "gpu-xid", {"xid": 79, "device": "GPU-a"}),
        Gap(S + 150 * MS, "gpu_nvidia", "gpu.busy_ns_total", "GPU-a", "failed", "timed out", ""),
        gpu,
        disk,
        _make_spans(WORKER, ahead, worker, {}),
        _make_spans(PID, ahead, rows, {layout.FIRST_USER_KIND: user_span}),
        Clock(2 * S, 2 * S, EPOCH + 2 * S),
    ]


def write_recordings(
    folder: Path, names: dict[str, str] | None = None, user_span: str = "tokenise"
) -> Path:
    """Write the recording of both nodes; `names`: what they are called."""
    for node in AHEAD:
        header = _make_header(node, (names or {}).get(node, f"node-{node}"))
        own = S + AHEAD[node]
        writer = RecordingWriter(
            folder / header.node["key"],
            header,
            lambda own=own: Clock(own, own, EPOCH + S),
            keep_free_bytes=0,
        )
        writer.append(*_make_records(node, user_span))
        writer.close()
    return folder


def _make_rank(place: int, node: str) -> RankLedger:
    plain = make_clean_report().ranks[0]
    lost = (("storage-local", 300 * MS), ("unattributed", 50 * MS))
    return replace(
        plain,
        node=node,
        rank=place,
        pid=PID,
        device="GPU-a" if not place else "GPU-b",
        window_ns=S,
        unmeasured_ns=0,
        outside_ns=0,
        in_step_ns=S,
        productive_ns=650 * MS,
        lost_ns=350 * MS,
        buckets=lost,
        outside_buckets=(),
        steps=1,
        caused=(("storage-local", 300 * MS * 2 * place), ("unattributed", 50 * MS)),
    )


def make_report(names: dict[str, str] | None = None, cause: str = "storage-local") -> Report:
    """Make a report of the run: rank 0 waited from 1.2 to 1.7 s for rank 1."""
    called = [(names or {}).get(node, f"node-{node}") for node in AHEAD]
    lost = ((cause, (200 * MS, 100 * MS)), ("unattributed", (0, 50 * MS)))
    ranks = tuple(RankHistory(place, (S // 2, S // 2), lost, ()) for place in (0, 1))
    waits = (Wait(200 * MS, 500 * MS, 0, 1, cause, 0), Wait(900 * MS, 50 * MS, 1, None, "", None))
    history = History(make_time_ns(1), S // 2, 2, ranks, waits)
    return replace(
        make_clean_report(),
        ranks=tuple(_make_rank(at_, name) for at_, name in enumerate(called)),
        history=history,
        window_ns=2 * S,
        outside_ns=0,
        in_step_ns=2 * S,
        productive_ns=1300 * MS,
        lost_ns=700 * MS,
        outside_buckets=(),
        unattributed_ns=100 * MS,
    )


def make_run(folder: Path, result: Report, names: dict[str, str] | None = None) -> Run:
    """Make the run as exporters get it, with clock offsets known by hand."""
    nodes = []
    for place, node in enumerate(AHEAD):
        header = _make_header(node, (names or {}).get(node, f"node-{node}"))
        key = header.node["key"]

        def common(t_ns: Int, ahead: int = AHEAD[node]) -> Int:
            return t_ns - ahead + EPOCH

        rank = RunRank(place, place, PID, TICKS, f"GPU-{node}", False)
        nodes.append(
            RunNode(
                folder / key, key, header.node["display"], header, S + AHEAD[node], (rank,), common
            )
        )
    return Run(result, tuple(nodes))
