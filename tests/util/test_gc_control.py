"""Garbage is looked for seldom inside the block, and as before after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from clusterprof.util.gc_control import reduce_gc_frequency


@pytest.fixture(autouse=True)
def restore_thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_the_gc_threshold_is_raised_and_restored_after_an_error() -> None:
    gc.set_threshold(700, 10, 10)
    with pytest.raises(ValueError, match="inside"), reduce_gc_frequency():
        assert gc.get_threshold() == (100_000, 10, 10)
        raise ValueError("inside")
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("threshold", [0, 500_000])
def test_a_disabled_or_higher_gc_threshold_is_kept(threshold: int) -> None:
    gc.set_threshold(threshold, 10, 10)
    with reduce_gc_frequency():
        assert gc.get_threshold()[0] == threshold
    assert gc.get_threshold()[0] == threshold


def test_allocating_2000_live_objects_starts_no_collection() -> None:
    gc.set_threshold(700, 10, 10)
    with reduce_gc_frequency():
        gc.collect()
        before = gc.get_stats()[0]["collections"]
        kept = [[number] for number in range(2000)]
        assert gc.get_stats()[0]["collections"] == before
    assert len(kept) == 2000
