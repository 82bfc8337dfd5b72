"""Transfers shared out by what the counters of the nodes say; every number by hand.

The jobs (`networks.shared`): 40 all-reduces of 100 MB, over two nodes that is 100 MB each way: 10
ms at 10 GB/s. They take 30 ms, 20 of which are beyond; 800 ms of 1,200 for every rank.
"""

from __future__ import annotations

import pytest

from clusterprof.analysis.attribution.network.counters import (
    compute_receiver_limit_ratio,
    compute_retransmit_ratio,
    find_symptoms,
)
from clusterprof.analysis.attribution.network.split import find_outlier_nodes
from clusterprof.probe.layout import SEND
from tests.support.networks import (
    GB,
    LIMITS,
    TOOK,
    make_all_reduces,
    make_links,
    make_nic,
    split_and_check_transfers,
    split_transfers,
)
from tests.support.synthetic.jobs import MS

QUIET = make_nic()


def test_transfers_without_symptoms_stay_with_their_excess_time_stated() -> None:
    given, shares = split_transfers(QUIET, QUIET)
    assert given == {}
    assert (shares.expected_ns, shares.excess_ns) == (2 * 400 * MS, 2 * 800 * MS)
    assert shares.by_rate


def test_transfers_at_link_rate_have_no_excess_time() -> None:
    given, shares = split_transfers(
        QUIET, {**QUIET, "network.errors_total eth0": 1e6}, took=[10 * MS] * 40
    )
    assert given == {}
    assert (shares.expected_ns, shares.excess_ns) == (2 * 400 * MS, 0)


FAULTS = {"network.errors_total eth0": 60, "network.carrier_changes_total eth0": 2}
QUEUES = {
    "network.ecn_marked_total eth0": 600,
    "network.cnp_total eth0": 600,
    "network.pause_frames_total eth0 rx": 600,
    "network.pause_frames_total eth0 tx": 600,
    "network.discards_phy_total eth0": 6,
    "network.transmit_drops_total eth0": 6,
}


@pytest.mark.parametrize("name", FAULTS)
def test_port_errors_charge_excess_time_to_a_bad_link(name: str) -> None:
    given, shares = split_transfers(QUIET, {**QUIET, name: FAULTS[name]})
    assert given == {"net-link": 800}
    assert (shares.expected_ns, shares.excess_ns) == (2 * 400 * MS, 0)
    [sign] = shares.shares["net-link"].symptoms
    assert (sign.node, sign.device, sign.evidence.value) == (1, "eth0", FAULTS[name])
    assert sign.evidence.note.endswith("eth0 of node1")


@pytest.mark.parametrize("name", QUEUES)
def test_marks_pauses_and_drops_charge_excess_time_to_congestion(name: str) -> None:
    given, shares = split_transfers(QUIET, {**QUIET, name: QUEUES[name]})
    assert given == {"net-congestion": 800}
    [sign] = shares.shares["net-congestion"].symptoms
    assert (sign.node, sign.device) == (1, "eth0")


@pytest.mark.parametrize("name", {**FAULTS, **QUEUES})
def test_a_few_counter_events_per_minute_are_no_symptom(name: str) -> None:
    if name == "network.carrier_changes_total eth0":
        return  # once is enough
    few = {**FAULTS, **QUEUES}[name] * 0.9 if name not in FAULTS else 5
    given, shares = split_transfers(QUIET, {**QUIET, name: few})
    assert given == {} and shares.excess_ns == 2 * 800 * MS


def test_packet_loss_is_a_bad_link_or_with_queueing_congestion() -> None:
    # 1,000 of a million segments
    lossy = {**QUIET, "tcp.retransmits_total ": 1000, "tcp.segments_sent_total ": 1e6}
    given, shares = split_transfers(QUIET, lossy)
    assert given == {"net-link": 800}
    [sign] = shares.shares["net-link"].symptoms
    assert (sign.node, sign.strength, sign.evidence.name) == (1, 0.001, "tcp.retransmit_ratio")
    assert split_transfers(QUIET, {**lossy, "network.pause_frames_total eth0 rx": 6e4})[0] == {
        "net-congestion": 800
    }
    assert split_transfers(QUIET, {**lossy, "tcp.retransmits_total ": 999})[0] == {}


