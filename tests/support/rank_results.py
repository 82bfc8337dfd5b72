"""Results of ranks whose sums are worked out by hand."""

from __future__ import annotations

from clusterprof.analysis.attribution.accumulator import SHARE_SCALE, Accumulator
from clusterprof.analysis.attribution.ledger import RankIdentity, RankResult, build_rank_result
from clusterprof.analysis.attribution.rank.chunk_boundary import RankState
from clusterprof.analysis.timeline.model import SOURCE_DEVICE_SAMPLES

S = 10**9
STORAGE = "storage-local"


def make_rank_result(
    rank: int = 0, in_step: int = 100 * S, lost: int = 20 * S, peers: bool = False, **totals: int
) -> RankResult:
    """Make the result of a rank that lost time to its disk, 10 s after it was started."""
    name = RankIdentity("node", rank, 100 + rank, "gpu0", True, False, peers)
    state = RankState(
        settled_ns=1,
        step_begin_ns=10 * S,
        step_end_ns=10 * S + in_step,
        first_ns=0,
        last_ns=10 * S + in_step,
    )
    sums = {"in_step": in_step, "lost": lost, "measured": in_step, "busy": in_step - lost}
    claimed = {(STORAGE, "A", SOURCE_DEVICE_SAMPLES): lost * SHARE_SCALE}
    return build_rank_result(name, state, Accumulator({**sums, **totals}, claimed=claimed))
