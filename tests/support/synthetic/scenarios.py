"""Jobs of several layouts, with faults drawn at random."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.support.synthetic.jobs import (
    MS,
    WORK,
    Fault,
    Job,
    World,
    make_pipeline_groups,
    send_to_stage,
)

WORLD_TEAM = 999_999
NODE_RANKS = 8
LOADING = 0
JITTER = 0.02


def make_data_parallel_job(
    ranks: int,
    faults: tuple[Fault, ...] = (),
    sizes_ns: tuple[int, ...] = (),
    steps: int = 20,
    jitter_ns: int = 0,
    seed: int = 0,
    odds: float = 1.0,
    decoy: int = -1,
    work_ns: int = 50 * MS,
    late_ns: int = 0,
) -> Job:
    """One all-reduce a step over all ranks; each fault strikes in a step with these odds."""
    world = World(ranks, faults, seed, late_ns)
    world.decoy = decoy
    everyone = np.arange(ranks)[None, :]
    for _ in range(steps):
        do_work(world, work_ns, jitter_ns)
        strike_all(world, sizes_ns, odds)
        world.meet(everyone, np.array([WORLD_TEAM]), 5 * MS)
    return world.job()


def make_hierarchical_job(
    ranks: int,
    faults: tuple[Fault, ...] = (),
    sizes_ns: tuple[int, ...] = (),
    steps: int = 20,
    jitter_ns: int = 0,
    seed: int = 0,
    odds: float = 1.0,
    decoy: int = -1,
) -> Job:
    """An exchange within each node after every half step, one over all ranks at its end.

    A slow rank delays its node, its node delays the world: a chain in every step.
    """
    world = World(ranks, faults, seed)
    world.decoy = decoy
    nodes = np.arange(ranks).reshape(-1, min(NODE_RANKS, ranks // 2))
    everyone = np.arange(ranks)[None, :]
    for _ in range(steps):
        do_work(world, 25 * MS, jitter_ns)
        strike_all(world, sizes_ns, odds)
        world.meet(nodes, np.arange(len(nodes)), 1 * MS)
        do_work(world, 25 * MS, jitter_ns)
        world.meet(everyone, np.array([WORLD_TEAM]), 5 * MS)
    return world.job()


def make_pipeline_job(
    ranks: int,
    faults: tuple[Fault, ...] = (),
    sizes_ns: tuple[int, ...] = (),
    steps: int = 10,
    jitter_ns: int = 0,
    seed: int = 0,
    odds: float = 1.0,
    decoy: int = -1,
    stages: int = 4,
    batches: int = 4,
) -> Job:
    """Batches go forward through all stages, then back; then each stage reduces over replicas.

    A fault strikes the work of each batch: one that strikes a stage while it has nothing to do yet
    would cost nobody anything.
    """
    world = World(ranks, faults, seed)
    world.decoy = decoy
    grid, planes, teams = make_pipeline_groups(ranks, stages)
    for _ in range(steps):
        for order in (range(stages), range(stages - 1, -1, -1)):
            path = list(order)
            for _ in range(batches):
                for here, there in zip(path, [*path[1:], None]):
                    do_work(world, 10 * MS, jitter_ns, grid[:, here])
                    at_stage = [n for n, fault in enumerate(faults) if fault.rank % stages == here]
                    strike_all(world, sizes_ns, odds, at_stage)
                    if there is not None:
                        send_to_stage(world, grid, here, there, MS // 10)
        world.meet(planes, teams, 5 * MS)
    return world.job()


def do_work(world: World, ns: int, jitter_ns: int, who: np.ndarray | None = None) -> None:
    """Work alike for all, plus or minus jitter."""
    who = np.arange(world.ranks) if who is None else who
    extra = world.random.integers(-jitter_ns, jitter_ns + 1, who.size) if jitter_ns else 0
    whole = ns + np.zeros(who.size, np.int64) + extra
    loading = np.where(who == world.decoy, whole * 6 // 10, 0)
    world.spend(whole - loading, WORK, who)
    if loading.any():
        world.spend(loading, LOADING, who)


def strike_all(
    world: World, sizes_ns: tuple[int, ...], odds: float, which: Sequence[int] | None = None
) -> None:
    """Let each fault happen, or not."""
    for number in range(len(sizes_ns)) if which is None else which:
        if odds >= 1 or world.random.random() < odds:
            world.strike(number, sizes_ns[number])


LAYOUTS = {
    "data parallel": make_data_parallel_job,
    "nodes and world": make_hierarchical_job,
    "pipeline": make_pipeline_job,
}


def draw_fault(layout: str, ranks: int, seed: int, steps: int = 20, decoy: bool = False) -> Job:
    """One fault of a random rank and cause, 10 to 100 % of a step's work, always or 1 in 2.

    A decoy is another rank that loads for six tenths of its time and has that much less to work: it
    stands out in every table, and nobody ever waits for it.
    """
    random = np.random.default_rng(seed)
    fault = Fault(int(random.integers(ranks)), int(random.integers(WORK + 1)))
    length = 10 * MS if layout == "pipeline" else 50 * MS
    size = int(random.integers(length // 10, length))
    odds = float(random.choice([0.5, 1.0]))
    make = LAYOUTS[layout]
    other = int((fault.rank + random.integers(1, ranks)) % ranks) if decoy else -1
    jitter_ns = int(JITTER * length)
    return make(ranks, (fault,), (size,), steps, jitter_ns, seed, odds, decoy=other)