def test_known_retransmissions_of_the_job_replace_those_of_the_node() -> None:
    others = {"tcp.retransmits_total ": 5000, "tcp.segments_sent_total ": 1e6}
    own = {"tcp.job_connections_count eth0": 2, "tcp.job_retransmits_total eth0": 100}
    assert compute_retransmit_ratio(make_links(0, {**QUIET, **others})) == 0.005
    assert compute_retransmit_ratio(make_links(0, {**QUIET, **others, **own})) == 0.0001
    assert split_transfers(QUIET, {**QUIET, **others, **own})[0] == {}


QUEUED = {
    "tcp.job_connections_count eth0": 2,
    "tcp.job_rtt_ns eth0": 4 * MS,
    "tcp.job_min_rtt_ns eth0": 1 * MS,
    "tcp.job_unsent_bytes eth0": 1 << 20,
}


def test_long_round_trips_with_unsent_data_are_congestion() -> None:
    given, shares = split_transfers(QUIET, {**QUIET, **QUEUED})
    assert given == {"net-congestion": 800}
    [sign] = shares.shares["net-congestion"].symptoms
    assert sign.evidence.note == "round-trip time (minimum 1.0 ms): eth0 of node1"
    # nothing waits to be sent; a long way, but no longer than ever
    for name, value in (("tcp.job_unsent_bytes eth0", 1000), ("tcp.job_min_rtt_ns eth0", 3 * MS)):
        assert split_transfers(QUIET, {**QUIET, **QUEUED, name: value})[0] == {}


def test_queues_on_links_filled_by_the_job_are_no_congestion() -> None:
    # 450 GB of 600 in the minute went out: the link is full, its queue the job's own.
    full = {**make_nic(sent=450 * GB), **QUEUED}
    assert split_transfers(make_nic(sent=450 * GB), full, job=(450 * GB, 450 * GB))[0] == {}
    # half of it is not the job's
    given, shares = split_transfers(make_nic(), full, job=(10 * GB, 225 * GB))
    assert given == {"net-congestion": 800}
    [sign] = shares.shares["net-congestion"].symptoms
    assert (sign.evidence.name, sign.evidence.value) == ("network.others_ratio", 0.5)


def test_a_full_receive_window_is_no_network_fault() -> None:
    slow = {
        **QUIET,
        **QUEUED,
        "tcp.retransmits_total ": 5000,
        "tcp.segments_sent_total ": 1e6,
        "tcp.job_busy_ns_total eth0": 100 * MS,
        "tcp.job_rwnd_limited_ns_total eth0": 50 * MS,
    }
    assert compute_receiver_limit_ratio(make_links(1, slow)) == 0.5
    assert split_transfers(QUIET, slow)[0] == {}
    assert (
        compute_receiver_limit_ratio(
            make_links(1, {**slow, "tcp.job_rwnd_limited_ns_total eth0": 9})
        )
        is None
    )


def test_the_speed_of_a_virtual_or_exceeded_device_is_ignored() -> None:
    # Without a rate the fastest tenth is expected: 30 of 40 took 2^24 ns, ten twice that.
    took = [1 << 24] * 30 + [1 << 25] * 10
    given, shares = split_transfers(QUIET, QUIET, took=took, virtual=["eth0"])
    assert not shares.by_rate and shares.excess_ns == 2 * 10 << 24
    lossy = {**QUIET, "tcp.retransmits_total ": 5000, "tcp.segments_sent_total ": 1e6}
    trips = {
        "tcp.job_connections_count eth0": 2,
        "tcp.job_rtt_ns eth0": MS,
        "tcp.job_min_rtt_ns eth0": MS,
    }
    given, _ = split_transfers(QUIET, {**lossy, **trips}, took=took, virtual=["eth0"])
    assert given == {"net-link": (10 << 24) / MS}
    # nor one that was exceeded
    assert make_links(0, make_nic(sent=1000 * GB)).bytes_per_second is None
    assert make_links(0, make_nic(sent=600 * GB)).bytes_per_second == 10 * GB


