"""Clocks with known offsets and drifts, and the ends of collectives that nodes would record."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.timeline.clock_sync import align_clocks

SECOND_NS = 1_000_000_000
OFFSET_NS = 50_000_000
DRIFT = 50e-6


@dataclass(frozen=True)
class TrueClocks:
    """True clocks: node i shows t + offset + drift * t."""

    offset_ns: np.ndarray
    drift: np.ndarray

    def read_clock(self, node: np.ndarray, t_ns: np.ndarray) -> np.ndarray:
        extra = self.offset_ns[node] + np.rint(self.drift[node] * t_ns).astype(np.int64)
        return t_ns + extra


def draw_clocks(nodes: int, random: np.random.Generator) -> TrueClocks:
    return TrueClocks(
        random.integers(-OFFSET_NS, OFFSET_NS, nodes), random.uniform(-DRIFT, DRIFT, nodes)
    )


def align_random_cluster(seed: int) -> tuple[float, float]:
    """Align one random cluster; return the largest error in bounds, and the median bound in ns.

    2 to 16 nodes, 32 to 600 operations in 20 s to 10 min at uneven times; everybody leaves a little
    late (exponential, 1 µs to 1 ms, up to twice as much on some nodes), one in 50 by 10 to 100 ms.
    """
    random = np.random.default_rng(seed)
    nodes, operations = int(random.integers(2, 17)), int(random.integers(32, 601))
    length_ns = int(random.integers(20, 601)) * SECOND_NS
    clocks = draw_clocks(nodes, random)
    true_ns = np.sort(random.integers(0, length_ns, operations))
    operation = np.repeat(np.arange(operations), nodes)
    node = np.tile(np.arange(nodes), operations)
    scale = 10 ** random.uniform(3, 6) * random.uniform(1, 2, nodes)
    late = random.exponential(scale[node]).astype(np.int64)
    hit = random.random(late.size) < 0.02
    late[hit] += random.integers(10_000_000, 100_000_000, int(hit.sum()))
    leave = clocks.read_clock(node, true_ns[operation] + late)
    alignment = align_clocks(operation, node, leave, nodes)
    at = np.linspace(0, length_ns, 13).astype(np.int64)
    common, bound = [], []
    for number in range(nodes):
        mine = clocks.read_clock(np.full(at.size, number), at)
        common.append(alignment.to_common_ns(number, mine))
        bound.append(alignment.bound(number, mine))
    worst = 0.0
    for number in range(1, nodes):
        error = np.abs(common[number] - common[number - 1])
        worst = max(worst, float((error / (bound[number] + bound[number - 1])).max()))
    return worst, float(np.median(np.concatenate(bound)))
