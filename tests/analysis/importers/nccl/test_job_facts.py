"""What a log and a benchmark say counts for the traces that are given beside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clusterprof.analysis.attribution.network.split import estimate_benchmark_ns
from clusterprof.analysis.attribution.network.transfer_time import (
    ALL_GATHER,
    ALL_REDUCE,
    TransferCell,
    compute_duration_classes,
)
from clusterprof.analysis.pipeline import analyze
from clusterprof.errors import EXIT_GATE_CANNOT_TELL
from clusterprof.gate import Policy, judge_runs, parse_any_rule
from clusterprof.output.renderers.markdown import Markdown
from clusterprof.output.renderers.plain import Plain
from clusterprof.output.renderers.terminal import Terminal
from clusterprof.report.model import Report
from tests.support.nccl_logs import SOCKETS, TABLE, make_line, write_log


@pytest.fixture
def traces(tmp_path: Path) -> list[Path]:
    """Two ranks, 60 operations of 1 MiB that take 980 us each: ten times what the table says."""
    return [
        write_log(
            tmp_path / f"rank{rank}.jsonl",
            *(
                make_line(
                    rank,
                    n,
                    980.0,
                    100_000 + 1000 * n,
                    coll_perf={
                        "coll": "AllReduce",
                        "coll_sn": n,
                        "coll_msg_size_bytes": 1 << 20,
                        "coll_exec_time_us": 980.0,
                    },
                )
                for n in range(60)
            ),
        )
        for rank in (0, 1)
    ]


def lost(report: Report) -> dict[str, int]:
    return {finding.cause.id: round(finding.lost_ns / 1e6) for finding in report.findings}


def test_a_log_and_benchmark_turn_slow_transfers_into_net_path(
    traces: list[Path], tmp_path: Path
) -> None:
    assert "net-path" not in lost(analyze(traces))
    log, table = tmp_path / "nccl.log", tmp_path / "all_reduce_perf.txt"
    log.write_text(SOCKETS)
    table.write_text(TABLE)
    report = analyze([*traces, log, table])
    # Of 60 * 980 us on two ranks all but 60 * 98 us each: 105.84 ms of 117.6.
    result = lost(report)
    assert result["net-path"] == pytest.approx(106, abs=6)  # durations are counted in classes
    assert result["net-transfer"] == pytest.approx(12, abs=6)
    (path,) = (finding for finding in report.findings if finding.cause.id == "net-path")
    assert path.evidence[0].name == "nccl.socket_channels_count"
    assert path.evidence[0].value == 2
    assert "go through TCP sockets although NCCL saw mlx5_0, mlx5_1" in path.evidence[0].note
    assert any("net-path: 2 channels go through TCP" in answer for answer in report.answers)


def test_a_log_alone_gives_answers_without_a_verdict(tmp_path: Path) -> None:
    log = tmp_path / "nccl.log"
    log.write_text(SOCKETS)
    report = analyze(log)
    assert any("although NCCL saw mlx5_0" in answer for answer in report.answers)
    assert (report.ranks, report.too_little_seen) == ((), "no training process was recorded")
    verdict = judge_runs(report, [parse_any_rule("lost.ratio <= 5%")], Policy())
    assert verdict.exit_code == EXIT_GATE_CANNOT_TELL
    for text in (Terminal().render(report), Plain().render(report), Markdown().render(report)):
        assert "although NCCL saw mlx5" in " ".join(text.split()[:80])  # on the first screen


def test_an_nccl_tests_table_alone_gives_an_answer(tmp_path: Path) -> None:
    table = tmp_path / "all_reduce_perf.txt"
    table.write_text(TABLE)
    (answer,) = analyze(table).answers
    assert answer.startswith("Nccl-tests") and answer.endswith("on average")


def cell(operation: int, members: int, size: int, overlapped: bool = False) -> TransferCell:
    class_ = int(compute_duration_classes(np.array([size]))[0])
    return TransferCell(frozenset((0, 1)), operation, members, class_, overlapped, 3, 3 * size)


def test_benchmark_times_are_interpolated_between_sizes() -> None:
    table = [(ALL_REDUCE, 1000, 50), (ALL_REDUCE, 2000, 90), (ALL_GATHER, 4000, 70)]
    assert estimate_benchmark_ns(cell(ALL_REDUCE, 2, 1500), table) == 70
    assert (
        estimate_benchmark_ns(cell(ALL_REDUCE, 2, 8000), table) == 360
    )  # at the rate of the largest
    assert estimate_benchmark_ns(cell(ALL_REDUCE, 2, 10), table) == 50  # no less than the smallest
    assert (
        estimate_benchmark_ns(cell(ALL_GATHER, 4, 1000), table) == 70
    )  # its tables count what comes out
    assert estimate_benchmark_ns(cell(ALL_REDUCE, 2, 1500, overlapped=True), table) is None
    assert estimate_benchmark_ns(cell(8, 2, 1500), table) is None
    assert estimate_benchmark_ns(cell(ALL_REDUCE, 2, 1500), ()) is None