def test_a_constantly_full_path_is_no_fault() -> None:
    # It has a queue, and loses what does not fit in. Without its rate only durations that differ
    # tell: here a fifth is beyond the fastest tenth, there more than half.
    alike, apart = [1 << 24] * 30 + [1 << 25] * 10, [1 << 24] * 20 + [1 << 26] * 20
    lossy = {**QUIET, "tcp.retransmits_total ": 5000, "tcp.segments_sent_total ": 1e6}
    for readings, cause in (({**QUIET, **QUEUED}, "net-congestion"), (lossy, "net-link")):
        assert split_transfers(QUIET, readings, took=alike, virtual=["eth0"])[0] == {}
        given, _ = split_transfers(QUIET, readings, took=apart, virtual=["eth0"])
        assert given == {cause: (20 * 3 << 24) / MS}
    marked = {**QUIET, **QUEUED, "network.ecn_marked_total eth0": 6000}
    given, _ = split_transfers(QUIET, marked, took=alike, virtual=["eth0"])
    assert given == {"net-congestion": (10 << 24) / MS}


def test_variation_below_a_tenth_is_charged_to_no_cause() -> None:
    took = [1 << 24] * 38 + [1 << 25] * 2
    given, shares = split_transfers(
        QUIET, {**QUIET, **FAULTS}, took=took, virtual=["eth0"]
    )  # 2 of 42 parts are beyond
    assert given == {}
    assert shares.excess_ns == 2 * 2 << 24
    assert {sign.evidence.name for sign in shares.unused_symptoms} == {
        "network.errors_total",
        "network.carrier_changes_total",
    }


def test_tcp_at_its_loss_limited_rate_blames_the_link() -> None:
    # 0.4 % and a round trip of 2 ms permit 1.22 * 1448 / (0.002 * sqrt(0.004)) = 14 MB/s. The
    # all-reduces moved 100 MB in 5 s, 20 MB/s, all alike: nothing is beyond the fastest tenth, and
    # all but the round trip of 1.5 ms is the loss's.
    lossy = {
        **make_nic(speed=None),
        "tcp.job_connections_count eth0": 2,
        "tcp.job_rtt_ns eth0": 2 * MS,
        "tcp.job_min_rtt_ns eth0": 1.5 * MS,
        "tcp.job_retransmits_total eth0": 4000,
        "tcp.segments_sent_total ": 1e6,
    }
    given, shares = split_transfers(lossy, lossy, took=[5000 * MS] * 40)
    assert given == {"net-link": 40 * (5000 - 1.5)}
    assert (shares.expected_ns, shares.excess_ns) == (2 * 60 * MS, 0)
    names = [sign.evidence.name for sign in shares.shares["net-link"].symptoms]
    assert names == ["tcp.retransmit_ratio"] * 2 + ["tcp.loss_limit_bytes_per_second"] * 2
    permitted = shares.shares["net-link"].symptoms[-1].evidence.value
    assert permitted == pytest.approx(13.966e6, rel=0.001)
    # A hundred times as fast as the loss of each of two connections permits: it is not the limit.
    assert split_transfers(lossy, lossy, took=[50 * MS] * 40)[0] == {}
    # Round trips far above the shortest: a queue stands somewhere, the path is full.
    full = {**lossy, "tcp.job_min_rtt_ns eth0": 0.5 * MS}
    assert split_transfers(full, full, took=[5000 * MS] * 40)[0] == {}
    # Less than a millisecond more is how long a busy host takes to answer.
    near = {**lossy, "tcp.job_rtt_ns eth0": 1 * MS, "tcp.job_min_rtt_ns eth0": 0.02 * MS}
    assert split_transfers(near, near, took=[5000 * MS] * 40)[0] == {
        "net-link": pytest.approx(40 * (5000 - 0.02))
    }


