"""The second shape of a job: sharded parameters, several epochs, a plain loop without marks.

As in FSDP, each unit's parameters are gathered before they are used, forward and backward, and its
gradients are reduced and scattered afterward. Workers are started anew in each epoch
(`persistent_workers=False`). Between epochs the job validates and computes metrics on the host.
Rank 0 writes its log in the loop and waits for the disk. The first steps are slow: kernels are
loaded and selected at their first use. Validation, logging and first use are not marked, as in a
plain PyTorch loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterprof.probe import layout
from clusterprof_lab.synth.simulated_rank import HostPart, SimulatedRank
from clusterprof_lab.synth.wait_truth import Label

if TYPE_CHECKING:
    from clusterprof_lab.synth.simulate_job import Job

UNITS = 4
"""Units that are gathered one by one."""
_OPERATIONS = 3 * UNITS
"""Of a step: two gathers and one reduction for each unit."""
FIRST_USE_RATIOS = (0.5, 0.25, 0.12)
"""What the first steps take longer, of the time of a step's kernels."""
VALIDATION_PASSES = 6
METRICS_RATIO = 0.6
"""Host time of the metrics of one validation, of the time of a step's kernels."""
LOG_EVERY, LOG_RATIO = 10, 0.08
_LOG_BYTES, _LOG_WRITES = 64 << 10, 4


def begin_step(job: Job, step: int) -> None:
    """Do what comes between two steps: first use, the log, validation after an epoch."""
    plan = job.plan
    if step < len(FIRST_USE_RATIOS):
        for player in job.players:
            player.run_part(
                HostPart(round(plan.compute_ns * FIRST_USE_RATIOS[step]), "user", "startup")
            )
    if step and step % LOG_EVERY == 0:
        _write_log(job.players[0], round(plan.compute_ns * LOG_RATIO))
    if step and step % -(-plan.steps // plan.epochs) == 0:
        for index, player in enumerate(job.players):
            _validate(player, plan.compute_ns)
            job.restart_loader(index, step)


def _write_log(player: SimulatedRank, ns: int) -> None:
    player.synchronize()  # the loss has to be known
    player.run_part(HostPart(ns // 5, "user", "eval-host"))
    player.run_part(
        HostPart(ns - ns // 5, "block-io", "eval-host", "vda", _LOG_BYTES, _LOG_WRITES, 0, "fsync")
    )


def _validate(player: SimulatedRank, compute_ns: int) -> None:
    for _ in range(VALIDATION_PASSES):
        player.launch(compute_ns // 3)
    player.synchronize()
    player.run_part(HostPart(round(compute_ns * METRICS_RATIO), "user", "eval-host"))


def pass_units(job: Job, step: int) -> None:
    """Run forward and backward unit by unit."""
    plan = job.plan
    net: dict[Label, int] = {("net-transfer", None): plan.transfer_ns // _OPERATIONS}
    size = round(net["net-transfer", None] * 1e-9 * plan.link_bytes_per_second)
    for label, ns in job.faults.get_transfer_delay(step).items():
        net[label] = net.get(label, 0) + ns // _OPERATIONS
    everybody = range(plan.ranks)
    for number, where in enumerate(("forward", "backward")):
        compute_ns = plan.compute_ns * (1 + number) // (3 * UNITS)
        for _ in range(UNITS):
            job.run_collective(everybody, layout.ALL_GATHER, net, size)
            for player in job.players:
                job.run_pass(player, step, where, compute_ns, 1)
            if where == "backward":
                job.run_collective(everybody, layout.REDUCE_SCATTER, net, size)
