"""What is advised follows from what was measured at work, and from nothing else."""

from __future__ import annotations

import pytest

from clusterprof.analysis.attribution.accumulator import Accumulator
from clusterprof.analysis.attribution.ledger import RankIdentity, RankResult, build_rank_result
from clusterprof.analysis.attribution.rank.chunk_boundary import RankState
from clusterprof.analysis.attribution.rank.utilization import UtilizationSums
from clusterprof.analysis.findings.utilization import ADVICE_TEXTS, build_device_utilization

SECOND = 1_000_000_000
ROOM, FULL = 0.25, 0.9  # of the memory in use


def books(
    sm: float | None = 0.3,
    known: float = 1.0,
    p90: float = 0.35,
    memory: float | None = FULL,
    peers: bool = False,
    power: float | None = None,
    number: int = 0,
    **shares: float,
) -> RankResult:
    """A rank whose device was at work for 100 s, at `sm` where it is known."""
    work = round(known * 100 * SECOND) if sm is not None else 0
    collected: UtilizationSums = {
        ("busy", 0): 100 * SECOND,
        ("work", 0): work,
        ("sm_known", 0): work,
    }
    collected["active", 0] = round((sm or 0.0) * work)
    collected["no-reading", 0] = 100 * SECOND - work
    collected["level", round(100 * p90)] = work
    if memory is not None:
        collected["memory", round(1000 * memory)] = collected["memory_total", 80 << 30] = (
            100 * SECOND
        )
    if power is not None:
        known_as = {"power": 90 + power * 600, "rest": 90, "limit": 690}
        for name, watts in known_as.items():
            collected[name, 0], collected[f"{name}_known", 0] = round(watts * SECOND), SECOND
        collected["power_busy", 0] = SECOND
    for name, share in shares.items():
        collected[name, 0], collected[f"{name}_known", 0] = (
            round(share * 100 * SECOND),
            100 * SECOND,
        )
    state = RankState(settled_ns=1, step_begin_ns=0, step_end_ns=1, first_ns=0, last_ns=1)
    name = RankIdentity("node", number, 100 + number, "GPU-0", True, False, peers)
    return build_rank_result(
        name, state, Accumulator({"in_step": 1, "lost": 0}, utilization=collected)
    )


CASES = {
    "room": (books(memory=ROOM), ("larger-batch",)),
    "room, by a hair": (books(memory=0.7), ("larger-batch",)),
    "no room": (books(memory=0.71), ("larger-kernels",)),
    "room not known": (books(memory=None), ("larger-batch",)),
    "no room, always launching": (books(host=0.8), ("fewer-launches",)),
    "room, always launching": (books(memory=ROOM, host=1.0), ("larger-batch", "fewer-launches")),
    "the host sleeps": (books(memory=ROOM, host=0.79), ("larger-batch",)),
    "filled": (books(sm=0.5, memory=ROOM, host=1.0), ()),
    "not quite": (books(sm=0.499, memory=ROOM), ("larger-batch",)),
    "memory is the limit": (books(memory=ROOM, host=1.0, dram=0.5), ("memory-bound",)),
    "memory is not": (books(memory=ROOM, dram=0.49), ("larger-batch",)),
    "tensor cores are": (books(memory=ROOM, tensor=0.3), ("tensor-bound",)),
    "full now and then": (books(memory=ROOM, p90=0.7), ("uneven-step",)),
    "half known": (books(known=0.5, memory=ROOM), ("larger-batch",)),
    "less, and no power": (books(known=0.49, memory=ROOM), ()),
    "unknown, little power": (books(sm=None, memory=0.5, power=0.39), ("larger-batch",)),
    "unknown, more power": (books(sm=None, memory=ROOM, power=0.41), ()),
    "unknown, little power, less room": (books(sm=None, memory=0.51, power=0.1), ()),
    "unknown, room not known": (books(sm=None, memory=None, power=0.1), ()),
    "unknown, power not known": (books(sm=None, memory=ROOM), ()),
}


@pytest.mark.parametrize("name", CASES)
def test_each_utilization_case_gets_its_advice(name: str) -> None:
    item, codes = CASES[name]
    device_utilization = build_device_utilization([item])
    assert device_utilization.ranks[0].advice == codes
    assert [advice.code for advice in device_utilization.advice] == list(codes)
    assert {advice.measured for advice in device_utilization.advice} <= {
        not name.startswith("unknown")
    }


def test_every_advice_code_occurs_in_some_case() -> None:
    assert {code for _, codes in CASES.values() for code in codes} == set(ADVICE_TEXTS)


def test_confidence_depends_on_the_measured_signals_and_known_time() -> None:
    def grade_and_confidence(result: RankResult) -> tuple[str, float]:
        [advice] = build_device_utilization([result]).advice
        return advice.grade, round(advice.confidence_ratio, 6)

    # priors of 0.85 (B) and 0.60 (C); of half of the time nothing is known: less by a tenth
    assert grade_and_confidence(books(memory=ROOM)) == ("B", 0.85)
    assert grade_and_confidence(books(memory=ROOM, known=0.5)) == ("B", 0.765)
    assert grade_and_confidence(books(memory=None)) == ("C", 0.6)
    assert grade_and_confidence(books(memory=ROOM, peers=True)) == ("C", 0.6)
    assert grade_and_confidence(books(sm=None, memory=ROOM, power=0.1)) == ("C", 0.6)


def test_advice_counts_measured_and_guessed_ranks_separately() -> None:
    measured, guessed = books(memory=ROOM), books(sm=None, memory=ROOM, power=0.1, number=1)
    full = books(sm=0.9, number=2)
    device_utilization = build_device_utilization(
        [measured, guessed, full, books(memory=ROOM, number=3)]
    )
    assert [
        (advice_item.code, advice_item.measured, advice_item.ranks)
        for advice_item in device_utilization.advice
    ] == [("larger-batch", True, 2), ("larger-batch", False, 1)]
    assert [bool(rank.advice) for rank in device_utilization.ranks] == [True, True, False, True]
    assert (device_utilization.busy_ns, device_utilization.well_used_ns) == (
        400 * SECOND,
        (30 + 90 + 30) * SECOND,
    )
    assert device_utilization.reasons == (("no-sm-activity", 100 * SECOND),)
