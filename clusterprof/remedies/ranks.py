"""What to do where ranks wait for each other, stand still, or begin anew."""

from __future__ import annotations

import shlex

from clusterprof.remedies.base import Filled, Mend, Rule
from clusterprof.remedies.commands import run
from clusterprof.remedies.scene import Scene


def _chief(scene: Scene) -> tuple[str, str, str]:
    """Node, rank and device of who caused most, as words of a command."""
    culprits = scene.finding.culprits
    if not culprits:
        return "NODE", "RANK", ""
    one = culprits[0]
    rank = "RANK" if one.rank is None else str(one.rank)
    return shlex.quote(one.node) if one.node else "NODE", rank, one.device


def _balance(scene: Scene) -> Filled:
    _, rank, _ = _chief(scene)
    return Filled(
        f"count tokens (and the sum of their squares) per step on rank {rank} and on another; then"
        " batch by tokens (max_tokens), sort or pack by length, deal out by length squared"
    )


def _same_device(scene: Scene) -> Filled:
    node, rank, device = _chief(scene)
    one, beside = "", " (its part beside the others)"
    if scene.nodes > 1:
        one = f" -i {shlex.quote(device)}" if device.startswith("GPU-") else ""
        beside = " (and on a node that waits)"
    return Filled(
        f"on {node}: {run(f'nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE,POWER{one}')}{beside};"
        f" {run('dcgmi diag -r 2')}",
        (f"rank {rank} came last",) if rank != "RANK" else (),
    )


def _swap(scene: Scene) -> Filled:
    node, rank, _ = _chief(scene)
    return Filled(
        f"run the job once with {node} last in the host file: when the late rank moves with the"
        f" node it is the machine, when it stays rank {rank} it is the work",
        what=f"Swap {node} with another node to tell the machine from the work",
    )


def _microbatches(scene: Scene) -> Filled:
    return Filled(
        "twice as many micro-batches of half the size; an interleaved schedule"
        " (torch.distributed.pipelining.ScheduleInterleaved1F1B, Megatron"
        " --num-layers-per-virtual-pipeline-stage)"
    )


def _last_stage(scene: Scene) -> Filled:
    _, rank, _ = _chief(scene)
    return Filled(
        "one or two layers less in the stage that comes last; where it computes the loss too:"
        " Megatron --decoder-last-pipeline-num-layers",
        what=f"Give the stage of rank {rank} fewer layers" if rank != "RANK" else "",
    )


def _record_all(scene: Scene) -> Filled:
    return Filled(
        f"{run('srun clusterprof record -- COMMAND')} on every node, and"
        f" {run('clusterprof analyze RUN/')} with all folders in one place"
    )


def _stack(scene: Scene) -> Filled:
    node, rank, _ = _chief(scene)
    return Filled(
        f"on {node}: {run('py-spy dump --pid PID')} of rank {rank}, and"
        f" {run('dmesg -T | tail -50')}; with"
        f" {run('export TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1')} the next"
        " time writes what each rank was in",
        what=f"Look at what rank {rank} is doing" if rank != "RANK" else "",
    )


def _order(scene: Scene) -> Filled:
    return Filled(
        f"{run('TORCH_DISTRIBUTED_DEBUG=DETAIL python TRAIN.py')} says where ranks call different"
        " collectives; branches on rank or on data around a collective are the usual reason"
    )


def _timeout(scene: Scene) -> Filled:
    return Filled(
        f"{run('dist.init_process_group(timeout=timedelta(minutes=10))')}: a hang then ends the"
        f" job, and {run('torchrun --max-restarts=3')} begins it anew"
    )


def _first_failure(scene: Scene) -> Filled:
    node, rank, _ = _chief(scene)
    return Filled(
        f"the log of rank {rank} on {node} ({run('torchrun --log-dir DIR --redirects 3')}), and"
        f" {run('dmesg -T')} there: Xid, out of memory, mount errors",
        what=f"Find out why rank {rank} on {node} failed" if rank != "RANK" else "",
    )


def _exclude(scene: Scene) -> Filled:
    node, _, _ = _chief(scene)
    change = {
        "slurm": run(f"sbatch --exclude={node}"),
        "kubernetes": run(f"kubectl cordon {node}"),
    }.get(scene.machine.launcher, f"leave {node} out of the hosts")
    return Filled(f"{change}, if it fails a second time")


def _faster_restart(scene: Scene) -> Filled:
    return Filled(
        "checkpoints on a local disk, a compile cache that outlives the job"
        " (TORCHINDUCTOR_CACHE_DIR), torchrun --max-restarts in the place of a new job"
    )


NOBODY = Rule("nobody-named", "no rank stands out", lambda s: not s.finding.culprits)
SOMEBODY = Rule("rank-named", "one rank is waited for", lambda s: bool(s.finding.culprits))
THROTTLED = Rule(
    "device-throttled",
    "device-throttled was found too: then that is the reason",
    lambda s: "device-throttled" in s.beside,
)

