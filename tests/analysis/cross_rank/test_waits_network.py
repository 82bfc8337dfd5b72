"""Transfers between two nodes and their network counters, from recording to report.

Every step has an all-reduce that takes 0.1 s after both ranks have come; of 0.4 s in a step, that
is a quarter. 60 steps: 6 s for each rank.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.analysis.pipeline import analyze
from clusterprof.errors import UsageError
from clusterprof.probe import layout
from clusterprof.report.model import Finding, Report
from tests.support.recordings import SECOND, Script
from tests.support.report_laws import analyze_metrics
from tests.support.waiting_jobs import STEPS, make_scripts, record_and_analyze, sum_rank_seconds

MB = 1_000_000
LOSSY = {("tcp.retransmits_total", ""): 10, ("tcp.segments_sent_total", ""): 1000}
TRIPS = {
    ("tcp.job_connections_count", "eth0"): 2,
    ("tcp.job_rtt_ns", "eth0"): 13 * MB,
    ("tcp.job_min_rtt_ns", "eth0"): 12 * MB,
}


def nic(speed: float, sent: float = 50 * MB, name: str = "eth0") -> dict[tuple[str, str], float]:
    return {
        ("network.receive_bytes_total", name): sent,
        ("network.transmit_bytes_total", name): sent,
        ("network.link_bytes_per_second", name): speed,
    }


def over(folder: Path, *networks: dict[tuple[str, str], float], size: int = 20 * MB) -> Report:
    """Two ranks that compute for 0.3 s and reduce so many bytes; one node each."""
    scripts = make_scripts((0.0, 0.3), (0.0, 0.3))
    for script, network in zip(scripts, networks):
        script.network = network
        _resize(script, size)
    return record_and_analyze(scripts, folder)


def _resize(script: Script, size: int) -> None:
    script.main_spans = [
        (*span[:5], size, *span[6:]) if span[0] == layout.COLLECTIVE else span
        for span in script.main_spans
    ]


def finding(report: Report, cause: str) -> Finding:
    [result] = [item for item in report.findings if item.cause.id == cause]
    return result


def test_transfers_at_link_rate_are_no_network_fault(tmp_path: Path) -> None:
    # 20 MB at 200 MB/s: all of the 0.1 s, and a quarter of the time in steps.
    report = over(tmp_path, nic(200 * MB), {**nic(200 * MB), **LOSSY})
    for rank in (0, 1):
        assert sum_rank_seconds(report, rank) == {"net-transfer": 6.0}
    tested_finding = finding(report, "net-transfer")
    assert tested_finding.cause.title == "Exposed communication, at the rate of the links"
    assert tested_finding.cause.advice.startswith("No fault")
    assert tested_finding.culprits == ()
    by_key = {item.name: item.value for item in tested_finding.evidence}
    assert by_key["network.expected_ratio"] == pytest.approx(0.25)
    assert by_key["network.beyond_ratio"] == 0
    assert analyze_metrics(report)["stall.net-transfer_ratio"] == pytest.approx(0.25)
    assert analyze_metrics(report)["stall.net-link_ratio"] == 0.0


def test_excess_time_on_a_lossy_link_is_net_link_loss(tmp_path: Path) -> None:
    # 20 MB at 500 MB/s: 0.04 s of 0.1; one segment of a hundred is sent again by node-1.
    report = over(tmp_path, nic(500 * MB), {**nic(500 * MB), **LOSSY})
    for rank in (0, 1):
        assert sum_rank_seconds(report, rank) == {"net-link": 3.6, "net-transfer": 2.4}
    tested_finding = finding(report, "net-link")
    assert [(c.node, c.rank, c.resource) for c in tested_finding.culprits] == [
        ("node-1", None, "eth0")
    ]
    item, moved, rate = tested_finding.evidence
    assert moved.note == "sent by each rank in 60 operations of 19.1 MiB, over sockets of eth0"
    assert rate.value == pytest.approx(200 * MB)  # 20 MB in 0.1 s
    assert rate.note == "in transfer: 40.0 % of the 4 Gb/s of eth0"
    assert (item.name, item.value) == ("tcp.retransmit_ratio", 0.01)
    assert item.note == "of the segments were retransmitted: eth0 of node-1"
    assert analyze_metrics(report)["stall.net-link_ratio"] == pytest.approx(0.15)
    assert analyze_metrics(report)["stall.net-transfer_ratio"] == pytest.approx(0.10)
    assert analyze_metrics(report)["stall.network_ratio"] == pytest.approx(0.25)
    assert analyze_metrics(report)["stall.net-congestion_ratio"] is None
    assert analyze_metrics(report)["stall.net-path_ratio"] == 0.0


def test_a_bad_link_is_compared_with_the_peer_node_counter(tmp_path: Path) -> None:
    # one segment of a hundred, and of a thousand; a node whose counter was not read is no other
    mild = {**LOSSY, ("tcp.retransmits_total", ""): 1}
    report = over(tmp_path, {**nic(500 * MB), **mild}, {**nic(500 * MB), **LOSSY})
    compared = finding(report, "net-link").peer_comparison
    assert compared is not None
    assert (compared.name, compared.value, compared.peers_value) == (
        "tcp.retransmit_ratio",
        0.01,
        0.001,
    )
    assert (compared.peer_count, compared.compared_kind, compared.note) == (
        1,
        "node",
        "of the segments were retransmitted",
    )


def test_an_unread_counter_gives_no_peer_comparison(tmp_path: Path) -> None:
    report = over(tmp_path, nic(500 * MB), {**nic(500 * MB), **LOSSY})
    assert finding(report, "net-link").peer_comparison is None


def test_equally_lossy_ends_are_not_named_as_culprits(tmp_path: Path) -> None:
    report = over(tmp_path, {**nic(500 * MB), **LOSSY}, {**nic(500 * MB), **LOSSY})
    assert finding(report, "net-link").culprits == ()


def test_unexplained_excess_time_stays_in_transfer_with_its_title(tmp_path: Path) -> None:
    # 20 MB at 1 GB/s are 0.02 s of 0.1
    report = over(tmp_path, nic(1000 * MB), nic(1000 * MB))
    assert sum_rank_seconds(report, 0) == {"net-transfer": 6.0}
    tested_finding = finding(report, "net-transfer")
    assert tested_finding.cause.title == "Exposed communication takes longer than expected"
    by_key = {item.name: round(item.value, 6) for item in tested_finding.evidence}
    assert (by_key["network.expected_ratio"], by_key["network.beyond_ratio"]) == (0.05, 0.2)
    assert list(by_key) == [
        "network.moved_bytes",
        "network.bytes_per_second",
        "network.operation_bytes",
        "network.operations_per_step_count",
        "network.path_ratio",
        "network.expected_ratio",
        "network.beyond_ratio",
    ]


def test_transfers_without_counters_are_compared_only_among_themselves(tmp_path: Path) -> None:
    report = over(tmp_path, {}, {})
    tested_finding = finding(report, "net-transfer")
    title = "Exposed communication: all transfers take about the same time"
    assert tested_finding.cause.title == title
    missing = {m.name: m.why_missing for m in report.metrics if m.value is None}
    assert missing["stall.net-link_ratio"] == "the recording has no tcp.retransmits_total"
    assert missing["stall.net-congestion_ratio"] == "the recording has no tcp.job_rtt_ns"
    assert missing["stall.net-path_ratio"] == "the recording has no network.link_bytes_per_second"


def test_a_long_round_trip_is_reported_as_transfer_evidence(tmp_path: Path) -> None:
    report = over(tmp_path, {**nic(200 * MB), **TRIPS}, {**nic(200 * MB), **TRIPS}, size=1000)
    tested_finding = finding(report, "net-transfer")
    [trip] = [item for item in tested_finding.evidence if item.name == "tcp.job_min_rtt_ns"]
    # the middle is read to 9 %, and never more than the most that was read
    assert (trip.value, trip.note) == (
        12 * MB,
        "the shortest round trip from node-1, median 13.0 ms",
    )


def test_a_node_with_a_longer_round_trip_is_named(tmp_path: Path) -> None:
    far = {**TRIPS, ("tcp.job_min_rtt_ns", "eth0"): 24 * MB, ("tcp.job_rtt_ns", "eth0"): 25 * MB}
    report = over(tmp_path, {**nic(200 * MB), **TRIPS}, {**nic(200 * MB), **far})
    [culprit] = finding(report, "net-transfer").culprits
    assert (culprit.node, culprit.rank, culprit.resource) == ("node-1", None, "eth0")


def test_a_full_window_of_the_receiver_is_reported(tmp_path: Path) -> None:
    full = {
        ("tcp.job_connections_count", "eth0"): 2,
        ("tcp.job_busy_ns_total", "eth0"): 500 * MB,
        ("tcp.job_rwnd_limited_ns_total", "eth0"): 400 * MB,
    }
    report = over(tmp_path, nic(500 * MB), {**nic(500 * MB), **LOSSY, **full})
    assert sum_rank_seconds(report, 0) == {"net-transfer": 6.0}
    [item] = [e for e in finding(report, "net-transfer").evidence if "limited" in e.name]
    assert (item.name, item.value) == ("tcp.receiver_limited_ratio", 0.8)
    assert item.note.endswith("window small for the round trip): node-1")


def test_a_wrong_interface_is_named_with_the_faster_interface(tmp_path: Path) -> None:
    # 0.1 s at 200 MB/s; 0.01 s over eth1, which is idle on both nodes.
    both = {**nic(200 * MB), **nic(2000 * MB, 0, "eth1")}
    report = over(tmp_path, both, both)
    assert sum_rank_seconds(report, 0) == {"net-path": 5.4, "net-transfer": 0.6}
    tested_finding = finding(report, "net-path")
    assert tested_finding.culprits == ()  # both nodes alike
    assert "eth1 was idle and is faster" in tested_finding.evidence[0].note


def test_no_rank_is_ever_blamed_for_transfers(tmp_path: Path) -> None:
    # Rank 1 waits 0.2 s for data in every step; that is its own, the 0.06 s beyond are of no rank.
    scripts = make_scripts((0.0, 0.3), (0.2, 0.3))
    for script in scripts:
        script.network = {**nic(500 * MB), **LOSSY}
        _resize(script, 20 * MB)
    report = record_and_analyze(scripts, tmp_path)
    assert sum_rank_seconds(report, 0) == {
        "storage-local": 6.0,
        "cpu-preprocess": 6.0,
        "net-link": 3.6,
        "net-transfer": 2.4,
    }
    assert all(c.rank is None for c in finding(report, "net-link").culprits)
    assert finding(report, "net-transfer").culprits == ()
    assert [c.rank for c in finding(report, "storage-local").culprits] == [1]


def test_a_profile_changes_the_limits(tmp_path: Path) -> None:
    over(tmp_path, nic(500 * MB), {**nic(500 * MB), **LOSSY})
    report = analyze(tmp_path, limits={"net-link": {"retransmits_at_least_ratio": 0.02}})
    assert sum_rank_seconds(report, 0) == {"net-transfer": 6.0}
    with pytest.raises(UsageError, match="net-link: there is no limit"):
        analyze(tmp_path, limits={"net-link": {"retransmits_ratio": 0.02}})
    assert STEPS * 0.1 * SECOND == 6 * SECOND
