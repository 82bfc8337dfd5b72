"""What outputs say about many ranks: one culprit among victims, whatever their number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusterprof.output.renderers.terminal import Terminal
from clusterprof.output.renderers.text import culprits as text_culprits
from clusterprof.output.renderers.text import summary, wording
from clusterprof.output.renderers.text.safety import count_columns
from clusterprof.output.renderers.text.tables import MatrixRow, build_cause_matrix
from clusterprof.report.history import SlowStepSummary
from clusterprof.report.model import Culprit, Finding, JobFacts, Persistence
from tests.support.cluster_report import S, make_cluster_report
from tests.support.reports import make_storage_report

SIZES = [(1, 2), (2, 8), (16, 8), (128, 8)]


def chief(*culprits: Culprit, **changes: object) -> Finding:
    return replace(make_cluster_report(2, 2).findings[0], culprits=culprits, **changes)


def culprit_of(
    node: str, rank: int | None, resource: str = "", own: int = 0, others: int = 0
) -> Culprit:
    return Culprit(node, rank, "", resource, own * S, others * S, 3, 0)


@pytest.mark.parametrize(("nodes", "per_node"), SIZES)
@pytest.mark.parametrize("width", [72, 80, 120])
def test_reports_of_every_size_fit_the_screen(nodes: int, per_node: int, width: int) -> None:
    report = make_cluster_report(nodes, per_node)
    assert wording.list_imbalances(report) == []
    text = Terminal(width).render(report)
    assert [line for line in text.splitlines() if count_columns(line) > width] == []
    head = text.split("\n CAUSES IN FULL")[0].splitlines()
    assert len(head) <= 25 and any(line.startswith(" Not seen: 2 gaps") for line in head)
    # from 2 to 1,024 ranks the report grows by what a few more lines hold
    assert len(text.splitlines()) < 165


def test_the_verdict_names_cause_amount_culprit_and_victims() -> None:
    # 31 s + 127 * 30 s = 64.0 of 640 GPU-minutes
    assert wording.describe_verdict(make_cluster_report()) == (
        "The data path waits for a network file system (storage-remote). This cost the most:"
        " 1.07 of 10.7 GPU-hours (10.0 %), caused by gpu-a04 rank 27 (/data), for which 127 other"
        " ranks waited."
    )
    # 50 s of each rank, 51 of the culprit, 52 of the ranks of one node: 6,417 of 38,400 s
    assert wording.describe_main_cause(make_cluster_report()) == (
        "In total 16.7 % of GPU time inside steps was lost: 1.8 of 10.7 GPU-hours."
    )


def test_the_verdict_of_a_transfer_names_no_culprit() -> None:
    report = make_cluster_report(2, 2)
    transfer = replace(report.findings[1], lost_ns=130 * S, share_ratio=130 / 1200)
    description = wording.describe_verdict(replace(report, findings=(transfer,)))
    assert description == (
        "Exposed communication: all ranks had arrived, data were in transfer (net-transfer). This"
        " cost the most: 2.17 of 20.0 GPU-minutes (10.8 %), not caused by a single rank."
    )
    emulated = wording.describe_verdict(replace(report, findings=(transfer,), emulated=True))
    assert "2.17 of 20.0 emulated GPU-minutes" in emulated


def test_the_verdict_reports_alternating_culprits() -> None:
    report = make_cluster_report(2, 2)
    imbalance = replace(report.findings[2], lost_ns=130 * S, share_ratio=130 / 1200)
    description = wording.describe_verdict(replace(report, findings=(imbalance,)))
    assert description.endswith("(10.8 %), caused by gpu-a1 ranks 0-1, gpu-a2 ranks 2-3 in turn.")


def test_small_gpu_times_are_shown_in_smaller_units() -> None:
    assert wording.format_gpu_time(20 * S, "GPU-hours") == "20.0 GPU-seconds"
    assert wording.format_gpu_time(90 * S, "GPU-hours") == "0.03 GPU-hours"
    assert wording.format_gpu_time(90 * S) == "1.5 GPU-minutes"


@pytest.mark.parametrize(
    ("culprits", "text"),
    [
        ([culprit_of("a1", 3, "vda", 5)], "a1 rank 3 (vda)"),
        ([culprit_of("a1", None, "", 5)], "a1"),
        ([culprit_of("a1", r, "vda", 5) for r in range(8)], "a1 ranks 0-7 (vda)"),
        # three groups by resource are too many for two, one by node is not
        ([culprit_of("a1", r, f"worker {r}", 5) for r in (0, 1, 5)], "a1 ranks 0-1,5"),
        (
            [culprit_of(f"a{r // 2 + 1}", r, "/data", 5) for r in range(6)],
            "a[1-3] ranks 0-5 (/data)",
        ),
        ([culprit_of("a1", None, "", 5), culprit_of("a1", None, "", 5)], "2 processes on a1"),
        # less than a tenth of the first is jitter
        (
            [
                culprit_of("a1", 3, "", 5, 95),
                culprit_of("a1", 4, "", 0, 9),
                culprit_of("a2", 8, "", 9),
            ],
            "a1 rank 3 and 2 more that caused little",
        ),
        ([], ""),
    ],
)
def test_culprits_are_named_together(culprits: list[Culprit], text: str) -> None:
    assert text_culprits.format_culprits(chief(*culprits), 2) == text


def test_culprit_lines_show_own_and_caused_time() -> None:
    mixed = chief(replace(culprit_of("a1", 3, "vda", 20, 60), recoverable_ns=30 * S))
    assert text_culprits.describe_caused_loss(mixed, 3, 1000 * S) == [
        "a1 rank 3 (vda): 80.00 s, 20.00 s its own and 60.00 s of 3 others that waited;"
        " fixing it alone saves 30.00 s, 3.0 %"
    ]
    assert text_culprits.describe_caused_loss(chief(culprit_of("a1", 3, "", 20)), 3, S) == [
        "a1 rank 3: 20.00 s its own"
    ]
    alone = chief(culprit_of("a1", 3, "", 0, 20), upper_bound=True)
    assert text_culprits.describe_caused_loss(alone, 3, S) == [
        "a1 rank 3: at most 20.00 s of 3 others that waited"
    ]
    unknown = chief(Culprit("a1", 3, "", "", 20 * S))
    assert text_culprits.describe_caused_loss(unknown, 3, S) == []


def test_persistence_of_a_culprit_is_described() -> None:
    def printed(kind: str) -> tuple[str, str]:
        result = chief(persistence=Persistence(kind, 12 * S, 47 * S, 30, 40, 5, 28))  # type: ignore[arg-type]
        return text_culprits.describe_persistence(result), text_culprits.summarize_persistence(
            result
        )

    assert printed("steady") == (
        "the same ranks each time: in 28 of 30 time bins of the run with waits",
        "the same ranks each time",
    )
    assert printed("transient") == (
        "only from 12.00 s to 47.00 s of the run",
        "only from 12.00 s to 47.00 s",
    )
    assert printed("wandering") == (
        "different ranks in turn: 5 ranks were the main culprit, in 30 time bins of the run with"
        " waits",
        "different ranks in turn",
    )
    assert text_culprits.describe_persistence(chief(persistence=None)) == ""


def test_the_last_ranks_of_slow_steps_are_listed() -> None:
    report = make_cluster_report(2, 2)
    assert text_culprits.describe_slow_steps(report) == [
        "steps of all ranks: half of them within 740.0 ms, 99 of 100 within 1.31 s",
        "last to arrive in the slowest 4 of 406 steps: gpu-a1 rank 0 (3), gpu-a2 rank 2 (1)",
    ]
    unknown = replace(
        report,
        slow_step_summary=SlowStepSummary(
            7, 0, None, None, (), "fewer than 20 steps were recorded"
        ),
    )
    why = "no rank is named for the slow steps: fewer than 20 steps were recorded"
    assert text_culprits.describe_slow_steps(unknown) == [why]
    assert text_culprits.describe_slow_steps(replace(report, slow_step_summary=None)) == []


def test_the_table_lists_outlier_ranks_and_sums_the_rest() -> None:
    cause_matrix = build_cause_matrix(make_cluster_report(), 6, 2)
    assert cause_matrix is not None and cause_matrix.causes == ("storage-remote", "net-transfer")
    guilty = MatrixRow("27", "gpu-a04", (31 * S, 12 * S, 51 * S + 27), (3841 * S, 0, 3846 * S + 27))
    assert cause_matrix.lines[0] == guilty
    # the eight ranks of one node are alike; 0.1 µs apart in what they felt without a cause
    assert (
        cause_matrix.lines[1].label,
        cause_matrix.lines[1].node,
        cause_matrix.lines[1].ranks,
    ) == ("120-127", "gpu-a16", 8)
    assert cause_matrix.lines[1].victim_ns[:2] == (30 * S, 12 * S)
    assert cause_matrix.lines[1].culprit_ns[:2] == (0, 0)
    assert cause_matrix.lines[1].culprit_ns[2] // S == 55
    assert len(cause_matrix.lines) == 3
    assert (cause_matrix.lines[2].ranks, cause_matrix.rest) == (
        119,
        "119 more ranks, all alike; each",
    )
    assert cause_matrix.lines[2].victim_ns[:2] == (30 * S, 12 * S)


def test_few_ranks_are_all_listed_and_uncompared_ranks_are_not() -> None:
    cause_matrix = build_cause_matrix(make_cluster_report(2, 4), 6, 3)
    assert cause_matrix is not None and cause_matrix.rest == ""
    # by what they caused: the culprit, the other node, the rest; rank r has r ns more than rank 0
    assert [line.label for line in cause_matrix.lines] == ["0", "7", "6", "5", "4", "3", "2", "1"]
    assert build_cause_matrix(make_storage_report(), 6, 3) is None  # ranks were not compared


def test_differing_ranks_in_the_rest_line_show_their_range() -> None:
    report = make_cluster_report(1, 16)
    ranks = [
        replace(r, buckets=(("net-transfer", (10 + at) * S), ("unattributed", 0)))
        for at, r in enumerate(report.ranks)
    ]
    cause_matrix = build_cause_matrix(replace(report, ranks=tuple(ranks)), 2, 2)
    assert cause_matrix is not None and [line.label for line in cause_matrix.lines[:2]] == [
        "0",
        "15",
    ]
    assert (
        cause_matrix.rest
        == "14 more ranks (lost 11.00 s to 24.00 s, caused 5.00 s to 5.00 s); on average"
    )


def test_the_header_describes_nodes_ranks_and_clocks() -> None:
    report = make_cluster_report()
    assert summary.describe_scope(report) == (
        "16 nodes, 128 of 136 ranks, 128 GPUs, 406 steps, 5.2 min (99.8 % covered)"
    )
    assert summary.describe_nodes(report) == "gpu-a[01-16]; clocks aligned within 18.4 µs"
    apart = replace(report, job=JobFacts(128, 0, None, None, "no operation joined them"))
    assert summary.describe_scope(apart) == "16 nodes, 128 ranks, 406 steps, 5.2 min recorded"
    assert summary.describe_clock_alignment(apart) == "clocks not aligned: no operation joined them"
    assert summary.describe_nodes(make_cluster_report(1, 8)) == ""


def test_healthy_nodes_share_a_line_and_damaged_nodes_do_not() -> None:
    nodes = list(make_cluster_report().nodes)
    nodes[4] = replace(nodes[4], damaged_bytes=4096)
    lines = summary.describe_recordings(replace(make_cluster_report(), nodes=tuple(nodes)), 4)
    assert lines == [
        "gpu-a[01-04,06-16]: 5.2 min; recorder 0.40 to 0.55 % of one core; unreadable 0 B;"
        " dropped spans 0",
        "gpu-a05: 5.2 min; recorder 0.44 % of one core; unreadable 4.0 KiB; dropped spans 0",
    ]
