"""Eight ranks of a recommendation model: waiting separated from transfer, and rank 7 named.

What happens in each step stands in tests/recordings/dlrm-8rank/make.py. By hand, in microseconds
of each of the 40 steps (seven ranks wait for the late one, which itself collects or copies):

    rank 7 collects        8 x 7,600
    rank 5, rank 4 copy    8 x   500, 8 x 200
    transfer               8 x   300, 300, 100, 100
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from clusterprof.analysis.pipeline import analyze
from clusterprof.report.model import Report
from clusterprof.trace.dump import export_records

FOLDER = Path(__file__).parents[1] / "recordings" / "dlrm-8rank"
US, STEPS, RANKS = 1_000, 40, 8
GC_US = STEPS * RANKS * 7_600
H2D_US = STEPS * RANKS * (500 + 200)
TRANSFER_US = STEPS * RANKS * (300 + 300 + 100 + 100)
LOST_US = GC_US + H2D_US + TRANSFER_US
IN_STEP_US = STEPS * RANKS * 15_000


@pytest.fixture(scope="module")
def report() -> Report:
    return analyze(FOLDER)


def test_ledger_sums_match_the_hand_computation(report: Report) -> None:
    assert LOST_US == 2_912_000  # 40 x (60,800 + 5,600 + 6,400)
    assert (report.in_step_ns, report.productive_ns, report.lost_ns) == (
        IN_STEP_US * US,
        (IN_STEP_US - LOST_US) * US,
        LOST_US * US,
    )
    assert (report.outside_buckets, report.unmeasured_ns) == ((("startup", RANKS * 10**9),), 0)
    assert report.window_ns == IN_STEP_US * US + RANKS * 10**9
    assert report.unattributed_reasons == ()


def test_rank_7_leads_the_findings_before_the_network(report: Report) -> None:
    rows = [
        (finding.cause.id, finding.lost_ns, [(c.node, c.rank) for c in finding.culprits])
        for finding in report.findings
        if not finding.outside_steps
    ]
    assert rows == [
        ("cpu-gc", GC_US * US, [("gpu-b", 7)]),
        ("net-transfer", TRANSFER_US * US, []),
        ("h2d-copy", H2D_US * US, [("gpu-b", 5), ("gpu-b", 4)]),
    ]
    assert [round(finding.share_ratio, 4) for finding in report.findings[:3]] == [
        0.5067,
        0.0533,
        0.0467,
    ]
    assert all(finding.upper_bound for finding in report.findings[:3])  # no device was measured


def test_every_rank_loses_the_same_time_to_the_same_causes(report: Report) -> None:
    """The reason why no graph of utilisation shows who it was."""
    for rank, item in enumerate(report.ranks):
        buckets = {"cpu-gc": 7_600, "net-transfer": 800, "h2d-copy": 700}
        assert {id_: ns for id_, ns in item.buckets if ns} == {
            id_: STEPS * us * US for id_, us in buckets.items()
        }
        assert (item.rank, item.node, item.steps) == (rank, "gpu-a" if rank < 4 else "gpu-b", STEPS)
        assert (item.in_step_ns, item.lost_ns) == (600_000 * US, 364_000 * US)


def test_the_builder_reproduces_the_stored_recording(tmp_path: Path) -> None:
    runpy.run_path(str(FOLDER / "make.py"))["main"](tmp_path)
    assert list(export_records(tmp_path)) == list(export_records(FOLDER))
