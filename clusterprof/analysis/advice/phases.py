"""Recommendations for checkpoints, evaluation, start-up, and devices below their clock.

Also for work that is divided badly between the training thread and the workers of its loader, and
for an imported trace that shows late data without the reason.
"""

from __future__ import annotations

import math
import shlex

from clusterprof.analysis.advice.base import (
    ExclusionRule,
    FilledRecommendation,
    Recommendation,
    describe_location,
    format_line_in_function,
    mark_command,
)
from clusterprof.analysis.advice.code_lines import find_dominant_line
from clusterprof.analysis.advice.context import AdviceContext
from clusterprof.analysis.advice.rules import (
    MEMORY_SHORT,
    NO_AWAITED_WORK,
    ONE_RANK,
    OWN_WORK,
    WORKERS_UNEVEN,
    make_missing_evidence_rule,
)
from clusterprof.units import format_quantity

_ASYNC_GAIN = "1.02-1.52x (Gao et al., ICSE 2024); saves 3.6-58.7x cheaper (Acme, arXiv 2403.07648)"
_SAVE_COST_RATIO = 0.05
"""Share of the time that saves may cost."""
_MIN_START_NS = 60e9
"""A shorter start (ns) does not justify a change of images."""


def _fill_async_save(context: AdviceContext) -> FilledRecommendation:
    size = context.find_evidence("checkpoint.mean_bytes")
    reasons: tuple[str, ...] = ()
    if size is not None and size.value > 0 and context.machine.min_available_bytes is not None:
        available = format_quantity(context.machine.min_available_bytes, "bytes")
        reasons = (
            f"the host needs {format_quantity(size.value, 'bytes')} for the copy and had"
            f" {available} left",
        )
    return FilledRecommendation(
        mark_command("torch.distributed.checkpoint.async_save(state, checkpoint_id=PATH)")
        + " instead of torch.save(state, PATH); wait for its future before the next save",
        reasons,
    )


def _is_copy_too_large(context: AdviceContext) -> bool:
    size = context.find_evidence("checkpoint.mean_bytes")
    available = context.machine.min_available_bytes
    return size is not None and available is not None and size.value > available / 2


def _fill_sleeping_line(context: AdviceContext) -> FilledRecommendation:
    path = find_dominant_line(context)
    in_timer = context.find_evidence("awaited.in_timer_ratio")
    if context.resource and (in_timer or context.find_evidence("worker.in_timer_ratio")):
        return FilledRecommendation(
            "it sleeps while the step waits for what it makes: take its sleep or its rate limit"
            " away, let it work ahead, or run several of it",
            what=f"Find out why {context.resource} sleeps",
        )
    if context.value("thread.polling_ratio") is not None:
        line = format_line_in_function(path.location) if path is not None else "that polls"
        return FilledRecommendation(
            "the loop only waits until others have done something: what it looks for is late, and"
            " the device idles until it is there",
            what=f"Find out what the loop {line} waits for, and make that faster",
        )
    change = "let a thread or a process of its own sleep, retry, upload or ask instead"
    if path is None:
        dump = mark_command("py-spy dump --pid PID")
        return FilledRecommendation(f"find the line with {dump} while the GPU is idle; {change}")
    return FilledRecommendation(
        change, what=f"Move {format_line_in_function(path.location)} out of the step"
    )


def _fill_rarer_saves(context: AdviceContext) -> FilledRecommendation:
    factor = max(2, math.ceil(context.finding.share_ratio / _SAVE_COST_RATIO))
    length = context.find_evidence("checkpoint.mean_ns")
    reasons = []
    if length is not None:
        reasons.append(
            f"saves of {format_quantity(length.value, 'ns')} cost {_SAVE_COST_RATIO:.0%} when"
            f" they come every"
            f" {format_quantity(length.value / _SAVE_COST_RATIO, 'ns')}"
        )
    return FilledRecommendation(
        f"save every {factor} times as many steps",
        tuple(reasons),
        f"Save {factor} times less often",
    )


