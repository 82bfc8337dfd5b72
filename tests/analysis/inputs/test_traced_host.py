"""What an imported trace says of its host, in the books: hand-made traces of one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from clusterprof.analysis.importers.core.node_tables import UNKNOWN_HOST, NodeTables
from clusterprof.analysis.pipeline import analyze
from clusterprof.output.renderers.text.culprits import format_culprit, format_culprits
from clusterprof.output.renderers.text.summary import describe_fix_savings
from clusterprof.output.renderers.text.wording import describe_no_loss, describe_time_outside_steps
from clusterprof.probe import layout
from clusterprof.report.model import Cause, Culprit, Finding, Report
from clusterprof.trace.encoder import write_node

S = 1_000_000_000


def job(folder: Path, *idle: tuple[float, float]) -> NodeTables:
    """Ten seconds in two steps, 1 and 2, on a device that is idle in between."""
    node = NodeTables("host", "kineto")
    node.add_device("gpu0")
    node.add_rank(7, rank=0, world_size=1, device="gpu0")
    node.add_spans(7, layout.STEP, [0, 5 * S], [5 * S, 10 * S], a=[1, 2], b=2)
    edges = np.array([0, *(round(t * S) for value in idle for t in value), 10 * S], np.int64)
    node.add_busy_time("gpu0", edges[0::2], edges[1::2], 0, 10 * S)
    return node


def books(folder: Path, node: NodeTables) -> dict[str, int]:
    write_node(folder / "run" / "n", node.header(), node.records())
    report: Report = analyze(folder / "run")
    (rank,) = report.ranks
    assert sum(ns for _, ns in rank.buckets) == rank.lost_ns
    return {cause: ns for cause, ns in rank.buckets if ns}


def test_a_gap_before_a_late_launch_is_launch_bound(tmp_path: Path) -> None:
    node = job(tmp_path, (1, 3), (6, 7))
    node.add_spans(7, layout.STARVED, [1 * S], [3 * S], a=S)
    # launching explains 1 of the 2 s in which nothing was queued, and nothing of the other gap
    assert books(tmp_path, node) == {"launch-bound": S, "unattributed": 2 * S}


def test_a_gap_starting_in_a_device_wait_is_sync_time(tmp_path: Path) -> None:
    """It waits for the device until 2.5 s, and launches until 3 s and in all of the second gap."""
    node = job(tmp_path, (1, 3), (3.5, 4.5))
    node.add_spans(7, layout.SYNC, [0], [5 * S // 2], a=layout.WHOLE_NS, b=1)
    gaps = [1 * S, 7 * S // 2], [3 * S, 9 * S // 2]
    node.add_spans(7, layout.STARVED, *gaps, a=[S // 2, S], b=[3 * S // 2, 0])
    assert books(tmp_path, node) == {"h2d-sync": 2 * S, "launch-bound": S}


def test_data_wait_is_split_by_loading_thread_activity(tmp_path: Path) -> None:
    """4 s of waiting: 1 s in reads from nobody knows where, 1 s from a network, 1 s computing."""
    node = job(tmp_path, (1, 5))
    node.add_spans(7, layout.DATA_WAIT, [1 * S], [5 * S], a=0, b=0, c=0)
    node.add_spans(
        7,
        layout.LOADING,
        [1 * S, 2 * S, 3 * S],
        [2 * S, 3 * S, 4 * S],
        a=[S, S, 0],
        b=[0, 0, S],
        d=[0, 2, 0],
    )
    rank_result = books(tmp_path, node)
    stated = ("storage", "storage-remote", "cpu-preprocess", "input-wait")
    assert {cause: round(rank_result[cause] / S, 3) for cause in stated} == dict.fromkeys(
        stated, 1.0
    )
    assert abs(sum(rank_result.values()) - 4 * S) <= 1


def test_a_trace_without_a_device_is_not_reported_as_busy(tmp_path: Path) -> None:
    node = NodeTables("host", "kineto")
    node.add_rank(7, rank=0, world_size=1)
    node.add_spans(7, layout.STEP, [0], [5 * S], a=[1], b=2)
    write_node(tmp_path / "run" / "n", node.header(), node.records())
    no_loss = describe_no_loss(analyze(tmp_path / "run"))
    assert no_loss == "Too little was seen to judge the job: a single step."
    node.add_spans(7, layout.STEP, [5 * S], [9 * S], a=[2], b=2)
    write_node(tmp_path / "longer" / "n", node.header(), node.records())
    no_loss = describe_no_loss(analyze(tmp_path / "longer"))
    assert no_loss == (
        "Too little was seen to judge the job: no device, and what the host did is not known for"
        " 100.0 % of the time in steps."
    )


def test_the_culprit_with_the_longest_peer_waits_is_named() -> None:
    """Rank 2 kept others waiting for 6 s of 8; all lost 10 s by themselves."""
    cause = Cause("launch-bound", "launch", "", "")
    waits = (S, S, 6 * S, 0)
    batch = tuple(
        Culprit("n", rank, "", own_ns=10 * S, others_ns=ns) for rank, ns in enumerate(waits)
    )
    finding = Finding(cause, 48 * S, 0.5, None, 0.9, "A", False, False, culprits=batch)
    assert format_culprits(finding, 2) == "n ranks 0-3; others waited for rank 2 most, 6.00 s"
    few = replace(finding, culprits=tuple(replace(each, others_ns=2 * S) for each in batch))
    assert format_culprits(few, 2) == "n ranks 0-3"


def launches_late(node: NodeTables) -> NodeTables:
    """From 2 s on, 20 steps of 0.4 s; the device is idle for 0.2 s of each: the host is late."""
    at = 2 * S + np.arange(20, dtype=np.int64) * (2 * S // 5)
    node.add_device("gpu0")
    node.add_rank(7, device="gpu0")
    node.add_spans(7, layout.STEP, at, at + 2 * S // 5, a=np.arange(20), b=2)
    node.add_spans(7, layout.STARVED, at, at + S // 5, a=S // 5)
    node.add_busy_time("gpu0", at + S // 5, at + 2 * S // 5, 0, 10 * S)
    return node


def test_a_trace_window_gets_no_startup_finding_or_batch_advice(tmp_path: Path) -> None:
    reports = []
    for is_window in (True, False):
        node = launches_late(NodeTables("", "kineto", key="trace"))
        node.is_window = is_window
        write_node(tmp_path / f"{is_window}" / "n", node.header(), node.records())
        reports.append(analyze(tmp_path / f"{is_window}"))
    window, job_report = reports
    assert (window.is_window_only, job_report.is_window_only) == (True, False)
    ids = [[finding.cause.id for finding in report.findings] for report in reports]
    assert ids == [["launch-bound"], ["launch-bound", "startup"]]
    advice = [{item.id for item in report.findings[0].advice} for report in reports]
    assert "larger-batch" not in advice[0] and "larger-batch" in advice[1]
    assert "before the first step 2.00 s" in describe_time_outside_steps(window)
    savings = [describe_fix_savings(report, report.findings[0]) for report in reports]
    assert savings[0].endswith(" of the recorded window.")
    assert "the job ends" in savings[1]


def test_a_rank_without_a_number_is_never_printed_as_none(tmp_path: Path) -> None:
    node = launches_late(NodeTables("", "kineto", key="trace"))
    node.add_spans(7, layout.DATA_WAIT, [2 * S], [2 * S + S // 5], a=0, b=0, c=0)
    node.add_spans(7, layout.LOADING, [2 * S], [2 * S + S // 5], b=S // 5)
    write_node(tmp_path / "run" / "n", node.header(), node.records())
    report = analyze(tmp_path / "run")
    (preparing,) = (f for f in report.findings if f.cause.id == "cpu-preprocess")
    assert [culprit.resource for culprit in preparing.culprits] == [""]
    assert preparing.advice and "None" not in repr(preparing.advice)


def test_a_rank_of_an_unknown_host_is_named_by_number() -> None:
    assert format_culprit(Culprit(UNKNOWN_HOST, 3, "")) == "rank 3"
    assert format_culprit(Culprit(UNKNOWN_HOST, None, "")) == UNKNOWN_HOST