REMEDIES = (
    Mend(
        "more-microbatches", ("sync-bubble",), "Use more micro-batches or an interleaved schedule",
        "more micro-batches, virtual stages", _microbatches,
        published="the bubble is (stages - 1) / (micro-batches + stages - 1) of a step",
        moves="stall.synchronization_ratio falls",
        worse="smaller micro-batches fill the devices less; more messages between stages",
        place="job",
        effort="setting",
    ),
    Mend(
        "lighter-last-stage", ("sync-bubble", "sync-imbalance"), "Give the last stage fewer layers",
        "layers by stage", _last_stage, published="+9.9 % (ByteDance, OSDI 2025)",
        moves="stall.synchronization_ratio falls", worse="memory of the other stages",
        unless=(Rule("no-pipeline", "no time was lost to a pipeline's schedule",
                     lambda s: s.cause != "sync-bubble" and "sync-bubble" not in s.beside),),
        place="job",
        effort="code",
    ),
    Mend(
        "balance-work", ("sync-imbalance",), "Give all ranks as much work in a step",
        "batches by tokens, sequences dealt out by length squared, equal shards", _balance,
        published="+23.9 % by dealing sequences out (ByteDance, OSDI 2025)",
        moves="stall.synchronization_ratio falls",
        worse="the order of samples is no longer random across ranks",
        place="job",
        effort="code",
    ),
    Mend(
        "compare-devices", ("sync-slow-compute", "sync-imbalance"),
        "Compare its device with that of another rank: clocks, errors, neighbours",
        "nvidia-smi, dcgmi diag", _same_device, seen=("step.worked_ns",),
        published="outliers of 1.5x among like GPUs (arXiv 2208.11035)",
        moves="both show the same clocks", worse="dcgmi diag stops the job's work on the device",
        unless=(THROTTLED, NOBODY),
        effort="look",
    ),
    Mend(
        "swap-nodes", ("sync-slow-compute",), "Swap the node to tell the machine from the work",
        "another order of hosts", _swap, moves="the late rank moves with the node, or stays",
        unless=(NOBODY, Rule("one-node", "the job runs on one node", lambda s: s.nodes < 2)),
        diagnose=True,
        place="job",
        effort="setting",
    ),
    Mend(
        "record-every-node", ("sync-unknown-peer",), "Record on every node of the job",
        "clusterprof record by the launcher", _record_all,
        moves="sync-unknown-peer becomes a cause of a rank", diagnose=True,
        place="job",
        effort="setting",
    ),
    Mend(
        "look-at-the-stack", ("fail-hang",), "Look at what the rank that is waited for does",
        "py-spy dump, dmesg, NCCL's flight recorder", _stack,
        seen=("longest_ns", "waiting_count"), moves="no operation is under way at the end",
        unless=(NOBODY,), diagnose=True,
        place="job",
        effort="look",
    ),
    Mend(
        "same-order", ("fail-hang",), "Check that all ranks call the same operations in one order",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL", _order, seen=("longest_ns", "waiting_count"),
        moves="no operation is under way at the end", worse="the debug level costs time",
        unless=(SOMEBODY,), diagnose=True,
        place="job",
        effort="setting",
    ),
    Mend(
        "end-hangs-early", ("fail-hang",), "Let a hang end the job instead of holding its devices",
        "a timeout of the process group, restarts by the launcher", _timeout,
        seen=("longest_ns",), published="hangs were 9.9 % of incidents (ByteRobust, SOSP 2025)",
        moves="fail-hang is no longer than the timeout",
        worse="a slow save or a long evaluation inside an operation looks like a hang",
        place="job",
        effort="setting",
    ),
    Mend(
        "first-failure", ("fail-restart",), "Find out why the first rank failed",
        "log and kernel messages of its node", _first_failure, seen=("restart.longest_ns",),
        moves="no restart", unless=(NOBODY,), diagnose=True,
        place="job",
        effort="look",
    ),
    Mend(
        "restart-faster", ("fail-restart",), "Begin anew faster",
        "local checkpoints, compile cache, restarts by the launcher", _faster_restart,
        seen=("restart.longest_ns",), moves="restart.longest_ns falls",
        place="job",
        effort="code",
    ),
    Mend(
        "exclude-node", ("fail-restart",), "Leave the node out when it fails again",
        "sbatch --exclude, kubectl cordon", _exclude, seen=("restart.longest_ns",),
        published="lemon nodes: failures of large jobs from 14 % to 4 % (Meta, HPCA 2025)",
        moves="no restart", worse="one node less", unless=(NOBODY,),
        place="node",
        effort="setting",
    ),
)  # fmt: skip
