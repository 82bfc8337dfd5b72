"""`python -m clusterprof_lab cluster`: write recordings of a simulated cluster."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from clusterprof_lab.cluster.make import count_cpus, make_cluster, open_dask, open_pool
from clusterprof_lab.cluster.plan import DEFAULTS, MS, ClusterPlanError, make_plan, parse_fault

FAILED = 2
_EXAMPLES = """
faults: KIND:PLACE[,share=X][,begin=X][,end=X][,every=N][,active=N]
  straggler:RANK      the rank computes longer
  slow-node:NODE      all ranks of the node compute longer
  slow-storage:NODE   reads of the node's disk take longer, until its ranks wait for data
  late-loader:RANK    the rank's loader decodes longer, until the rank waits for data
  slow-link:NODE      operations that leave the node take longer; its port has errors
  share: what it adds to a step, of the step's time (0.2); begin, end: parts of the run between
  which it is active (0, 1); every, active: intermittent, in `active` steps of `every`

examples:
  python -m clusterprof_lab cluster --out /tmp/dp --ranks 64 --hours 1 --fault straggler:3
  python -m clusterprof_lab cluster --out /tmp/big --ranks 10000 --seconds 120 \\
      --fault slow-storage:700,share=0.15
  python -m clusterprof_lab cluster --out /tmp/3d --topology 3d --ranks 1024 --seconds 600 \\
      --fault straggler:9,begin=0.3,end=0.6 --fault slow-link:20,every=40,active=10

DIR gets recording/ (a folder per node, for `clusterprof analyze DIR/recording`), truth.json and,
with --steps-ledger, steps/NODE.npz: every rank's arrive, leave, data_wait, compute by step.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write a cluster; 2 when that can't be done."""
    options = _make_parser().parse_args(argv)
    nodes, rest = divmod(options.ranks, options.per_node)
    seconds = options.seconds or round(options.hours * 3600)
    open_map = open_dask(options.dask) if options.dask else open_pool(options.processes)
    began = time.perf_counter()
    try:
        if rest:
            raise ClusterPlanError(
                f"{options.ranks} ranks are no whole nodes of {options.per_node}"
            )
        plan = make_plan(
            options.topology,
            nodes,
            options.per_node,
            seconds=seconds,
            step_ns=None if options.step_s is None else round(options.step_s * 1e3) * MS,
            inner=options.inner,
            stages=options.stages,
            micro_batches=options.micro_batches,
            layers=options.layers,
            buckets=options.buckets,
            modules=options.modules,
            workers=options.workers,
            jitter=options.jitter,
            seed=options.seed,
            barrier=not options.no_barrier,
            threads=not options.no_threads,
            faults=tuple(map(parse_fault, options.fault)),
        )
        with open_map as run_map:
            made = make_cluster(plan, options.out, run_map, options.steps_ledger)
    except (ClusterPlanError, OSError) as error:
        print(f"clusterprof-lab cluster: {error}", file=sys.stderr)
        return FAILED
    per_step = sum(len(plan.list_stage_operations(s)) for s in range(plan.stages)) / plan.stages
    print(
        f"{options.out / 'recording'}: {plan.ranks} ranks on {nodes} nodes, {seconds} s, "
        f"{made.steps} steps, {made.steps * per_step * plan.ranks / 1e6:.1f} M operations, "
        f"{made.bytes / 1e6:.0f} MB, in {time.perf_counter() - began:.1f} s"
    )
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="clusterprof-lab cluster",
        description="Write recordings of a simulated cluster with known faults.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="where the run goes; new")
    add("--topology", choices=sorted(DEFAULTS), default="data-parallel")
    add("--ranks", type=int, default=16, help="of all nodes (16)")
    add("--per-node", type=int, default=8, help="ranks of a node (8)")
    add("--hours", type=float, default=1 / 60, help="length of the run (a minute)")
    add("--seconds", type=int, help="length of the run, instead of --hours")
    add("--fault", action="append", default=[], metavar="SPEC", help="inject a fault (see below)")
    add("--seed", type=int, default=0)
    add("--jitter", type=float, default=0.01, help="of the work before an operation (0.01)")
    density = parser.add_argument_group("density (default: that of the topology)")
    add = density.add_argument
    add("--step-s", type=float, help="time of a step")
    add("--inner", type=int, help="ranks of a tensor or expert group")
    add("--stages", type=int, help="pipeline stages")
    add("--micro-batches", type=int)
    add("--layers", type=int, help="tensor operations of a micro-batch, or MoE layers")
    add("--buckets", type=int, help="gradient operations over all ranks")
    add("--modules", type=int, help="spans of the work before an operation")
    add("--workers", type=int, help="loader workers of a rank (2)")
    add("--no-barrier", action="store_true", help="no operations over all ranks (3d, moe)")
    add("--no-threads", action="store_true", help="leave the table of threads out")
    add = parser.add_argument_group("writing").add_argument
    add("--processes", type=int, default=count_cpus(), metavar="N", help="(all CPUs)")
    add("--dask", metavar="ADDRESS", help="write on the workers of a Dask scheduler instead")
    add("--steps-ledger", action="store_true", help="write the ledger of every rank and step")
    return parser


if __name__ == "__main__":
    sys.exit(main())
