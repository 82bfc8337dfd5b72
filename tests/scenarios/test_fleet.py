"""200 jobs of a simulated cluster with known bad nodes: the ledger names these and no others."""

from __future__ import annotations

import pytest

from clusterprof.analysis.pipeline import AnalysisRequest
from clusterprof.fleet.database import open_ledger
from clusterprof.fleet.intake import find_runs, update_ledger
from clusterprof.fleet.queries import FleetSummary, summarize_ledger
from clusterprof_lab.fleet import USERS, FleetTruth, make_fleet, make_templates
from tests.support.fleet_jobs import find_node

JOBS = 240


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> tuple[FleetTruth, FleetSummary]:
    """Reports of analyses of recordings that the lab has simulated, in a ledger."""
    folder = tmp_path_factory.mktemp("fleet")
    truth = make_fleet(folder / "runs", make_templates((3, 4)), JOBS, nodes=24, lemons=2, seed=3)
    with open_ledger(folder / "fleet.db") as ledger:
        ledger.connection.execute("PRAGMA synchronous = OFF")
        intake = update_ledger(ledger, find_runs([folder / "runs"]), AnalysisRequest())
        assert intake.added == JOBS and not intake.failed
        return truth, summarize_ledger(ledger)


def test_only_the_bad_nodes_are_reported_as_lemons(fleet: tuple[FleetTruth, FleetSummary]) -> None:
    truth, summary = fleet
    assert {lemon.node for lemon in summary.lemons} == set(truth.lemons)
    for lemon in summary.lemons:
        node = find_node(summary, lemon.node)
        assert node.culprit <= node.tested <= node.jobs
        # it was bad in most of its jobs, and was seen to be in nearly all of these
        assert node.culprit >= 0.8 * truth.bad_jobs[lemon.node]
        causes = {cause for cause, _ in lemon.causes}
        assert "storage-local" in causes and {"sync-imbalance", "sync-slow-compute"} & causes


def test_all_tables_sum_to_the_total_of_all_jobs(fleet: tuple[FleetTruth, FleetSummary]) -> None:
    summary = fleet[1]
    lost_ns = summary.sums.lost_ns
    assert lost_ns > 0 and summary.sums.jobs == JOBS
    assert sum(cause.lost_ns for cause in summary.causes) == lost_ns
    assert sum(node.lost_ns for node in summary.nodes) == lost_ns
    assert sum(owner.sums.lost_ns for owner in summary.owners) == lost_ns
    assert sum(week.sums.lost_ns for week in summary.weeks) == lost_ns
    assert {(owner.account, owner.user) for owner in summary.owners} == set(USERS)
    assert len(summary.weeks) == 12


def test_the_disks_of_the_bad_nodes_cost_most(fleet: tuple[FleetTruth, FleetSummary]) -> None:
    truth, summary = fleet
    assert {place.name for place in summary.places[:2]} == {f"{name}: vdb" for name in truth.lemons}
