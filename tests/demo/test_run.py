"""The demo end to end: real processes, real faults, the real recorder.

The default suite checks what a busy machine cannot change. `make accept` also compares the
answers with the job's own stopwatches and the device's own log, at a tolerance.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterprof.demo import run
from clusterprof.demo.run import (
    DemoResult,
    choose_temporary_folder,
    format_truth_comparison,
    run_scenario,
)
from clusterprof.errors import UsageError
from clusterprof.report.model import RankLedger

THREE_POINTS = 0.03  # of step time


def ledger_of(result: DemoResult, rank: int) -> RankLedger:
    return next(ledger for ledger in result.report.ranks if ledger.rank == rank)


def assert_ledger_is_conserved(result: DemoResult) -> None:
    report = result.report
    assert report.emulated
    for ledger in report.ranks:
        assert sum(ns for _, ns in ledger.buckets) == ledger.lost_ns
        assert ledger.productive_ns + ledger.lost_ns == ledger.in_step_ns
    assert report.lost_ns == sum(ledger.lost_ns for ledger in report.ranks)


@pytest.fixture
def disk_path(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk, wherever temporary files of tests are."""
    on_disk = choose_temporary_folder()
    if on_disk == Path(tempfile.gettempdir()).resolve():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=on_disk) as folder:
        yield Path(folder)


def test_an_injected_disk_fault_is_found_on_its_rank(disk_path: Path) -> None:
    """Whatever else a busy machine adds, the reads of rank 1 were slow, and only those."""
    result = run_scenario("storage", disk_path)
    assert_ledger_is_conserved(result)
    storage = next(f for f in result.report.findings if f.cause.id == "storage-local")
    assert storage.culprits[0].rank == 1
    assert storage.lost_ns > 0
    assert "storage-local" in format_truth_comparison(result)


@pytest.mark.accept
@pytest.mark.parametrize("name", ["storage", "cpu"])
def test_the_injected_fault_is_named_on_its_rank(disk_path: Path, name: str) -> None:
    result = run_scenario(name, disk_path)
    assert_ledger_is_conserved(result)
    first = result.report.findings[0]
    # A busy neighbour on this machine can make contention the largest true cause.
    true_ns = Counter[str]()
    for truth in result.truth:
        true_ns.update(truth.causes)
    assert first.cause.id == true_ns.most_common(1)[0][0]
    assert first.culprits[0].rank == 1
    for truth in result.truth:
        ledger = ledger_of(result, truth.rank)
        share = dict(ledger.buckets).get(result.scenario.cause, 0) / ledger.in_step_ns
        true = truth.causes.get(result.scenario.cause, 0) / truth.in_step_ns
        assert abs(share - true) <= THREE_POINTS
        assert abs(ledger.lost_ns / ledger.in_step_ns - truth.idle_ns / truth.in_step_ns) <= 0.03
    assert f"{result.scenario.cause}" in format_truth_comparison(result)


@pytest.mark.accept
def test_a_clean_run_blames_neither_storage_nor_cpu(disk_path: Path) -> None:
    result = run_scenario("clean", disk_path)
    assert_ledger_is_conserved(result)
    families = {finding.cause.family for finding in result.report.findings}
    assert families.isdisjoint({"storage", "cpu"})


@pytest.mark.accept
def test_a_slow_network_is_named_and_no_rank_is_blamed(disk_path: Path) -> None:
    result = run_scenario("network", disk_path)
    assert_ledger_is_conserved(result)
    first = result.report.findings[0]
    assert (first.cause.id, first.cause.family) == ("net-transfer", "network")
    assert not first.culprits
    for truth in result.truth:
        ledger = ledger_of(result, truth.rank)
        share = dict(ledger.buckets)["net-transfer"] / ledger.in_step_ns
        true = truth.causes["net-transfer"] / truth.in_step_ns
        assert true > 0.3
        assert abs(share - true) <= THREE_POINTS


@pytest.mark.accept
def test_a_straggler_is_named_as_cause_of_waits(disk_path: Path) -> None:
    result = run_scenario("straggler", disk_path)
    assert_ledger_is_conserved(result)
    first = result.report.findings[0]
    assert first.cause.id == "sync-slow-compute"
    assert first.culprits[0].rank == 2
    assert first.culprits[0].others_ns is not None
    assert first.culprits[0].others_ns > 0.9 * first.lost_ns
    for truth in result.truth:
        ledger = ledger_of(result, truth.rank)
        share = dict(ledger.buckets).get(first.cause.id, 0) / ledger.in_step_ns
        true = truth.causes[first.cause.id] / truth.in_step_ns
        assert (true < 0.01) if truth.rank == 2 else (true > 0.2)
        # A busy machine adds CPU contention to this lateness, or hides a part of it.
        assert 0.6 * true - 0.01 <= share <= true + THREE_POINTS


def test_temporary_files_are_created_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_LASTING", Path("/"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/x/y")
    for mounts, folder in (("tmpfs /x tmpfs rw 0 0\n", "/"), ("/dev/a /x ext4 rw 0 0\n", "/x/y")):
        monkeypatch.setattr(run, "_read_mounts", lambda text=mounts: text)
        expected = folder if os.access("/", os.W_OK) else "/x/y"
        assert choose_temporary_folder() == Path(expected)


def test_a_folder_with_a_recording_is_refused(disk_path: Path) -> None:
    (disk_path / "recording").mkdir()
    with pytest.raises(UsageError, match="already exists"):
        run_scenario("clean", disk_path)


@pytest.mark.accept
@pytest.mark.parametrize(("name", "family"), [("storage", "storage"), ("cpu", "cpu")])
def test_without_the_probe_only_the_cause_family_is_named(
    disk_path: Path, name: str, family: str
) -> None:
    result = run_scenario(name, disk_path, inject="off")
    assert_ledger_is_conserved(result)
    named = {f.cause.id for f in result.report.findings if not f.outside_steps}
    assert family in named
    assert named <= {"storage", "cpu"}  # families only; contention of this machine is cpu
    for truth, ledger in zip(result.truth, sorted(result.report.ranks, key=lambda r: r.device)):
        share = dict(ledger.buckets).get(family, 0) / ledger.in_step_ns
        causes = [ns for cause, ns in truth.causes.items() if cause.startswith(f"{family}-")]
        assert abs(share - sum(causes) / truth.in_step_ns) <= 0.1


def test_an_unknown_scenario_is_a_usage_error_listing_known_scenarios() -> None:
    with pytest.raises(
        UsageError, match="choose from storage, cpu, mixed, checkpoint, network, straggler, clean"
    ):
        run_scenario("stroage")
