"""Operations of several ranks are one where they overlap in time, whatever was cut off."""

from __future__ import annotations

import numpy as np

from clusterprof.analysis.importers.core.device_timeline import (
    MatchedGroup,
    OperationSequence,
    match_operations,
)


def side(key: int, *rows: tuple[int, int], operation: int = 1) -> OperationSequence:
    start, end = np.array(rows, np.int64).T
    return OperationSequence(key, start, end, np.full(start.size, operation, np.int64))


def test_overlapping_rows_of_ranks_are_matched() -> None:
    early = side(0, (0, 110), (200, 310), (400, 510))
    late = side(1, (100, 111), (300, 311), (500, 511))
    assert match_operations([early, late]) == [MatchedGroup((0, 1), (0, 0))]


def test_a_later_recorded_rank_starts_with_a_later_number() -> None:
    whole = side(0, *((100 * n, 100 * n + 10) for n in range(8)))
    cut = side(1, *((100 * n + 5, 100 * n + 10) for n in range(2, 9)))
    assert match_operations([whole, cut]) == [MatchedGroup((0, 1), (0, 2))]
    assert match_operations([cut, whole]) == [MatchedGroup((0, 1), (2, 0))]


def test_ranks_without_overlap_form_separate_groups() -> None:
    first = [side(rank, (0, 10), (100, 110), (200, 210)) for rank in (0, 1)]
    second = [side(rank, (50, 60), (150, 160), (250, 260)) for rank in (0, 1)]
    alone = side(2, (30, 40), (130, 140), (230, 240))
    assert match_operations([first[0], second[0], alone, first[1], second[1]]) == [
        MatchedGroup((0, 3), (0, 0)),
        MatchedGroup((1, 4), (0, 0)),
    ]


def test_simultaneous_operations_of_different_kinds_are_not_matched() -> None:
    assert (
        match_operations([side(0, (0, 10), (20, 30)), side(1, (0, 10), (20, 30), operation=2)])
        == []
    )
