"""What is advised about transfers, by how many operations a step has and how large they are."""

from __future__ import annotations

from dataclasses import replace

from clusterprof.analysis.advice.context import AdviceContext, LoaderSettings
from clusterprof.analysis.advice.registry import explain_withheld, select_advice
from clusterprof.report.model import Advice, Culprit
from tests.support.advice_contexts import make_context, make_evidence

MIB = 1 << 20


def moved(size: int, per_step: float, **more: float) -> AdviceContext:
    """40 % of the time in steps: operations that send so many bytes, so many of them a step."""
    values = {
        "network__bytes_per_second": 44_040_192.0,  # 42 MiB/s
        "network__operation_bytes": size,
        "network__operations_per_step_count": per_step,
        "network__expected_ratio": 0.4,
        "network__beyond_ratio": 0.0,
        **more,
    }
    return make_context("net-transfer", make_evidence(**values), culprits=(), ranks=4)


def advised(context: AdviceContext) -> list[tuple[str, str]]:
    return [(advice.id, advice.what) for advice in select_advice(context)]


def test_a_single_small_operation_gets_no_bucket_advice() -> None:
    assert advised(moved(3 * MIB, 1)) == [
        ("check-path", "Find out why ranks get 42.0 MiB/s: measure their path alone"),
        ("accumulate-gradients", "Communicate once for several micro-batches"),
        ("send-less", "Send less: gradients in lower precision"),
    ]


def test_check_path_advice_within_a_node_has_all_its_texts() -> None:
    first = select_advice(moved(3 * MIB, 1, network__path_ratio=0.041))[0]
    assert first == Advice(
        what="Find out why ranks get 42.0 MiB/s: measure their path alone",
        because="40.00 s of GPU time (40.0 % of the time in steps) was lost to it;"
        " network.bytes_per_second 42.0 MiB/s; a step has 1 operation of 3.0 MiB",
        change="all_reduce_perf -b 3M -e 3M -g 4 of nccl-tests on this node; with NCCL_DEBUG=INFO"
        " the job must say P2P or SHM, not NET/Socket (gloo always takes sockets:"
        " GLOO_SOCKET_IFNAME=lo)",
        gain="40.00 s of GPU time here if it fixes all of it",
        verify="record again, then clusterprof gate RUN --assert 'stall.net-transfer_ratio <="
        " 20.0%' (now 40.0 %); network.bytes_per_second rises to the rate of the path alone",
        worse="",
        id="check-path",
        effort="look",
        commands=("all_reduce_perf -b 3M -e 3M -g 4",),
    )


def test_check_path_advice_between_nodes_tests_link_and_interface() -> None:
    first = select_advice(replace(moved(3 * MIB, 1), nodes=2))[0]
    assert first.change == (
        "iperf3 -c OTHER_NODE -P 4 (or all_reduce_perf of nccl-tests) between the nodes;"
        " NCCL_DEBUG=INFO shows which interface the job used: NCCL_SOCKET_IFNAME and"
        " GLOO_SOCKET_IFNAME select another"
    )


def test_many_small_operations_get_larger_bucket_advice() -> None:
    advice = select_advice(moved(MIB // 2, 60))
    assert [advice_item.id for advice_item in advice] == [
        "larger-messages",
        "accumulate-gradients",
        "send-less",
    ]
    assert advice[0].change == ("DistributedDataParallel(model, bucket_cap_mb=100) instead of 25")
    assert "a step has 60 operations of 512.0 KiB" in advice[0].because


def test_a_single_large_operation_gets_smaller_bucket_advice() -> None:
    # as fast as the path gives: nothing is to be looked for there
    result = moved(50 * MIB, 1, network__path_ratio=0.9)
    assert advised(result)[:1] == [
        (
            "overlap-communication",
            "Split the gradients into smaller buckets, so that the first are sent early",
        )
    ]
    assert select_advice(result)[0].change == (
        "DistributedDataParallel(model, bucket_cap_mb=5): 50.0 MiB wait for all of the backward"
        " pass; parts would not"
    )


def test_many_large_operations_get_overlap_advice() -> None:
    assert advised(moved(50 * MIB, 12, network__path_ratio=0.9))[:1] == [
        ("overlap-communication", "Overlap transfers with computation")
    ]


PREPARING = make_evidence(worker__on_cpu_ratio=0.8, loader__workers_count=1)


def test_the_reason_for_withholding_more_workers_is_explained() -> None:
    few = {"loader": LoaderSettings(1), "cpus": 2, "cpus_allowed": 2}
    for settings, why in (
        ({**few, "ranks_sharing_cpus": 2}, "2 ranks share 2 CPUs, and 1 worker fills its share"),
        (few, "the 2 CPUs of the rank are full with its 1 worker and its main thread"),
        ({"other_causes": frozenset({"cpu-contention"})}, "threads wait for the 16 CPUs already"),
        ({"throttled_ratio": 0.5}, "the CPU quota of the job runs out"),
        ({"other_causes": frozenset({"cpu-memory"})}, "the node is short of memory"),
    ):
        context = make_context("cpu-preprocess", PREPARING, **settings)
        assert explain_withheld(context) == (f"More workers are not advised: {why}",)


def test_given_or_irrelevant_advice_has_no_withheld_reason() -> None:
    assert explain_withheld(make_context("cpu-preprocess", PREPARING)) == ()
    assert (
        explain_withheld(make_context("cpu-preprocess", PREPARING, loader=None)) == ()
    )  # its count: 1
    unknown = make_context("cpu-preprocess", PREPARING[:1], loader=None)
    assert (
        explain_withheld(unknown) == ()
    )  # that nothing is known of the loader is no news to a reader
    assert (
        explain_withheld(make_context("cpu-preprocess", PREPARING, lost_ns=0, throttled_ratio=0.5))
        == ()
    )


def test_reads_that_are_large_already_are_not_packed() -> None:
    large = make_evidence(disk__read_size_bytes=1 << 20, disk__busy_ratio=0.95)
    context = make_context("storage-local", large, culprits=(Culprit("node-a", 3, "GPU-3", "sda"),))
    assert "pack-records" not in [advice.id for advice in select_advice(context)]
    assert explain_withheld(context) == (
        "Larger records are not advised: the average read is 1.0 MiB already",
        "More workers are not advised: the disk was busy for 95.0 % of the waits",
    )


def test_packing_advice_states_the_average_read_size() -> None:
    small = make_evidence(disk__read_size_bytes=16 << 10)
    entry = next(
        advice
        for advice in select_advice(make_context("storage-local", small))
        if advice.id == "pack-records"
    )
    assert entry.what == (
        "Pack samples into large records and read these in order; now the average read is 16.0 KiB"
    )
    blind = next(
        advice
        for advice in select_advice(make_context("storage-local"))
        if advice.id == "pack-records"
    )
    assert blind.what == "Pack samples into large records and read these in order"
    assert blind.because.endswith("; how large reads are was not recorded")
