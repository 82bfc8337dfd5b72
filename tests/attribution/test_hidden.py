"""What a batch costs beyond the wait for it, by hand."""

from __future__ import annotations

import numpy as np
from builders import lost, ns, process, rank, spans

from clusterprof.attribution.hidden import HIDDEN, Running, hidden_ns
from clusterprof.attribution.partial import SHARE
from clusterprof.probe import layout
from clusterprof.timeline.model import PHASE_COMPUTE, PHASE_DATA_WAIT, Rank

MAIN, WORKER = 100, 201
STORAGE, GC = HIDDEN.index("storage-local"), HIDDEN.index("cpu-gc")


def waiting() -> Rank:
    """Waits from 3 to 10 s for the batch that its worker makes from 0 to 10 s."""
    main = process(MAIN, spans={layout.DATA_WAIT: spans((3, 10, 0, WORKER))})
    worker = process(WORKER, spans={layout.FETCH: spans((0, 10))}, parent=MAIN)
    return rank(12, main, [worker])


def shares(**of: list[float]) -> dict[str, np.ndarray]:
    return {
        name.replace("_", "-"): np.array([round(one * SHARE) for one in some], np.int64)
        for name, some in of.items()
    }


def in_s(amounts: dict[int, np.ndarray], number: int) -> list[float]:
    return [round(one / 1e9, 3) for one in amounts[number].tolist()]


WAIT = lost((3, 10, 7, PHASE_DATA_WAIT))


def test_a_cause_takes_its_part_of_the_whole_production_with_it() -> None:
    # 10 s of production, 7 waited: 60 % of it are 6 s, of which 4.2 are in the wait
    found = hidden_ns(
        waiting(),
        WAIT,
        shares(storage_local=[0.6], cpu_preprocess=[0.4]),
    )
    assert in_s(found, STORAGE) == [1.8]
    assert in_s(found, HIDDEN.index("cpu-preprocess")) == [1.2]  # 4 of 10 s, 2.8 in the wait
    # never more than the wait: 90 % of the production are 9 s
    [most] = hidden_ns(waiting(), WAIT, shares(storage_local=[0.9])).items()
    assert most[0] == STORAGE and in_s({0: most[1]}, 0) == [0.7]


def test_a_gap_closes_with_its_chief_cause_and_not_with_a_small_one() -> None:
    pieces = lost((10, 11, 1, PHASE_COMPUTE), (11, 12, 1, PHASE_COMPUTE))
    found = hidden_ns(waiting(), pieces, shares(cpu_gc=[0.8, 0.3]))
    assert in_s(found, GC) == [0.2, 0.0]


def test_running_sums_are_asked_inside_a_piece_and_go_on() -> None:
    sums = Running()
    pieces = WAIT
    amounts = {STORAGE: np.array([ns(1.4)], np.int64)}
    (first,) = sums.add(pieces, amounts, np.array([ns(2), ns(6.5), ns(12)], np.int64))
    assert first[STORAGE].tolist() == [0, ns(0.7), ns(1.4)]
    (later,) = sums.add(pieces, {}, np.array([ns(20)], np.int64))
    assert later[STORAGE].tolist() == [ns(1.4)] and later.sum() == ns(1.4)
