"""What all ranks sleep alike: the network where that shows trouble, unknown elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.recordings import SECOND
from tests.support.reduced_recordings import Step, make_cluster, record_and_analyze, remove_signals

N = 30
PLAIN = Step()


@pytest.mark.parametrize("missing", ["collectives", "spans"])
@pytest.mark.parametrize(
    ("round_trip_ms", "least_ms", "again", "network"),
    [(0.3, 0.2, 0, False), (2.0, 0.2, 0, True), (9.0, 9.0, 0, True), (0.3, 0.2, 500, True)],
)
def test_common_sleep_is_network_time_only_with_trouble_signs(
    tmp_path: Path, missing: str, round_trip_ms: float, least_ms: float, again: int, network: bool
) -> None:
    job = remove_signals(make_cluster([PLAIN] * N, [PLAIN] * N), missing)
    seconds = job[0].end
    for way in ("transmit", "receive"):
        job[0].network[f"network.{way}_bytes_total", "eth0"] = 20e6
    job[0].network["tcp.job_retransmits_total", "eth0"] = again / seconds
    job[0].network["tcp.segments_sent_total", ""] = 10_000 / seconds
    job[0].network["tcp.job_rtt_ns", "eth0"] = round_trip_ms * 1e6
    job[0].network["tcp.job_min_rtt_ns", "eth0"] = least_ms * 1e6
    report = record_and_analyze(job, tmp_path)
    # 0.1 s of the device's 0.4 s in each of 30 steps, before its last one where steps are unmarked
    by_key = {id_: ns / SECOND for id_, ns in report.ranks[1].buckets}
    assert (by_key.get("network", 0.0) > 2.0) is network
    assert (by_key.get("unattributed", 0.0) > 2.0) is not network


@pytest.mark.parametrize(("busy_s_per_s", "network_s"), [(0.3, 3.0), (0.1, 1.3), (0.0, 0.0)])
def test_common_sleep_in_every_step_is_network_time_during_transfers(
    tmp_path: Path, busy_s_per_s: float, network_s: float
) -> None:
    # 0.1 s in each of 30 steps, as far as the job's connections were busy in the 13 s.
    job = remove_signals(make_cluster([PLAIN] * N, [PLAIN] * N), "collectives")
    job[0].network["tcp.job_busy_ns_total", "eth0"] = busy_s_per_s * 1e9
    report = record_and_analyze(job, tmp_path)
    for rank in report.ranks:
        by_key = {id_: ns / SECOND for id_, ns in rank.buckets if ns}
        assert by_key.get("network", 0.0) == pytest.approx(network_s, abs=0.15)
        assert sum(by_key.values()) == pytest.approx(3.0)
