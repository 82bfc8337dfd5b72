"""Traces of several ranks of a job, and of one rank alone: every number by hand.

Ten steps of 100 ms. In each, a kernel runs from 0 to 10 ms, and one all-to-all that ends at 96 ms
on all ranks. Rank 2 begins it at 95 ms: its host sleeps from 15 to 90 ms in a range of the program.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterprof.analysis.pipeline import analyze
from clusterprof.output.renderers.text.first_screen import build_first_screen
from clusterprof.output.renderers.text.summary import build_summary, describe_nodes, describe_scope
from clusterprof.probe import layout
from clusterprof.report.model import Report
from tests.support.kineto_traces import (
    import_trace,
    list_spans,
    make_device_event,
    make_event,
    make_runtime_call,
    make_step,
    make_trace,
    write_trace,
)

MS, US_NS = 1_000, 1_000
STEPS, RANKS, LATE = 10, 4, 2
SEND = "ncclDevKernel_SendRecv(ncclDevComm*)"


def list_events(rank: int, early: int) -> list[dict[str, Any]]:
    """List the events of a rank; `early` operations were launched before the trace."""
    events = [make_device_event(SEND, 100 * number, 50, 90_000 + number) for number in range(early)]
    for number in range(STEPS):
        at, link = number * 100 * MS + MS, 10 * number
        begin = at + (95 * MS if rank == LATE else 12 * MS)
        events += [
            make_step(number + 1, at - MS, 100 * MS),
            make_runtime_call("cudaLaunchKernel", at, 10, link + 1),
            make_device_event("gemm", at, 10 * MS, link + 1),
            make_runtime_call("cudaLaunchKernel", begin - 20, 10, link + 2),
            make_device_event(SEND, begin, at + 96 * MS - begin + 1000 * (number % 3), link + 2),
            make_event("user_annotation", "# lookup", at + 15 * MS, 75 * MS),
        ]
    return events


def report_on(folder: Path, early: dict[int, int]) -> Report:
    """Report on the traces of all ranks, with the early operations that each still ran."""
    for rank in range(RANKS):
        about = {"distributedInfo": {"rank": rank, "world_size": RANKS}}
        text = make_trace(list_events(rank, early.get(rank, 0)), **about)
        write_trace(folder, text, f"rank{rank}.json")
    return analyze(folder)


@pytest.mark.parametrize("early", [{}, {0: 1, 1: 1, 3: 1}, {0: 2, 1: 1}])
def test_operations_launched_before_the_trace_shift_no_numbers(
    early: dict[int, int], tmp_path: Path
) -> None:
    report = report_on(tmp_path, early)
    late = dict(report.ranks[LATE].caused)["unattributed"]
    own = dict(report.ranks[LATE].buckets)["unattributed"]
    # Three ranks wait in each of ten steps from 12 to 95 ms for the one that sleeps.
    assert late - own == pytest.approx(3 * STEPS * 83 * MS * US_NS, rel=0.1)
    assert not any("sequence numbers" in item.message for item in report.coverage_gaps)


def test_the_first_screen_names_the_late_rank_and_host_code(tmp_path: Path) -> None:
    rows = build_first_screen(report_on(tmp_path, {0: 1, 1: 1, 3: 1}), None, "$").rows
    place = " ".join(row.text for row in rows[rows.index(next_row(rows, "Where")) :])
    assert "rank 2 came last: the other ranks waited" in place
    assert "the host was in # lookup, which launched nothing" in place
    assert "see what the host there does or waits for" in place


def next_row(rows: Any, label: str) -> Any:
    """Return the first row with a label."""
    return next(row for row in rows if row.label == label)


def test_early_operations_are_numbered_backwards_in_separate_groups(tmp_path: Path) -> None:
    about = {"distributedInfo": {"rank": 1, "world_size": RANKS}}
    nodes = [
        import_trace(
            write_trace(tmp_path, make_trace(list_events(1, early), **about), f"{early}.json")
        )[0][0]
        for early in (0, 1, 2)
    ]
    none, single, pair = ([row[2:4] for row in list_spans(n, layout.COLLECTIVE)] for n in nodes)
    assert none == single[1:] == pair[2:] == [(none[0][0], n) for n in range(STEPS)]
    assert pair[1] == single[0] and pair[0] == (single[0][0], single[0][1] - 1)
    assert single[0][0] != none[0][0]


@pytest.mark.parametrize(
    ("names", "about", "scope"),
    [
        # The names that tensorboard_trace_handler gives: host, pid and time.
        (("n1_100.1752181589589738346", "n1_100.1752181589621105859"), {}, "1 node, 1 rank, 1 GPU"),
        (
            ("step3_rank0", "step8_rank0"),
            {"distributedInfo": {"rank": 0, "world_size": 1}},
            "2 traces, 1 rank, 1 GPU",
        ),
        (
            ("rank0", "rank1"),
            {"distributedInfo": {"rank": 0, "world_size": 8}},
            "2 traces, 1 of 8 ranks, 1 GPU",
        ),
        (("a", "b"), {}, "2 traces, 2 ranks, 2 GPUs"),  # of containers, each with a pid 100?
    ],
)
def test_two_trace_windows_of_a_process_are_a_single_rank(
    names: tuple[str, str], about: dict[str, Any], scope: str, tmp_path: Path
) -> None:
    for window, name in enumerate(names):
        base_ns = 1_752_181_589_000_000_000 + window * 5_000_000_000
        text = make_trace(list_events(0, 0), baseTimeNanoseconds=base_ns, **about)
        write_trace(tmp_path, text, f"{name}.pt.trace.json")
    report = analyze(tmp_path)
    assert describe_scope(report).startswith(f"{scope}, {STEPS} steps")
    assert len(report.ranks) == 2  # each window has its own ledger
    nodes = describe_nodes(report)
    assert ("clocks" in nodes) == (scope == "2 traces, 2 ranks, 2 GPUs")


def test_a_single_recorded_rank_is_not_reported_as_waiting(tmp_path: Path) -> None:
    """Whether it waited for others or the transfer took so long, its own trace does not show."""
    about = {"distributedInfo": {"rank": 0, "world_size": RANKS}}
    report = analyze(write_trace(tmp_path, make_trace(list_events(0, 0), **about)))
    assert report.findings[0].cause.title == "Communication with ranks that were not recorded"
    assert "Ranks" not in [row.label for row in build_summary(report, None, "$")]
