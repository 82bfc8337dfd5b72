"""A report becomes an entry that keeps its sums, and names the nodes that cost much more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.pipeline import analyze
from clusterprof.fleet.job_entry import FIRST, INNER, LAST, PlaceTime, build_job_entry
from clusterprof.gate.stored_report import load_report
from clusterprof.output.renderers.json import Json
from clusterprof.report.model import Culprit, Finding, JobFacts, RankLedger, Report, RunFingerprint
from tests.support import reports
from tests.support.hostile_reports import make_full_report, poison_strings

RECORDING = Path(__file__).parents[1] / "recordings/v1"
S = 1_000_000_000


@pytest.mark.parametrize("name", sorted(reports.ALL))
def test_causes_and_nodes_add_up_to_the_job(name: str) -> None:
    report = reports.ALL[name]()
    entry = build_job_entry(report, CAUSES)
    assert sum(time.lost_ns for time in entry.causes) == report.lost_ns
    assert sum(time.outside_ns for time in entry.causes) == report.outside_ns
    assert sum(node.lost_ns for node in entry.node_times) == report.lost_ns
    assert sum(node.window_ns for node in entry.node_times) == report.window_ns
    assert sum(node.ranks for node in entry.node_times) == entry.ranks == report.rank_count


def test_a_stored_report_gives_the_same_entry_as_its_recording(tmp_path: Path) -> None:
    report = analyze(RECORDING)
    path = tmp_path / "report.json"
    path.write_text(Json().render(report))
    direct, stored = (build_job_entry(item, CAUSES) for item in (report, load_report(path)))
    assert replace(stored, title=direct.title) == direct
    assert direct.recordings and direct.key == stored.key


def test_another_recording_gives_another_job_key() -> None:
    plain = reports.make_clean_report()
    keys = {
        build_job_entry(replace(plain, title=title, fingerprint=likeness), CAUSES).key
        for title, likeness in (
            ("a", RunFingerprint(recordings=("n1", "n2"))),
            ("b", RunFingerprint(recordings=("n2", "n1"))),
            ("a", RunFingerprint(recordings=("n1",))),
            ("a", None),
            ("b", None),
        )
    }
    assert len(keys) == 4  # the order of nodes does not matter; without recordings the path does


def ledger(rank: int, node: str, caused_s: int, cause: str = "device-throttled") -> RankLedger:
    """A rank with 100 s in steps, of which it loses 1 s."""
    return RankLedger(
        *(node, rank, 1, "GPU-0", "device-samples", 100 * S, 0, 0, 100 * S, 99 * S, S),
        *(((cause, S),), (), 10, 1.0, ((cause, caused_s * S),)),
    )


def job_of(*ranks: RankLedger) -> Report:
    total = len(ranks)
    return replace(
        reports.make_clean_report(),
        nodes=tuple(reports.make_node(name) for name in dict.fromkeys(rank.node for rank in ranks)),
        ranks=ranks,
        window_ns=100 * S * total,
        unmeasured_ns=0,
        outside_ns=0,
        in_step_ns=100 * S * total,
        productive_ns=99 * S * total,
        lost_ns=S * total,
        findings=(),
    )


def test_a_culprit_node_exceeds_both_percent_and_mean_thresholds() -> None:
    """400 s in steps: 1 % are 4 s. 10, 1, 1, 0 s: the mean is 3, twice that 6."""
    ranks = [ledger(at, name, s) for at, (name, s) in enumerate(zip("abcd", (10, 1, 1, 0)))]
    nodes = build_job_entry(job_of(*ranks), CAUSES).node_times
    assert [node.is_culprit for node in nodes] == [True, False, False, False]
    assert [node.position for node in nodes] == [FIRST, INNER, INNER, LAST]
    assert all(node.is_tested and node.chance_ratio == 0.25 for node in nodes)
    assert [node.caused_ns for node in nodes] == [10 * S, S, S, 0]


@pytest.mark.parametrize(
    ("caused_s", "why"),
    [
        ((3, 0, 0, 0), "less than 1 % of the job"),
        ((9, 9, 9, 0), "less than twice the mean, 6.75"),
        ((10, 10, 10, 10), "all alike"),
    ],
)
def test_a_slightly_worse_node_is_not_a_culprit(caused_s: tuple[int, ...], why: str) -> None:
    ranks = [ledger(at, name, s) for at, (name, s) in enumerate(zip("abcd", caused_s))]
    nodes = build_job_entry(job_of(*ranks), CAUSES).node_times
    assert not any(node.is_culprit or node.is_tested for node in nodes), why


def test_only_node_related_causes_make_a_culprit() -> None:
    """Decoding takes long wherever the job runs; slow clocks are the node's."""
    assert (
        CAUSES["device-throttled"].can_be_node_fault
        and not CAUSES["cpu-preprocess"].can_be_node_fault
    )
    ranks = [ledger(0, "a", 50, "cpu-preprocess"), ledger(1, "b", 0, "cpu-preprocess")]
    assert not any(n.is_culprit for n in build_job_entry(job_of(*ranks), CAUSES).node_times)


