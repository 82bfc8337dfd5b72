"""Recommendations for ranks that wait for each other, hang, or restart."""

from __future__ import annotations

import shlex

from clusterprof.analysis.advice.base import (
    ExclusionRule,
    FilledRecommendation,
    Recommendation,
    format_line_in_function,
    mark_command,
)
from clusterprof.analysis.advice.code_lines import find_dominant_line
from clusterprof.analysis.advice.context import AdviceContext
from clusterprof.report.model import Finding
from clusterprof.units import format_quantity

MAX_DEVICE_SPREAD_RATIO = 1.5
"""How many times as long one device may take for equal work as another of its kind, if nothing
throttles it: the outliers of arXiv 2208.11035.
"""
MIN_SECOND_CULPRIT_RATIO = 0.5
"""Part of what the first culprit caused that the second caused, at least, if they take turns."""
MIN_STAGE_WAIT_RATIO = 0.5
"""Part of the waits for a rank's work in messages from which it is the stage of a pipeline."""
_MEASURED_WORK = "step.worked_ns"


def _quote_main_culprit(context: AdviceContext) -> tuple[str, str, str]:
    """Return node, rank and device of the main culprit, quoted for a command."""
    culprits = context.finding.culprits
    if not culprits:
        return "NODE", "RANK", ""
    culprit = culprits[0]
    rank = "RANK" if culprit.rank is None else str(culprit.rank)
    return shlex.quote(culprit.node) if culprit.node else "NODE", rank, culprit.device


def is_late_in_turn(finding: Finding) -> bool:
    """Return whether the waits for a cause have changing culprits, none of which stands out."""
    caused = sorted(culprit.caused_ns for culprit in finding.culprits)[-2:]
    wandering = finding.persistence is not None and finding.persistence.kind == "wandering"
    equal = len(caused) == 2 and caused[0] >= MIN_SECOND_CULPRIT_RATIO * caused[1]
    return wandering and equal and finding.peer_comparison is None


def is_heavy_stage(context: AdviceContext) -> bool:
    """Return whether the rank that others wait for is a pipeline stage with more work."""
    is_imbalance = context.cause == "sync-imbalance"
    return is_imbalance and context.setup.message_wait_ratio >= MIN_STAGE_WAIT_RATIO


def compute_work_ratio(context: AdviceContext) -> float:
    """Compute how many times as long as the others the late rank works in a step; 0 = unknown."""
    comparison = context.finding.peer_comparison
    if comparison is None or comparison.name != _MEASURED_WORK or not comparison.peers_value:
        return 0.0
    return (comparison.value or 0.0) / comparison.peers_value


def _describe_work(context: AdviceContext) -> str:
    """Describe the work of a step on the late rank and on the others; "" if not compared."""
    comparison = context.finding.peer_comparison
    if comparison is None or not compute_work_ratio(context):
        return ""
    own_work, peer_work = (
        format_quantity(value or 0.0, "ns") for value in (comparison.value, comparison.peers_value)
    )
    return f"{own_work} of work in a step against {peer_work}"


def _fill_work_count(context: AdviceContext) -> FilledRecommendation:
    _, rank, _ = _quote_main_culprit(context)
    ratio = compute_work_ratio(context)
    return FilledRecommendation(
        f"print the micro-batches, forward passes and samples of a step on rank {rank} and on"
        f" another: {ratio:.1f} times the work is more than devices of one kind differ. If the"
        " counts differ: as many micro-batches on every rank, one token budget shared out over all"
        " ranks",
        (_describe_work(context),),
        what=f"Count what rank {rank} does in a step, and what another rank does",
    )