def _fill_local_save(context: AdviceContext) -> FilledRecommendation:
    size, length = (
        context.find_evidence("checkpoint.mean_bytes"),
        context.find_evidence("checkpoint.mean_ns"),
    )
    reasons: tuple[str, ...] = ()
    if size is not None and length is not None and length.value > 0:
        rate = format_quantity(1e9 * size.value / length.value, "bytes/s")
        reasons = (f"a save wrote {rate}",)
    return FilledRecommendation(
        "torch.save to a local NVMe folder, then copy it to the shared store in a thread or a"
        " separate process",
        reasons,
    )


def _fill_sharded_save(context: AdviceContext) -> FilledRecommendation:
    return FilledRecommendation(
        "torch.distributed.checkpoint.save (each rank writes its shard) instead of gathering"
        " the state on rank 0",
        (f"the job has {context.ranks} ranks",),
    )


def _fill_rarer_evaluation(context: AdviceContext) -> FilledRecommendation:
    factor = max(2, math.ceil(context.finding.share_ratio / 0.05))
    return FilledRecommendation(
        f"evaluate every {factor} times as many steps, on part of the data, or on other devices"
        " from the last checkpoint",
        what=f"Evaluate {factor} times less often",
    )


def _fill_clock_check(context: AdviceContext) -> FilledRecommendation:
    device = context.finding.culprits[0].device if context.finding.culprits else ""
    device_option = f" -i {shlex.quote(device)}" if device.startswith("GPU-") else ""
    return FilledRecommendation(
        mark_command(f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER,CLOCK{device_option}")
        + " (AMD:"
        f" {mark_command('amd-smi metric')}) on the node names the reason; then fans, filters,"
        f" air flow,"
        " power supply",
        what="Find out what slows the device, and fix it",
    )


def _fill_node_drain(context: AdviceContext) -> FilledRecommendation:
    node = shlex.quote(context.finding.culprits[0].node) if context.finding.culprits else "NODE"
    change = {
        "slurm": mark_command(f"scontrol update NodeName={node} State=DRAIN Reason=throttled")
        + f"; {mark_command(f'sbatch --exclude={node}')}",
        "kubernetes": mark_command(f"kubectl cordon {node}"),
    }.get(context.machine.launcher, f"leave {node} out of the hosts of the next run")
    return FilledRecommendation(change)


SHORT_START = ExclusionRule(
    "short-start",
    "the slowest rank started in less than a minute, and a start happens only once",
    lambda s: (v := s.find_evidence("startup.longest_ns")) is not None and v.value < _MIN_START_NS,
)
NO_EVAL = make_missing_evidence_rule("eval.mean_ns", "no evaluation was marked")
_EVERYWHERE = ExclusionRule(
    "everywhere",
    "the cause is not limited to one node or rank: check the room's cooling or settings instead",
    lambda s: not describe_location(s),
)

_ALL_SAVE = ExclusionRule(
    "all-save",
    "all ranks spend equally long in saves: these may be shards already",
    lambda s: s.ranks > 1 and bool(s.finding.culprits) and not describe_location(s),
)


def _fill_own_work(context: AdviceContext) -> FilledRecommendation:
    path = find_dominant_line(context)
    instruction = (
        f"Take {format_line_in_function(path.location)} off the training thread"
        if path is not None
        else ""
    )
    return FilledRecommendation(
        "a sampler runs in the training process: draw the indices of a whole epoch at once, ahead"
        " or in a thread, and yield slices of them; collate and pack batches in the workers",
        what=instruction,
    )


DIVISION_RECOMMENDATIONS = (
    Recommendation(
        "cheaper-sampler",
        ("cpu-preprocess",),
        "Take the work in the loader off the training thread",
        "draw the indices of an epoch ahead; yield slices of them; collate in workers",
        _fill_own_work,
        evidence_names=("loader.own_work_ratio",),
        expected_change="loader.own_work_ratio falls",
        worse="indices drawn ahead do not follow weights that change in the epoch",
        unless=(
            ExclusionRule(
                "workers-compute",
                "the workers compute, not the training thread",
                lambda s: not OWN_WORK.holds(s),
            ),
        ),
        effort="code",
    ),
    Recommendation(
        "even-shards",
        ("cpu-preprocess",),
        "Divide the data evenly among the workers",
        "every n-th shard or sample instead of a contiguous part; smaller shards; shuffle",
        FilledRecommendation(
            f"give each worker every n-th shard: {mark_command('files[info.id::info.num_workers]')}"
            " (info: get_worker_info()), or shards sorted by size in turn, or smaller and shuffled"
            " ones; batches are awaited in turn, so the busiest worker sets the pace"
        ),
        evidence_names=("worker.balance_ratio",),
        expected_change="worker.balance_ratio rises towards 100 %",
        worse="the order of the samples changes",
        unless=(
            ExclusionRule(
                "workers-even",
                "the workers are about equally busy, or that is not known",
                lambda s: not WORKERS_UNEVEN.holds(s),
            ),
        ),
        effort="code",
    ),
)


def _fill_awaited_work(context: AdviceContext) -> FilledRecommendation:
    name, facts = context.resource, context.resource_facts
    target = "PID" if facts.kind != "process" or facts.pid is None else str(facts.pid)
    profile = mark_command(f"py-spy record -d 30 --pid {target}")
    return FilledRecommendation(
        f"{profile} names the lines that take its time; then make them cheaper, let it work ahead"
        " of the step and keep a few items ready, or divide its work among several processes",
        what=f"Speed up {name}, for which the step waits" if name else "",
    )


def _fill_receiver(context: AdviceContext) -> FilledRecommendation:
    name = context.resource
    return FilledRecommendation(
        "hand over less and less often, make what is done with each item cheaper, or drop items"
        f" instead of waiting ({mark_command('queue.put_nowait')}); a longer queue alone only"
        " postpones the wait",
        what=f"Do not let the step wait for {name}" if name else "",
    )


AWAITED_RECOMMENDATIONS = (
    Recommendation(
        "speed-up-awaited-work",
        ("cpu-preprocess",),
        "Speed up the process or thread for which the step waits",
        "profile it; let it work ahead of the step; divide its work",
        _fill_awaited_work,
        evidence_names=("awaited.on_cpu_ratio", "awaited.waiting_ratio"),
        expected_change="awaited.waiting_ratio falls",
        worse="several processes need memory each; items made ahead wait in memory",
        unless=(NO_AWAITED_WORK,),
        effort="code",
    ),
    Recommendation(
        "do-not-wait-for-receivers",
        ("eval-host",),
        "Do not let the step wait for those that take its output",
        "hand over less; queue.put_nowait; cheaper work per item",
        _fill_receiver,
        evidence_names=("awaited.waiting_ratio",),
        expected_change="awaited.waiting_ratio falls",
        worse="items that are dropped are missing in logs",
        unless=(NO_AWAITED_WORK,),
        effort="code",
    ),
)

PHASE_RECOMMENDATIONS = (
    Recommendation(
        "save-in-background",
        ("checkpoint",),
        "Save in the background: snapshot, then write",
        "torch.distributed.checkpoint.async_save, or a snapshot to host memory",
        _fill_async_save,
        evidence_names=("checkpoint.mean_ns", "checkpoint.mean_bytes"),
        published=_ASYNC_GAIN,
        expected_change="checkpoint.mean_ns falls to the time of the snapshot",
        worse="host memory for a copy of the state; a crash may lose the save in progress",
        unless=(
            MEMORY_SHORT,
            ExclusionRule(
                "copy-does-not-fit",
                "a copy of the state is more than half of the host memory left",
                _is_copy_too_large,
            ),
        ),
        effort="code",
    ),
    Recommendation(
        "save-locally-first",
        ("checkpoint",),
        "Write to a local disk first, upload afterwards",
        "a local NVMe folder, and a copy in the background",
        _fill_local_save,
        evidence_names=("checkpoint.mean_ns", "checkpoint.mean_bytes"),
        published=_ASYNC_GAIN,
        expected_change="checkpoint.mean_ns falls",
        worse="a save is safe only when the copy is done",
        unless=(
            make_missing_evidence_rule(
                "checkpoint.mean_bytes", "how much a save wrote is not known"
            ),
        ),
        effort="code",
    ),
    Recommendation(
        "save-shards",
        ("checkpoint",),
        "Let each rank write its own shard",
        "torch.distributed.checkpoint.save",
        _fill_sharded_save,
        evidence_names=("checkpoint.mean_ns",),
        published="below 0.9 % of the time at a save in every step (ByteRobust, SOSP 2025)",
        expected_change="checkpoint.mean_ns falls with the number of ranks",
        worse="a save is many files, which must be regrouped to load it with another world size",
        unless=(ONE_RANK, _ALL_SAVE),
        addressee="job",
        effort="code",
    ),
    Recommendation(
        "save-less-often",
        ("checkpoint",),
        "Save less often",
        "a longer interval",
        _fill_rarer_saves,
        evidence_names=("checkpoint.mean_ns",),
        expected_change="the share falls with the interval",
        worse="a failure costs more steps",
        addressee="job",
        effort="setting",
    ),
    Recommendation(
        "log-in-background",
        ("eval-host",),
        "Log from a separate thread, and not in every step",
        "QueueHandler, no fsync in steps",
        FilledRecommendation(
            "logging.handlers.QueueHandler with a QueueListener; no fsync or flush in every step;"
            " uploads in a separate thread"
        ),
        evidence_names=("writing_ratio", "write_chars_total"),
        expected_change="thread.writing_ratio falls",
        worse="the last lines before a crash may be missing",
        unless=(
            make_missing_evidence_rule(
                "writing_ratio", "the main thread was not blocked in writing"
            ),
        ),
        effort="code",
    ),
    Recommendation(
        "evaluate-less",
        ("eval-host",),
        "Evaluate less often",
        "a longer interval, fewer samples",
        _fill_rarer_evaluation,
        evidence_names=("eval.mean_ns",),
        expected_change="the share falls with the interval",
        worse="a bad run is noticed later",
        unless=(NO_EVAL,),
        addressee="job",
        effort="setting",
    ),
    Recommendation(
        "metrics-on-gpu",
        ("eval-host",),
        "Compute metrics on the accelerator",
        "torchmetrics on CUDA tensors",
        FilledRecommendation(
            "torchmetrics on CUDA tensors, .item() once at the end; what must run on the CPU goes"
            " to a separate process"
        ),
        evidence_names=("thread.on_cpu_ratio",),
        expected_change="thread.on_cpu_ratio falls",
        worse="a little time and memory of the accelerator",
        unless=(
            make_missing_evidence_rule(
                "thread.on_cpu_ratio", "the main thread did not compute in such pauses"
            ),
        ),
        effort="code",
    ),
    Recommendation(
        "find-the-sleeping-line",
        ("host-asleep",),
        "Find the line that sleeps, and move it out of the step",
        "py-spy dump in a pause; a thread or a process for uploads and retries",
        _fill_sleeping_line,
        evidence_names=("in_timer_ratio", "on_connection_ratio", "thread.polling_ratio"),
        expected_change="thread.in_timer_ratio and thread.on_connection_ratio fall",
        worse="what the step waited for may not be done yet when the next step begins",
        effort="code",
    ),
    Recommendation(
        "prebuilt-image",
        ("startup",),
        "Use a prebuilt image and keep the compile cache",
        "packages in the image; TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR",
        FilledRecommendation(
            "install packages into the image, not at the start; TORCHINDUCTOR_CACHE_DIR and"
            " TRITON_CACHE_DIR on a disk that outlives the job"
        ),
        evidence_names=("startup.longest_ns", "startup.share_ratio"),
        published="installing for 10 min or more was 1.7 % of all issues (Gao et al., ICSE 2024)",
        expected_change="startup.longest_ns falls",
        worse="images must be rebuilt for new packages",
        unless=(SHORT_START,),
        addressee="job",
        effort="code",
    ),
    Recommendation(
        "restore-in-parallel",
        ("startup",),
        "Load checkpoints in parallel, import less",
        "sharded or memory-mapped loading; python -X importtime",
        FilledRecommendation(
            "torch.distributed.checkpoint.load (each rank reads its shard), or"
            f" torch.load(mmap=True); {mark_command('python -X importtime TRAIN.py')} names slow"
            " imports"
        ),
        evidence_names=("startup.longest_ns", "startup.share_ratio"),
        expected_change="startup.longest_ns falls",
        worse="load on the store at the start",
        unless=(SHORT_START,),
        addressee="job",
        effort="code",
    ),
    Recommendation(
        "mend-cooling",
        ("device-throttled",),
        "Find out what slows the device, and fix it",
        "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
        _fill_clock_check,
        evidence_names=("sm_clock_hertz",),
        published="MFU up to 1.7x by watching nodes (Guard, MLSys 2026)",
        expected_change="gpu.sm_clock_hertz is that of the other devices",
        worse="the node is unavailable during the test",
        addressee="node",
        effort="look",
    ),
    Recommendation(
        "drain-node",
        ("device-throttled",),
        "Drain the node until it is repaired",
        "scontrol update State=DRAIN, kubectl cordon",
        _fill_node_drain,
        evidence_names=("sm_clock_hertz",),
        published="step times vary 1 % instead of 20 % (Guard, MLSys 2026)",
        expected_change="the cause is gone without the node",
        worse="one node less",
        unless=(_EVERYWHERE,),
        addressee="node",
        effort="site",
    ),
)


_PLUMBER = "up to 47x for pipelines that were set up wrongly (Plumber, MLSys 2022)"


def _has_no_workers(context: AdviceContext) -> bool:
    """Return whether the training process makes its batches itself."""
    workers = context.find_evidence("loader.workers_count")
    if context.cause == "cpu-preprocess":  # with a data loader, `more-workers` applies
        return context.workers is None and context.resource_facts.kind == "training-process"
    return workers is not None and workers.value == 0


def _fill_workers(context: AdviceContext) -> FilledRecommendation:
    if context.cause == "cpu-preprocess":
        return FilledRecommendation(
            mark_command("DataLoader(num_workers=4, persistent_workers=True)")
            + " over the code that makes a batch, in place of the loop's own thread",
            (
                "the training process makes its batches itself, and Python runs one of its threads"
                " at a time",
            ),
        )
    return FilledRecommendation(
        mark_command("DataLoader(num_workers=4, persistent_workers=True)")
        + " instead of num_workers=0",
        ("the training process loads its batches itself, between steps",),
    )


INPUT_RECOMMENDATIONS = (
    Recommendation(
        "load-in-workers",
        ("input-wait", "cpu-preprocess"),
        "Load batches in worker processes",
        "DataLoader(num_workers=N)",
        _fill_workers,
        evidence_names=("loader.workers_count",),
        published=_PLUMBER,
        expected_change="the wait for data falls",
        worse="each worker needs memory for its copy of the data set and the batches it holds",
        unless=(
            ExclusionRule(
                "has-workers",
                "the loader has workers, or that is not known",
                lambda s: not _has_no_workers(s),
            ),
        ),
        effort="setting",
    ),
    Recommendation(
        "record-the-loader",
        ("input-wait",),
        "Learn what the loader waits for",
        "record with clusterprof: threads, disks and connections show it",
        FilledRecommendation(
            f"{mark_command('clusterprof record -- COMMAND')} for a minute: it splits the same"
            " wait among disks, servers, CPUs and loader settings",
            ("a profiler trace shows the wait but not what the loader did",),
        ),
        evidence_names=("input.unseen_ratio",),
        expected_change="the wait has a cause",
        diagnose=True,
        addressee="job",
        effort="setting",
    ),
)