def test_small_messages_are_expected_to_take_the_fastest_observed_time() -> None:
    # 1 MB takes 0.1 ms at 10 GB/s; the fastest took 2^24 ns, which is what is expected.
    transfers = make_all_reduces([1 << 24] * 30 + [1 << 25] * 10, (0, 1), size=1_000_000)
    known = {n: make_links(n, {**QUIET, **FAULTS}) for n in (0, 1)}
    given, _ = split_and_check_transfers(transfers, known)
    assert given == {"net-link": (10 << 24) / MS}


def test_process_groups_on_a_node_share_its_link_rate() -> None:
    # Four ranks on each node: a team of one of each has a quarter of the link, 40 ms for 100 MB;
    # all eight together move 175 MB each over the whole of it, 17.5 ms.
    batch = make_all_reduces([50 * MS] * 40, (0, 1), spare=(0, 0, 0, 1, 1, 1))
    known = {n: make_links(n, {**QUIET, **FAULTS}) for n in (0, 1)}
    assert split_and_check_transfers(batch, known)[0] == {"net-link": 40 * 10}
    whole = make_all_reduces([50 * MS] * 40, (0, 0, 0, 0, 1, 1, 1, 1))
    assert split_and_check_transfers(whole, known)[0] == {"net-link": 40 * 32.5}


def test_counters_of_an_uninvolved_node_are_ignored() -> None:
    # Ranks 0 and 1 are on nodes 0 and 1; node 2 has all faults there are.
    transfers = make_all_reduces(TOOK, (0, 1))
    known = {
        0: make_links(0, QUIET),
        1: make_links(1, QUIET),
        2: make_links(2, {**QUIET, **FAULTS, **QUEUES}),
    }
    assert split_and_check_transfers(transfers, known)[0] == {}


def test_operations_within_a_node_are_charged_to_no_link() -> None:
    transfers = make_all_reduces([1 << 24] * 30 + [1 << 25] * 10, (0, 0))
    given, shares = split_and_check_transfers(transfers, {0: make_links(0, {**QUIET, **FAULTS})})
    assert given == {} and shares.excess_ns == 2 * 10 << 24


def test_a_node_that_was_not_recorded_leaves_the_rate_unknown() -> None:
    given, shares = split_and_check_transfers(make_all_reduces(TOOK), {0: make_links(0, QUIET)})
    assert given == {} and not shares.by_rate
    assert find_symptoms(make_links(0, QUIET), LIMITS) == ()


def test_nodes_at_twice_the_lower_median_are_outliers() -> None:
    assert find_outlier_nodes({0: 1.0, 1: 2.0}) == [1]
    assert find_outlier_nodes({0: 1.1, 1: 2.0}) == []
    assert find_outlier_nodes({0: 1.0, 1: 1.0, 2: 2.0, 3: 4.0}) == [3, 2]
    assert find_outlier_nodes({0: 0.0, 1: 0.0, 2: 1e-9}) == [2]
    assert find_outlier_nodes({0: 0.0, 1: 0.0}) == []
    assert find_outlier_nodes({0: 5.0}) == []


def test_excess_time_of_small_messages_is_transfer_only_with_symptoms() -> None:
    # 20 messages take 1 ms, 20 take 11 ms: their receiver may have waited for its peer.
    took = [MS] * 20 + [11 * MS] * 20
    ranks = make_all_reduces(took, size=2048, kind=SEND)
    _, quiet = split_and_check_transfers(ranks, {0: make_links(0, QUIET), 1: make_links(1, QUIET)})
    assert quiet.message_excess_ns.tolist() == pytest.approx([200 * MS] * 2, rel=0.1)
    assert quiet.excess_ns == 0
    faulty = {**QUIET, "network.errors_total eth0": 60}
    given, split = split_and_check_transfers(
        ranks, {0: make_links(0, QUIET), 1: make_links(1, faulty)}
    )
    assert given["net-link"] > 180 and not split.message_excess_ns.any()
    for other in (
        make_all_reduces(took, size=2048),
        make_all_reduces(took, size=100 << 20, kind=SEND),
    ):
        _, split = split_and_check_transfers(
            other, {0: make_links(0, QUIET), 1: make_links(1, QUIET)}
        )
        assert not split.message_excess_ns.any() and split.excess_ns > 0