def _fill_balance(context: AdviceContext) -> FilledRecommendation:
    _, rank, _ = _quote_main_culprit(context)
    if is_late_in_turn(context.finding):
        return FilledRecommendation(
            "batches of about equal length on all ranks of a step: sort or bucket by length over"
            " the global batch, then share it out; or batch by tokens (max_tokens), or pack",
            ("ranks are late in turn, as with batches of different length",),
            what="Give all ranks batches of equal length or tokens in each step",
        )
    return FilledRecommendation(
        f"count tokens (and the sum of their squares) per step on rank {rank} and on another; then"
        " batch by tokens (max_tokens), sort or pack by length, distribute by squared length"
    )


def _measure_excess(context: AdviceContext) -> float:
    """Return how many more samples or tokens the late rank has in a step, as a ratio; 0 = none."""
    excess = context.find_evidence("_excess_ratio")
    return 0.0 if excess is None else excess.value


def _fill_equal_batches(context: AdviceContext) -> FilledRecommendation:
    _, rank, _ = _quote_main_culprit(context)
    excess = context.find_evidence("_excess_ratio")
    unit = "tokens" if excess is not None and "tokens" in excess.name else "samples"
    return FilledRecommendation(
        f"rank {rank} takes {100 * _measure_excess(context):.0f} % more {unit} in a step than the"
        " ranks that wait: the same batch_size and as many micro-batches on every rank, a"
        " DistributedSampler for equal shares; for devices of different speed, batches in"
        " proportion to their speed",
        what=f"Give rank {rank} as many {unit} in a step as the other ranks",
    )


def _fill_line(context: AdviceContext) -> FilledRecommendation:
    _, rank, _ = _quote_main_culprit(context)
    path = find_dominant_line(context)
    line = "the line" if path is None else format_line_in_function(path.location)
    return FilledRecommendation(
        f"compare what rank {rank} computes there with another rank: more or larger samples, other"
        " arguments, work that only this rank does; then share it out or move it out of the step",
        what=f"Look at {line}, in which rank {rank} spends more time than the others",
    )


def _fill_device_comparison(context: AdviceContext) -> FilledRecommendation:
    node, rank, device = _quote_main_culprit(context)
    device_option, comparison = "", " (compare it with the others)"
    if context.nodes > 1:
        device_option = f" -i {shlex.quote(device)}" if device.startswith("GPU-") else ""
        comparison = " (and on a node that waits)"
    return FilledRecommendation(
        f"on {node if context.has_host_names else 'its host'}:"
        f" {mark_command('nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE,POWER' + device_option)}"
        f"{comparison};"
        f" {mark_command('dcgmi diag -r 2')}",
        (f"rank {rank} arrived last",) if rank != "RANK" else (),
    )


def _fill_node_swap(context: AdviceContext) -> FilledRecommendation:
    node, rank, _ = _quote_main_culprit(context)
    return FilledRecommendation(
        f"run the job once with {node} last in the host file: if the late rank moves with the"
        f" node, it is the machine; if it stays rank {rank} , it is the work",
        what=f"Swap {node} with another node to see whether machine or work is the reason",
    )


def _fill_last_stage(context: AdviceContext) -> FilledRecommendation:
    _, rank, _ = _quote_main_culprit(context)
    group = context.finding.culprit_group
    stage = f"the stage of rank {rank}" if group is None else shlex.quote(group.name).strip("'")
    work = _describe_work(context)
    target = f" until all stages take equally long ({work})" if work else ""
    return FilledRecommendation(
        f"one or two layers less in the late stage{target}; if it also computes the loss:"
        " Megatron --decoder-last-pipeline-num-layers",
        what=f"Give {stage} fewer layers" if rank != "RANK" else "",
    )


def _fill_stack_dump(context: AdviceContext) -> FilledRecommendation:
    node, rank, _ = _quote_main_culprit(context)
    return FilledRecommendation(
        f"on {node}: {mark_command('py-spy dump --pid PID')} of rank {rank}, and"
        f" {mark_command('dmesg -T | tail -50')};"
        f" {mark_command('clusterprof record --on-hang COMMAND')} runs a command by itself when"
        " ranks make no progress",
        what=f"Look at what rank {rank} is doing" if rank != "RANK" else "",
    )