def test_a_single_node_job_is_not_tested_for_culprits() -> None:
    (node,) = build_job_entry(job_of(ledger(0, "a", 50)), CAUSES).node_times
    assert not node.is_culprit and not node.is_tested


def test_user_and_account_come_from_the_resource_manager() -> None:
    plain = reports.make_clean_report()
    facts = JobFacts(2, 2, 1.0, name="77", user="ada", account="vision")
    entry = build_job_entry(replace(plain, job=facts), CAUSES, "root of the files")
    assert (entry.name, entry.user, entry.account) == ("77", "ada", "vision")
    entry = build_job_entry(replace(plain, job=JobFacts(2, 2, 1.0)), CAUSES, "ben")
    assert (entry.user, entry.account) == ("ben", "")


def test_weeks_follow_iso_8601_in_utc() -> None:
    entry = build_job_entry(reports.make_clean_report(), CAUSES)
    new_year_s = 1_767_225_600  # Thursday, 1 January 2026: week 1
    assert replace(entry, started_ns=new_year_s * S).week == "2026-W01"
    assert replace(entry, started_ns=(new_year_s - 3 * 86_400) * S - 1).week == "2025-W52"
    assert replace(entry, started_ns=None).week == ""


def test_hostile_names_are_escaped() -> None:
    entry = build_job_entry(poison_strings(make_full_report(), "\x1b[2J\u202e"), {})
    texts = list(list_texts(astuple(replace(entry, recordings=()))))
    assert any("x1b" in text for text in texts)
    assert not any("\x1b" in text or "\u202e" in text for text in texts)


def list_texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from list_texts(item)


def finding(cause: str, *culprits: Culprit) -> Finding:
    return Finding(CAUSES[cause], 9 * S, 0.1, None, 0.9, "A", False, False, culprits)


def test_mounts_are_shared_by_path_and_disks_belong_to_nodes() -> None:
    report = replace(
        reports.make_clean_report(),
        findings=(
            finding(
                "storage-remote",
                *(Culprit(node, 0, "", "/data", 2 * S, S) for node in "ab"),
                Culprit("a", 1, "", "vda", S, 0),
            ),
            finding("storage-metadata", Culprit("a", 0, "", "/data", S, None)),
            finding("storage-local", Culprit("b", 2, "", "vda")),  # alone: all of the loss is its
            finding("cpu-gil", Culprit("b", 2, "", "worker 1 (pid 4711)", S, S)),
        ),
    )
    assert build_job_entry(report, CAUSES).places == (
        PlaceTime("/data", "storage-remote", 2, 7 * S),
        PlaceTime("a: vda", "storage-remote", 1, S),
        PlaceTime("b: vda", "storage-local", 1, 9 * S),
    )
