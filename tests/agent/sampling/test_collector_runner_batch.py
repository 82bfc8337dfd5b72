"""What is kept between two flushes: flat while it can be, and never half a tick."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from clusterprof.agent.sampling.collector_runner import RowBatch, SampleBatch
from clusterprof.errors import Unavailable

WHY = Unavailable("absent", "not here")


def test_values_of_the_same_type_are_returned_as_arrays() -> None:
    ticks = SampleBatch("qq")
    same = [1, 2]
    ticks.add(10, same)
    same[:] = [3, 4]  # a collector may hand out the same list each time
    ticks.add(20, same)
    assert ticks.numbers() == [array("q", [1, 3]), array("q", [2, 4])]
    assert ticks.t_ns == array("q", [10, 20])


def test_a_reason_is_kept_with_all_earlier_values() -> None:
    ticks = SampleBatch("qqq")
    ticks.add(10, [1, 2, 3])
    ticks.add(20, [4, WHY, 6])
    ticks.add(30, [7, 8, 2**63])
    assert ticks.numbers() is None
    assert ticks.columns() == [(1, 4, 7), (2, WHY, 8), (3, 6, 2**63)]


def test_columns_keep_their_type_and_float_precision() -> None:
    ticks = SampleBatch("qd")
    ticks.add(10, [-1, -0.0])
    ticks.add(20, [2, 3])
    assert ticks.numbers() == [array("q", [-1, 2]), array("d", [-0.0, 3.0])]
    assert [column.typecode for column in ticks.numbers() or []] == ["q", "d"]
    assert str((ticks.numbers() or [])[1][0]) == "-0.0"


def test_mixed_columns_keep_values_before_a_reason() -> None:
    ticks = SampleBatch("qd")
    ticks.add(10, [1, 0.5])
    ticks.add(20, [2, WHY])
    ticks.add(30, [1.5, 0.25])  # no integer: the owner of the columns decides
    assert ticks.numbers() is None
    assert ticks.columns() == [(1, 2, 1.5), (0.5, WHY, 0.25)]


class Explosive:
    def __index__(self) -> int:
        raise RuntimeError("no number today")


@pytest.mark.parametrize("sample", [[1], [1, 2, 3], [1, Explosive()]])
def test_a_rejected_tick_leaves_no_values_behind(sample: Any) -> None:
    ticks = SampleBatch("qq")
    ticks.add(10, [1, 2])
    with pytest.raises((ValueError, RuntimeError)):
        ticks.add(20, sample)
    ticks.add(30, [3, 4])
    columns = ticks.numbers() or ticks.columns()
    assert [list(column) for column in columns] == [[1, 3], [2, 4]]
    assert ticks.t_ns == array("q", [10, 30])


@pytest.mark.parametrize("rows", [[(1, 2), (3,)], [(1, 2), (3, "x")], [(1, 2), (3, 2**63)]])
def test_invalid_rows_reject_all_rows_of_the_tick(rows: Any) -> None:
    table = RowBatch(2)
    assert table.numbers() is None
    table.add(10, [(1, 2), (3, 4)])
    with pytest.raises((ValueError, TypeError, OverflowError)):
        table.add(20, rows)
    table.add(30, [])
    table.add(40, [(5, 6)])
    assert table.numbers() == [array("q", [1, 3, 5]), array("q", [2, 4, 6])]