def _fill_first_failure(context: AdviceContext) -> FilledRecommendation:
    node, rank, _ = _quote_main_culprit(context)
    return FilledRecommendation(
        f"the log of rank {rank} on {node}"
        f" ({mark_command('torchrun --log-dir DIR --redirects 3')}), and"
        f" {mark_command('dmesg -T')} there: Xid, out of memory, mount errors",
        what=f"Find out why rank {rank} on {node} failed" if rank != "RANK" else "",
    )


def _fill_exclusion(context: AdviceContext) -> FilledRecommendation:
    node, _, _ = _quote_main_culprit(context)
    change = {
        "slurm": mark_command(f"sbatch --exclude={node}"),
        "kubernetes": mark_command(f"kubectl cordon {node}"),
    }.get(context.machine.launcher, f"leave {node} out of the hosts")
    return FilledRecommendation(f"{change}, if it fails a second time")


NO_RANK_NAMED = ExclusionRule(
    "nobody-named", "no rank stands out", lambda s: not s.finding.culprits
)
RANK_NAMED = ExclusionRule(
    "rank-named", "the others wait for one rank", lambda s: bool(s.finding.culprits)
)
THROTTLED = ExclusionRule(
    "device-throttled",
    "device-throttled was found too: then that is the reason",
    lambda s: "device-throttled" in s.other_causes,
)

NO_DOMINANT_LINE = ExclusionRule(
    "no-line", "no line of code takes half of the time", lambda s: find_dominant_line(s) is None
)
NO_ACCELERATOR = ExclusionRule(
    "no-accelerator", "no accelerator was measured", lambda s: not s.setup.has_device
)
EQUAL_BATCHES = ExclusionRule(
    "equal-batches",
    "the late rank has no more samples or tokens in a step than the others, or they are not known",
    lambda s: _measure_excess(s) <= 0,
)
LARGER_BATCHES = ExclusionRule(
    "larger-batches",
    "the late rank has more samples or tokens in a step: no device is at fault",
    lambda s: _measure_excess(s) > 0,
)
WHOLE_STAGE = ExclusionRule(
    "whole-stage",
    "all ranks of a stage are alike slow: it has more work, and no device is at fault",
    lambda s: s.finding.culprit_group is not None,
)
LATE_IN_TURN = ExclusionRule(
    "late-in-turn",
    "ranks are late in turn, as with batches of different length; a slow device is late each time",
    lambda s: is_late_in_turn(s.finding),
)
LATE_IN_ALL_STEPS = ExclusionRule(
    "late-in-all-steps",
    "the late rank does not change from step to step, or it works longer on the whole",
    lambda s: s.cause == "sync-slow-compute" and not is_late_in_turn(s.finding),
)
HEAVY_STAGE = ExclusionRule(
    "heavy-stage",
    "the others wait in messages (send, receive) for it: it is the stage of a pipeline, and has"
    " more work",
    is_heavy_stage,
)
AS_DEVICES_DIFFER = ExclusionRule(
    "as-devices-differ",
    "it works no longer than a device of the same kind may take for equal work, or that is not"
    " known",
    lambda s: compute_work_ratio(s) < MAX_DEVICE_SPREAD_RATIO,
)

