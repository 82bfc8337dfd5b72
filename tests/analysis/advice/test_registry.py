"""Whole pieces of advice, with the numbers of a run, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusterprof.analysis.advice.context import AdviceContext, CodePath, LoaderSettings, Mount
from clusterprof.analysis.advice.registry import explain_withheld, select_advice
from clusterprof.probe import layout
from clusterprof.report.code import CodeLocation
from clusterprof.report.model import (
    Advice,
    Culprit,
    Evidence,
    PeerComparison,
    Persistence,
    ResourceFacts,
)
from tests.support.advice_contexts import GIB, LOADER, MACHINE, S, make_context, make_evidence

PREPARING = make_evidence(worker__on_cpu_ratio=0.8, loader__workers_count=4)


def ids(context: AdviceContext) -> list[str]:
    return [advice.id for advice in select_advice(context)]


def first(context: AdviceContext) -> Advice:
    return select_advice(context)[0]


def named(context: AdviceContext, id_: str) -> Advice:
    return next(advice for advice in select_advice(context) if advice.id == id_)


def test_more_workers_advice_has_all_its_texts_and_numbers() -> None:
    """4 workers and 0.4 lost: 4 / 0.6 = 6.7, so 7, and 8 CPUs less one leave room for 7."""
    assert first(make_context("cpu-preprocess", PREPARING)) == Advice(
        what="Raise num_workers from 4 to 7",
        because="40.00 s of GPU time (40.0 % of the time in steps) was lost to it;"
        " worker.on_cpu_ratio 80.0 %; num_workers is 4; the rank may use 8 of 16 CPUs;"
        " with 40.0 % of its steps lost, 7 would keep up",
        change="DataLoader(num_workers=7) instead of num_workers=4",
        gain="40.00 s of GPU time here if it fixes all of it; published: up to 47x for pipelines"
        " that were set up wrongly (Plumber, MLSys 2022)",
        verify="record again, then clusterprof gate RUN --assert 'stall.cpu-preprocess_ratio <="
        " 20.0%' (now 40.0 %); worker.on_cpu_ratio of the waits falls, loader.workers_count rises",
        worse="each worker needs memory for its copy of the data set and the batches it holds",
        id="more-workers",
        effort="setting",
        commands=("DataLoader(num_workers=7)",),
    )


def test_a_mode_for_debugging_is_switched_off_before_anything_else() -> None:
    on = {layout.ANOMALY_DETECTION: 0.98, layout.BLOCKING_LAUNCHES: 1.0, layout.LINE_TRACING: 0.09}
    busy = make_evidence(thread__on_cpu_ratio=0.9)  # which other advice rests on
    advice = first(make_context("launch-bound", busy, debug_mode_ratios=on))
    assert advice.what == (
        "Switch off anomaly detection (on in 98.0 % of the time in steps)"
        " and launches that wait for their kernel (on in 100.0 % of the time in steps)"
    )
    assert advice.change == (
        "torch.autograd.set_detect_anomaly(False); unset CUDA_LAUNCH_BLOCKING HIP_LAUNCH_BLOCKING"
        " AMD_SERIALIZE_KERNEL"
    )
    # It has nothing to do with data that come late, and is rare in the second job.
    assert "switch-off-debugging" not in ids(make_context("cpu-preprocess", debug_mode_ratios=on))
    rare = {layout.ANOMALY_DETECTION: 0.09}
    assert "switch-off-debugging" not in ids(make_context("launch-bound", debug_mode_ratios=rare))


def test_advised_workers_are_limited_by_the_cpus_of_the_rank() -> None:
    """12 CPUs for two ranks are 6 each, less the main thread 5; 7 would be needed."""
    advice = named(
        make_context("cpu-preprocess", PREPARING, cpus_allowed=12, ranks_sharing_cpus=2),
        "more-workers",
    )
    assert advice.what == "Raise num_workers from 4 to 5"
    assert advice.change == "DataLoader(num_workers=5) instead of num_workers=4"
    assert "the rank may use 12 of 16 CPUs, 8 cores, shared by 2 ranks" in advice.because
    assert advice.because.endswith("there are CPUs for 5 only, so part of the loss will remain")


def test_advised_workers_are_limited_by_the_cpu_quota() -> None:
    """A quota of 12 CPUs for 2 ranks of the node is 6 each."""
    context = make_context("cpu-preprocess", PREPARING, quota_cpus=12.0, ranks_on_node=2)
    assert named(context, "more-workers").what == "Raise num_workers from 4 to 5"


def test_a_loader_without_workers_gets_enough_workers_to_hide_loading() -> None:
    """0.75 of the time loading, 0.25 computing: three workers keep up."""
    context = make_context(
        "cpu-preprocess", PREPARING[:1], loader=LoaderSettings(0), own_loss_ratio=0.75
    )
    assert first(context).what == "Raise num_workers from 0 to 3"


@pytest.mark.parametrize(
    ("wanted", "changed"),
    [
        (1.2, "Raise num_workers from 1 to 2"),  # 0.8 of a CPU is idle: the main thread waits
        (1.8, ""),  # 0.2 is not enough for another worker
        (None, ""),  # not measured: the main thread needs a CPU
    ],
)
def test_cpus_left_idle_by_the_job_allow_more_workers(wanted: float | None, changed: str) -> None:
    context = make_context(
        "cpu-preprocess",
        PREPARING,
        loader=LoaderSettings(1),
        cpus_allowed=2,
        own_loss_ratio=0.7,
        job_cpus_wanted=wanted,
    )
    advised = [item.what for item in select_advice(context) if item.id == "more-workers"]
    assert advised == ([changed] if changed else [])


def test_a_line_in_which_the_late_rank_spends_more_time_comes_first() -> None:
    path = CodePath(CodeLocation("/job/train.py", 14, "augment"), (), 0.9, 40)
    advice = first(make_context("sync-slow-compute", code=(path,), has_device=False))
    assert advice.what.endswith(
        "Look at train.py:14 in augment, in which rank 3 spends more time than the others"
    )


def test_the_worker_limit_is_in_words_when_cpus_are_unknown() -> None:
    context = make_context("cpu-preprocess", PREPARING, cpus_allowed=None, own_loss_ratio=None)
    assert first(context).change == (
        "DataLoader(num_workers=N) instead of num_workers=4 (N: at most the CPUs of the rank"
        " less one)"
    )


def test_hidden_loss_gets_no_advice() -> None:
    for hidden in ({"lost_ns": 0}, {"saves_nothing": True}):
        assert select_advice(make_context("cpu-preprocess", PREPARING, **hidden)) == ()
    # Without a replay savings are a minimum: that it is 0 says nothing against the advice.
    assert first(make_context("cpu-preprocess", PREPARING, recoverable_ns=0)).id == "more-workers"


def test_advice_on_upper_bound_loss_states_the_bound() -> None:
    first_advice = first(make_context("cpu-preprocess", PREPARING, upper_bound=True))
    assert first_advice.because.startswith(
        "at most 40.00 s of GPU time (40.0 % of the time in steps)"
    )
    assert "an upper bound: no accelerator was measured" in first_advice.gain


def test_unknown_savings_are_not_promised() -> None:
    first_advice = first(make_context("cpu-preprocess", PREPARING, recoverable_ns=None))
    assert first_advice.gain.startswith("what it saves in this run is not known; published: ")


def test_advice_is_addressed_to_the_culprit() -> None:
    culprit = Culprit("node-a", 3, "GPU-3", "", own_ns=40 * S)
    two = Culprit("node-b", 9, "GPU-1", "", own_ns=39 * S)
    reported = {
        ((culprit,), 1, 8): "On rank 3: raise",
        ((culprit,), 2, 16): "On node-a, rank 3: raise",
        ((culprit, two), 4, 32): "On 2 nodes, mainly node-a: raise",
        ((culprit, two), 2, 16): "Raise",  # one on each node: it is the job's
    }
    for (culprits, nodes, ranks), begin in reported.items():
        context = make_context(
            "cpu-preprocess", PREPARING, culprits=culprits, nodes=nodes, ranks=ranks
        )
        assert first(context).what == f"{begin} num_workers from 4 to 7"


def test_node_advice_names_no_rank() -> None:
    late = make_evidence(thread__runnable_ratio=0.7)
    culprits = (Culprit("node-b", 5, "GPU-5", "", own_ns=40 * S),)
    context = make_context("cpu-contention", late, culprits=culprits, nodes=2, ranks=16)
    assert named(context, "find-the-neighbour").what == (
        "On node-b: find what else uses the CPUs, and move it"
    )
    alone = make_context("cpu-contention", late, nodes=1, ranks=8)
    assert named(alone, "find-the-neighbour").what == "Find what else uses the CPUs, and move it"


def test_a_job_with_too_many_threads_gets_thread_count_settings() -> None:
    """2 workers and 8 library threads on 4 CPUs: others are not to blame."""
    late = make_evidence(thread__runnable_ratio=0.7)
    users = (("python", 100, 2.9), ("loader", 201, 0.8))
    setup = {"cpus": 4, "cpus_allowed": 4, "loader": LoaderSettings(2)}
    context = make_context(
        "cpu-contention",
        late,
        job_cpus_wanted=9.26,
        cpu_users=users,
        other_processes_cpu_ratio=0.2,
        **setup,
    )
    advice = first(context)
    assert advice.id == "fewer-threads"
    assert advice.commands == ("OMP_NUM_THREADS=2 MKL_NUM_THREADS=2", "torch.set_num_threads(1)")
    assert "the job's own threads want 9.3 CPUs" in advice.because
    named_users = "CPUs kept busy by processes of the job: python (pid 100) 2.9, loader (pid 201)"
    assert named_users in advice.because
    # 3.9 of 4 CPUs are wanted: somebody else takes them
    others = make_context(
        "cpu-contention",
        late,
        job_cpus_wanted=3.9,
        cpu_users=users,
        other_processes_cpu_ratio=0.2,
        **setup,
    )
    assert named_users in named(others, "find-the-neighbour").because
    assert all(advice.id != "fewer-threads" for advice in select_advice(others))


def test_a_process_of_the_job_that_takes_the_cpus_is_named() -> None:
    late = make_evidence(thread__runnable_ratio=0.7)
    busy = {"busy_side_processes": (("burner", 4711, 3.4),), "other_processes_cpu_ratio": 0.0}
    advice = named(
        make_context("cpu-contention", late, nodes=1, ranks=8, **busy), "find-the-neighbour"
    )
    assert advice.what == (
        "Move burner (pid 4711) of the job: it keeps 3.4 CPUs busy and does not train"
    )
    assert advice.commands[0] == "renice 19 -p 4711"


def test_a_loader_without_workers_gets_no_withheld_worker_reason() -> None:
    contended = {"other_causes": frozenset({"cpu-contention"}), "loader": None}
    withheld = "More workers are not advised: threads wait for the 16 CPUs already"
    known = make_evidence(worker__on_cpu_ratio=0.9, loader__workers_count=4)
    rules = {"loader": None, "other_causes": contended["other_causes"]}
    assert explain_withheld(make_context("cpu-preprocess", known, **rules)) == (withheld,)
    none = make_evidence(worker__on_cpu_ratio=0.9, loader__workers_count=0)
    rules["loader"] = LoaderSettings(0)
    assert explain_withheld(make_context("cpu-preprocess", none, **rules)) == ()


def test_profiling_advice_names_the_training_process() -> None:
    facts = ResourceFacts("training-process", pid=7076)
    context = make_context("cpu-preprocess", PREPARING, resource="it", resource_facts=facts)
    change = named(context, "prepare-ahead").change
    assert (
        "--pid 7076" in change
        and "the functions in the training process of this run with py-spy" in change
    )


def test_no_worker_is_advised_for_work_of_the_training_thread_in_the_loader() -> None:
    own = make_evidence(
        worker__on_cpu_ratio=0.8, loader__own_work_ratio=0.7, loader__workers_count=4
    )
    advised = ids(make_context("cpu-preprocess", own))
    assert advised[0] == "cheaper-sampler"
    assert not {"more-workers", "prepare-on-gpu"} & set(advised)
    assert "cheaper-sampler" not in ids(make_context("cpu-preprocess", PREPARING))


def test_uneven_worker_shares_get_sharding_advice_before_gpu_preparation() -> None:
    def advise(balance: float) -> list[str]:
        known = make_evidence(worker__on_cpu_ratio=0.8, worker__balance_ratio=balance)
        return ids(make_context("cpu-preprocess", known, has_device=True))

    assert "even-shards" in advise(0.56) and "prepare-on-gpu" not in advise(0.56)
    assert "even-shards" not in advise(0.9)


def test_a_very_short_recording_gets_longer_recording_advice_first() -> None:
    brief = make_context(
        "launch-bound", make_evidence(thread__on_cpu_ratio=0.9), step_ns=S // 1000, steps=20
    )
    assert first(brief).id == "record-longer"
    assert "too little was seen to judge the job" in first(brief).because
    # a single step is perhaps only the start of the job, unless it lasts
    single = make_context(
        "launch-bound", make_evidence(thread__on_cpu_ratio=0.9), step_ns=S, steps=1
    )
    lasting = make_context(
        "launch-bound", make_evidence(thread__on_cpu_ratio=0.9), step_ns=2 * S, steps=1
    )
    assert (first(single).id, first(lasting).id) == ("record-longer", "larger-batch")


def test_a_family_finding_gets_only_diagnostic_advice() -> None:
    advice = select_advice(make_context("storage", is_family=True, has_probe=False))
    assert [advice_item.id for advice_item in advice] == ["record-with-probe", "verify-by-hand"]
    assert all(advice_item.diagnose for advice_item in advice)
    assert advice[0].change.startswith("clusterprof record --inject auto -- COMMAND")
    assert "only the family of the cause could be determined" in advice[0].because
    missing = make_context(
        "storage",
        is_family=True,
        missing_signals=("nfs.rtt_ns_total",),
        coverage_gaps=(("mounts", "run it as the job's user"),),
    )
    assert first(missing).id == "record-what-is-missing"
    assert first(missing).change == "mounts: run it as the job's user"
    assert "the recording has no nfs.rtt_ns_total" in first(missing).because


def test_an_uncertain_cause_gets_only_diagnostic_advice() -> None:
    unsure = make_context("cpu-preprocess", PREPARING, confidence_ratio=0.69)
    assert ids(unsure) == ["verify-by-hand"]
    short = make_context("cpu-preprocess", PREPARING, confidence_ratio=0.69, lost_ns=S)
    assert ids(short) == ["record-longer", "verify-by-hand"]
    assert first(short).change == (
        "record 1,600 steps or more (now 400), then clusterprof analyze RUN"
    )
    assert ids(make_context("cpu-preprocess", PREPARING, confidence_ratio=0.7))[0] == "more-workers"


def test_a_mount_is_named_with_its_options() -> None:
    queued = make_evidence(nfs__queued_ratio=0.8, nfs__backlog_count=12)
    advice = select_advice(make_context("storage-client-queue", queued, resource="/data"))
    assert [advice_item.id for advice_item in advice] == ["nconnect", "more-slots", "stage-local"]
    assert advice[0].what == "Mount /data with nconnect=8"
    assert advice[0].change == (
        "umount /data; mount -t nfs -o nconnect=8,rsize=1048576 filer:/export/data /data (or in"
        " fstab; the first mount of a server decides)"
    )
    assert "/data is nfs4, 1 connection" in advice[0].because


def test_a_hostile_mount_name_is_quoted_in_the_command() -> None:
    evil = Mount("/d; rm -rf ~", "nfs", "s:/e")
    queued = make_evidence(nfs__queued_ratio=0.8)
    context = make_context("storage-client-queue", queued, resource=evil.point, mounts=(evil,))
    assert first(context).change.startswith("umount '/d; rm -rf ~'; mount -t nfs ")


def test_more_cpus_advice_uses_the_syntax_of_the_launcher() -> None:
    bound = make_evidence(thread__runnable_ratio=0.7, job__cpus_needed_count=7.2)
    where = {"resource": "8 workers on 1 of 16 CPUs", "resource_facts": ResourceFacts("cpu-set")}
    changes = {
        "slurm": "srun --cpus-per-task=8 --cpu-bind=cores",
        "kubernetes": "resources.requests.cpu and limits.cpu: 8",
        "": "leave the rank 8 CPUs",
    }
    for launcher, change in changes.items():
        context = make_context("cpu-contention", bound, **where, cpus_allowed=1, launcher=launcher)
        assert ids(context) == ["more-cpus"]
        assert first(context).what == "Give the rank 8 CPUs"
        assert first(context).change.startswith(change)


def test_a_quota_is_raised_for_all_threads_of_the_node() -> None:
    """Two ranks of 4 workers and a main thread each are 10."""
    held = make_evidence(thread__held_back_ratio=0.6, cgroup__throttled_periods_total=90)
    context = make_context(
        "cpu-throttled", held, quota_cpus=4.0, ranks_on_node=2, launcher="kubernetes"
    )
    assert ids(context) == ["raise-quota", "fit-the-quota"]
    assert first(context).change == "resources.limits.cpu: 10 (or no limit)"
    assert select_advice(context)[1].change.startswith(
        "DataLoader(num_workers=1) and OMP_NUM_THREADS=1"
    )


def test_larger_batch_advice_follows_the_free_device_memory() -> None:
    """Half is used; 80 % may be: 1.6 times the batch."""
    first_advice = first(make_context("launch-bound", make_evidence(thread__on_cpu_ratio=0.9)))
    assert first_advice.id == "larger-batch" and first_advice.change.startswith(
        "batch_size up to 1.6x"
    )


def test_a_single_late_rank_gets_no_larger_batch_advice() -> None:
    evidence = make_evidence(thread__on_cpu_ratio=0.9)
    late, next_one = (Culprit("node-a", n, f"GPU-{n}", own_ns=s * S) for n, s in ((3, 40), (4, 3)))
    assert "larger-batch" not in ids(make_context("launch-bound", evidence, ranks=2))
    assert "larger-batch" not in ids(
        make_context("launch-bound", evidence, ranks=2, culprits=(late, next_one))
    )
    both = late, replace(next_one, own_ns=4 * S)  # a tenth: it launches late, too
    assert "larger-batch" in ids(make_context("launch-bound", evidence, ranks=2, culprits=both))
    assert "larger-batch" in ids(make_context("launch-bound", evidence))


def test_save_interval_advice_targets_five_percent_cost() -> None:
    saves = make_evidence(checkpoint__mean_ns=2 * S, checkpoint__mean_bytes=4 * GIB)
    advice = named(make_context("checkpoint", saves, share_ratio=0.23), "save-less-often")
    assert advice.what == "Save 5 times less often"  # 0.23 to 0.05
    assert "saves of 2.00 s cost 5% when they come every 40.00 s" in advice.because


def test_network_path_advice_names_the_device_in_the_evidence() -> None:
    """The wording of its note does not change the advice."""
    name, rate = "network.link_bytes_per_second", 1.25e8
    slow = (Evidence(name, rate, "bytes/s", "…", sign="faster-device-idle", device="eth1"),)
    first_advice = first(make_context("net-path", slow))
    assert first_advice.what == "Point the job at eth1"
    assert first_advice.change.startswith("export NCCL_SOCKET_IFNAME=eth1 GLOO_SOCKET_IFNAME=eth1 ")
    name, rate = "rdma.link_bytes_per_second", 2.5e10
    unused = (Evidence(name, rate, "bytes/s", "…", sign="port-unused", device="mlx5_0:1"),)
    assert first(make_context("net-path", unused)).change.startswith("export NCCL_IB_HCA=mlx5_0:1 ")


def test_transfer_advice_depends_on_time_beyond_the_expected_rate() -> None:
    at_rate = make_evidence(network__expected_ratio=0.39, network__beyond_ratio=0.01)
    assert ids(make_context("net-transfer", at_rate)) == [
        "overlap-communication",
        "accumulate-gradients",
        "send-less",
    ]
    beyond = make_evidence(network__expected_ratio=0.1, network__beyond_ratio=0.3)
    assert ids(make_context("net-transfer", beyond)) == ["record-counters"]


def test_hang_advice_names_the_rank_to_inspect() -> None:
    hang = make_evidence(hang__longest_ns=60 * S, hang__waiting_count=7)
    context = make_context("fail-hang", hang, outside_steps=True)
    assert ids(context) == ["look-at-the-stack", "end-hangs-early"]
    assert first(context).what == "Look at what rank 3 is doing"
    assert first(context).change.startswith("on node-a: py-spy dump --pid PID of rank 3")
    assert first(context).verify.startswith(
        "record again, then clusterprof analyze RUN: fail-hang is below 40.0 % of the recorded"
    )
    circle = make_context("fail-hang", hang, outside_steps=True, culprits=())
    assert ids(circle) == ["same-order", "end-hangs-early"]


def test_at_most_four_pieces_of_advice_are_given() -> None:
    everything = make_evidence(nfs__read_bytes_total=GIB, nfs__retransmits_total=5)
    assert len(ids(make_context("storage-remote", everything, resource="/data", nodes=2))) == 4


def test_the_context_takes_mount_and_workers_from_the_header() -> None:
    context = make_context("storage-remote", resource="/data")
    assert context.file_system == "nfs" and context.mount == MACHINE.mounts[0]
    assert context.workers == LOADER.workers


def test_a_mount_is_found_by_its_name_whatever_the_text_says() -> None:
    """`/data` is named with its slow target; a folder may have brackets in its own name."""
    slow = {"resource": "/data (data-OST0002)", "resource_facts": ResourceFacts(name="/data")}
    assert make_context("storage-remote", **slow).mount == MACHINE.mounts[0]
    odd = Mount("/my data (old)", "nfs4", "filer:/old", 1)
    context = make_context("storage-remote", resource=odd.point, mounts=(odd,))
    assert context.mount == odd and context.file_system == "nfs"


def test_the_awaited_process_is_profiled_by_its_id() -> None:
    """Only a single process has one; what its text says does not matter."""
    waiting = make_evidence(awaited__waiting_ratio=0.9)
    process = {"resource": "process 12 pid 7", "resource_facts": ResourceFacts("process", pid=7)}
    change = named(make_context("cpu-preprocess", waiting, **process), "speed-up-awaited-work")
    assert "--pid 7 " in change.change
    thread = make_context("cpu-preprocess", waiting, resource="process thread 101")
    assert "--pid PID " in named(thread, "speed-up-awaited-work").change


def test_a_busy_ssd_with_short_queue_gets_more_readers_advice() -> None:
    """An SSD with one request at a time has room for more readers; a disk that rotates has not."""
    busy = make_evidence(disk__busy_ratio=0.97, disk__queue_count=1.1)
    assert "more-readers" in ids(make_context("storage-local", busy, resource="nvme0n1"))
    assert "fewer-bytes" not in ids(make_context("storage-local", busy, resource="nvme0n1"))
    for disk in ("sda", "unknown"):
        assert "more-readers" not in ids(make_context("storage-local", busy, resource=disk))
    queued = make_evidence(disk__busy_ratio=0.97, disk__queue_count=4)
    assert "more-readers" not in ids(make_context("storage-local", queued, resource="nvme0n1"))


def test_advice_with_the_least_effort_comes_first() -> None:
    """A disk with room: more workers are an option of the loader, packing is a new data set."""
    slow = make_evidence(
        disk__read_latency_ns=12e6, disk__busy_ratio=0.5, disk__read_size_bytes=16 << 10
    )
    advice = select_advice(make_context("storage-local", slow, resource="nvme0n1"))
    assert [(advice_item.id, advice_item.effort) for advice_item in advice] == [
        ("more-readers", "setting"),
        ("read-further-ahead", "setting"),
        ("pack-records", "data"),
    ]
    late = select_advice(make_context("sync-imbalance", make_evidence(step__worked_ns=1e8)))
    assert [(advice.id, advice.effort) for advice in late] == [
        ("compare-devices", "look"),
        ("balance-work", "code"),
    ]


def test_double_work_gets_count_work_advice_before_device_comparison() -> None:
    """Devices of one kind differ by a half at most: 84 of 36 ms are more, 50 are not."""
    worked = PeerComparison("step.worked_ns", "ns", 84e6, 36e6, 1, "rank", "of work a step")
    shown = make_evidence(step__worked_ns=84e6)
    first, second, _ = select_advice(make_context("sync-imbalance", shown, peer_comparison=worked))
    assert (first.id, second.id) == ("count-work", "compare-devices")
    assert "84.0 ms of work in a step against 36.0 ms" in first.because
    less = replace(worked, value=50e6)
    assert ids(make_context("sync-imbalance", shown, peer_comparison=less))[0] == "compare-devices"


def test_ranks_late_in_turn_get_only_equal_batch_advice() -> None:
    turns = Persistence("wandering", 0, 60 * S, 20, 20, 2, 12)
    culprits = tuple(Culprit("node-a", rank, "", "", others_ns=20 * S) for rank in (0, 1))
    for cause in ("sync-imbalance", "sync-slow-compute"):
        (advice,) = select_advice(make_context(cause, persistence=turns, culprits=culprits))
        assert advice.what == "Give all ranks batches of equal length or tokens in each step"
    # One of them caused nearly all: it is late more often, and may be slower.
    rare = (culprits[0], replace(culprits[1], others_ns=2 * S))
    assert "compare-devices" in ids(
        make_context("sync-imbalance", persistence=turns, culprits=rare)
    )


def test_a_stage_that_the_others_wait_for_in_messages_gets_fewer_layers() -> None:
    worked = PeerComparison("step.worked_ns", "ns", 72e6, 30e6, 1, "rank", "of work a step")
    context = make_context("sync-imbalance", peer_comparison=worked, message_wait_ratio=0.9)
    (advice,) = select_advice(context)
    assert advice.id == "lighter-last-stage" and "72.0 ms of work in a step" in advice.change


def test_a_late_rank_with_larger_batches_gets_equal_batch_advice() -> None:
    more = make_evidence(
        step__worked_ns=1e8, step__samples_count=32, step__samples_excess_ratio=1.0
    )
    first, *others = select_advice(make_context("sync-imbalance", more))
    assert (first.id, first.what) == (
        "equal-batches",
        "Give rank 3 as many samples in a step as the other ranks",
    )
    assert first.change.startswith("rank 3 takes 100 % more samples in a step than the ranks that")
    assert [advice.id for advice in others] == ["balance-work"]


def test_own_batch_processes_are_not_called_loader_workers() -> None:
    own = make_context("cpu-preprocess", PREPARING, loader=None, own_loss_ratio=0.2)
    what = "Raise the number of processes that make batches from 4 to 5"
    assert named(own, "more-workers").what == what
    assert "num_workers" not in named(own, "more-workers").change


def test_a_loop_that_makes_its_batches_itself_is_advised_to_use_workers() -> None:
    itself = make_evidence(worker__on_cpu_ratio=0.8, loader__workers_count=0)
    loop = {"resource": "it", "resource_facts": ResourceFacts("training-process", pid=7)}
    own = make_context("cpu-preprocess", itself, loader=None, **loop)
    assert ids(own)[0] == "load-in-workers"
    assert "num_workers=4" in named(own, "load-in-workers").change
    # A data loader without workers gets more of them; those of another loader are not counted.
    assert "load-in-workers" not in ids(make_context("cpu-preprocess", itself, **loop))
    worker = {"resource": "it", "resource_facts": ResourceFacts("worker", pid=7)}
    other = make_context("cpu-preprocess", itself, loader=None, **worker)
    assert "load-in-workers" not in ids(other)


def test_advice_backed_by_evidence_comes_first_among_equal_efforts() -> None:
    """10 workers would be needed, 7 have CPUs: both more workers and more CPUs are advised."""
    allowed = make_evidence(job__cpus_allowed_count=8)
    assert ids(make_context("cpu-preprocess", allowed, own_loss_ratio=0.6)) == [
        "more-cpus-for-workers",
        "more-workers",
        "prepare-on-gpu",
        "prepare-ahead",
    ]
    both = (*allowed, *PREPARING)
    assert ids(make_context("cpu-preprocess", both, own_loss_ratio=0.6))[:2] == [
        "more-workers",
        "more-cpus-for-workers",
    ]


def test_cheap_advice_does_not_displace_the_most_effective_advice() -> None:
    """Five fit, four are shown: the first of the list, and then the cheapest first."""
    many = make_evidence(
        nfs__read_bytes_total=GIB, nfs__retransmits_total=5, nfs__read_latency_ns=1e7
    )
    advice = select_advice(make_context("storage-remote", many, resource="/data", nodes=2))
    assert [advice_item.id for advice_item in advice] == [
        "mend-the-path",
        "more-readers",
        "stage-local",
        "pack-records",
    ]


def test_commands_are_word_for_word_in_the_change() -> None:
    queued = make_evidence(nfs__queued_ratio=0.8, nfs__backlog_count=12)
    first_advice = first(make_context("storage-client-queue", queued, resource="/data"))
    assert first_advice.commands == (
        "umount /data; mount -t nfs -o nconnect=8,rsize=1048576 filer:/export/data /data",
    )
    assert first_advice.commands[0] in first_advice.change and "\x02" not in first_advice.change
    evil = "/d\x02x\x03"
    mount = Mount(evil, "nfs", "s:/e")
    odd = first(make_context("storage-client-queue", queued, resource=evil, mounts=(mount,)))
    assert len(odd.commands) == 1 and odd.commands[0] in odd.change