SYNCHRONIZATION_RECOMMENDATIONS = (
    Recommendation(
        "more-microbatches",
        ("sync-bubble",),
        "Use more micro-batches or an interleaved schedule",
        "more micro-batches, virtual stages",
        FilledRecommendation(
            "twice as many micro-batches of half the size; an interleaved schedule"
            " (torch.distributed.pipelining.ScheduleInterleaved1F1B, Megatron"
            " --num-layers-per-virtual-pipeline-stage)"
        ),
        published="the bubble is (stages - 1) / (micro-batches + stages - 1) of a step",
        expected_change="stall.synchronization_ratio falls",
        worse="smaller micro-batches use the devices less; more messages between stages",
        addressee="job",
        effort="setting",
    ),
    Recommendation(
        "lighter-last-stage",
        ("sync-bubble", "sync-imbalance"),
        "Give the last stage fewer layers",
        "layers by stage",
        _fill_last_stage,
        published="+9.9 % (ByteDance, OSDI 2025)",
        expected_change="stall.synchronization_ratio falls",
        worse="the other stages need more memory",
        unless=(
            ExclusionRule(
                "no-pipeline",
                "no time was lost to a pipeline's schedule",
                lambda s: (
                    s.cause != "sync-bubble"
                    and "sync-bubble" not in s.other_causes
                    and not is_heavy_stage(s)
                ),
            ),
        ),
        addressee="job",
        effort="code",
    ),
    Recommendation(
        "equal-batches",
        ("sync-slow-compute", "sync-imbalance"),
        "Give all ranks as many samples or tokens in a step",
        "batch_size, micro-batches, DistributedSampler",
        _fill_equal_batches,
        evidence_names=("step.samples_excess_ratio", "step.tokens_excess_ratio"),
        expected_change="stall.synchronization_ratio falls",
        worse="the global batch changes unless the other ranks take more",
        unless=(EQUAL_BATCHES, NO_RANK_NAMED),
        addressee="job",
        effort="setting",
    ),
    Recommendation(
        "look-at-line",
        ("sync-slow-compute", "sync-imbalance"),
        "Look at the line in which the late rank spends more time than the others",
        "what the rank computes there",
        _fill_line,
        expected_change="stall.synchronization_ratio falls",
        worse="the order of samples may change",
        unless=(NO_RANK_NAMED, NO_DOMINANT_LINE),
        effort="code",
    ),
    Recommendation(
        "count-work",
        ("sync-imbalance",),
        "Count what the late rank does in a step, and what another rank does",
        "micro-batches, forward passes and samples of a step",
        _fill_work_count,
        evidence_names=(_MEASURED_WORK,),
        published="outliers of 1.5x among like GPUs (arXiv 2208.11035)",
        expected_change="the counts are equal on all ranks",
        unless=(
            *(THROTTLED, NO_RANK_NAMED, WHOLE_STAGE, HEAVY_STAGE, LARGER_BATCHES),
            AS_DEVICES_DIFFER,
        ),
        effort="look",
    ),
    Recommendation(
        "balance-work",
        ("sync-imbalance", "sync-slow-compute"),
        "Give all ranks the same amount of work per step",
        "batches by tokens, sequences distributed by squared length, equal shards",
        _fill_balance,
        published="+23.9 % by redistributing sequences (ByteDance, OSDI 2025)",
        expected_change="stall.synchronization_ratio falls",
        worse="the order of samples is no longer random across ranks",
        unless=(HEAVY_STAGE, LATE_IN_ALL_STEPS),
        addressee="job",
        effort="code",
    ),
    Recommendation(
        "compare-devices",
        ("sync-slow-compute", "sync-imbalance"),
        "Compare its device with that of another rank: clocks, errors, other processes",
        "nvidia-smi, dcgmi diag",
        _fill_device_comparison,
        evidence_names=("step.worked_ns",),
        published="outliers of 1.5x among like GPUs (arXiv 2208.11035)",
        expected_change="both show the same clocks",
        worse="dcgmi diag stops the job's work on the device",
        unless=(
            *(THROTTLED, NO_RANK_NAMED, WHOLE_STAGE, NO_ACCELERATOR, LARGER_BATCHES),
            *(HEAVY_STAGE, LATE_IN_TURN),
        ),
        effort="look",
    ),
    Recommendation(
        "swap-nodes",
        ("sync-slow-compute",),
        "Swap the node to see whether machine or work is the reason",
        "another order of hosts",
        _fill_node_swap,
        expected_change="the late rank moves with the node, or stays",
        unless=(
            *(NO_RANK_NAMED, LATE_IN_TURN),
            ExclusionRule("one-node", "the job runs on one node", lambda s: s.nodes < 2),
        ),
        diagnose=True,
        addressee="job",
        effort="setting",
    ),
    Recommendation(
        "record-every-node",
        ("sync-unknown-peer",),
        "Record every rank of the job, or give the traces of the other ranks as well",
        "clusterprof record by the launcher; the traces of all ranks",
        FilledRecommendation(
            f"{mark_command('clusterprof analyze RANK0 RANK1 ...')} with the traces of all ranks,"
            f" or {mark_command('srun clusterprof record -- COMMAND')} on every node, and"
            f" {mark_command('clusterprof analyze RUN/')} with all folders in one place"
        ),
        expected_change="sync-unknown-peer becomes a cause of a rank",
        diagnose=True,
        addressee="job",
        effort="setting",
    ),
    Recommendation(
        "look-at-the-stack",
        ("fail-hang",),
        "Look at what the late rank is doing",
        "py-spy dump, dmesg, NCCL's flight recorder",
        _fill_stack_dump,
        evidence_names=("longest_ns", "waiting_count"),
        expected_change="no operation is under way at the end",
        unless=(NO_RANK_NAMED,),
        diagnose=True,
        addressee="job",
        effort="look",
    ),
    Recommendation(
        "same-order",
        ("fail-hang",),
        "Check that all ranks call the same operations in the same order",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL",
        FilledRecommendation(
            f"{mark_command('TORCH_DISTRIBUTED_DEBUG=DETAIL python TRAIN.py')} says where ranks"
            f" call different"
            " collectives; branches on rank or on data around a collective are the usual reason"
        ),
        evidence_names=("longest_ns", "waiting_count"),
        expected_change="no operation is under way at the end",
        worse="the debug level costs time",
        unless=(RANK_NAMED,),
        diagnose=True,
        addressee="job",
        effort="setting",
    ),
    Recommendation(
        "end-hangs-early",
        ("fail-hang",),
        "Let a hang end the job instead of holding its devices",
        "a timeout of the process group, restarts by the launcher",
        FilledRecommendation(
            f"{mark_command('dist.init_process_group(timeout=timedelta(minutes=10))')}: a hang"
            f" then ends the"
            f" job, and {mark_command('torchrun --max-restarts=3')} restarts it"
        ),
        evidence_names=("longest_ns",),
        published="hangs were 9.9 % of incidents (ByteRobust, SOSP 2025)",
        expected_change="fail-hang is no longer than the timeout",
        worse="a slow save or a long evaluation inside an operation looks like a hang",
        addressee="job",
        effort="setting",
    ),
    Recommendation(
        "first-failure",
        ("fail-restart",),
        "Find out why the first rank failed",
        "log and kernel messages of its node",
        _fill_first_failure,
        evidence_names=("restart.longest_ns",),
        expected_change="no restart",
        unless=(NO_RANK_NAMED,),
        diagnose=True,
        addressee="job",
        effort="look",
    ),
    Recommendation(
        "restart-faster",
        ("fail-restart",),
        "Restart faster",
        "local checkpoints, compile cache, restarts by the launcher",
        FilledRecommendation(
            "checkpoints on a local disk, a compile cache that outlives the job"
            " (TORCHINDUCTOR_CACHE_DIR), torchrun --max-restarts instead of a new job"
        ),
        evidence_names=("restart.longest_ns",),
        expected_change="restart.longest_ns falls",
        addressee="job",
        effort="code",
    ),
    Recommendation(
        "exclude-node",
        ("fail-restart",),
        "Leave the node out when it fails again",
        "sbatch --exclude, kubectl cordon",
        _fill_exclusion,
        evidence_names=("restart.longest_ns",),
        published="lemon nodes: failures of large jobs from 14 % to 4 % (Meta, HPCA 2025)",
        expected_change="no restart",
        worse="one node less",
        unless=(NO_RANK_NAMED,),
        addressee="node",
        effort="setting",
    ),
)
