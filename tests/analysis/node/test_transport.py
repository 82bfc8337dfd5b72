"""Results that travel: what is unpacked is what was packed, in far fewer bytes."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterprof.analysis.node.transport import (
    convert_to_range,
    pack_fields,
    unpack_fields,
    with_group_ranges,
)
from clusterprof.analysis.timeline.collectives.int_table import keep_packed
from clusterprof.analysis.timeline.collectives.leave_time_samples import NO_LEAVES, LeaveTimeSamples
from clusterprof.analysis.timeline.collectives.rows import RankOperations
from clusterprof.trace.schema import Event

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(INT64, max_size=99), st.integers(1, 3))
def test_any_table_survives_packing(values: list[int], rows: int) -> None:
    flat = np.tile(np.array(values, np.int64), 3)  # short tables stay as they are
    table = flat[: flat.size // rows * rows].reshape(rows, -1)
    transposed = table.T
    back = unpack_fields(pack_fields([flat, table, transposed]))
    for before, after in zip((flat, table, transposed), back):
        assert after.dtype == np.int64 and after.shape == before.shape
        assert (after == before).all()


def test_other_values_survive_packing() -> None:
    values = (None, "a", {("x", 1): 2**80}, np.arange(99, dtype=np.int32), np.linspace(0, 1, 99))
    back = unpack_fields(pack_fields(values))
    assert back[:3] == values[:3]
    for before, after in zip(values[3:], back[3:]):
        assert after.dtype == before.dtype and (after == before).all()


def test_an_unpacked_array_is_writable() -> None:
    (back,) = unpack_fields(pack_fields([np.arange(99)]))
    back[5] = 7
    assert back[5] == 7


def test_packed_times_take_fewer_bytes() -> None:
    # 4,096 times about 250 ms apart: 4 bytes each instead of 8, before compression
    times = np.cumsum(np.random.default_rng(1).integers(240_000_000, 260_000_000, 4096))
    assert len(pack_fields([times])) < 0.6 * len(pickle.dumps(times, 5))


@pytest.mark.parametrize(
    ("ranks", "short"),
    [
        (list(range(10_000)), range(10_000)),
        ([3, 11, 19], range(3, 20, 8)),  # a data-parallel group
        ([0, 1, 3], (0, 1, 3)),
        ([5, 4, 3], (5, 4, 3)),
        ([2, 2], (2, 2)),
        ([7], (7,)),
        ([], ()),
        ([0, True, 2], (0, True, 2)),
    ],
)
def test_evenly_spaced_ranks_become_a_range(ranks: list[int], short: object) -> None:
    result = convert_to_range(ranks)
    assert result == short and list(result) == ranks


def test_only_group_members_become_ranges() -> None:
    group = Event(1, "group-announced", {"pid": 4, "group": 9, "ranks": [0, 1, 2]})
    other = Event(2, "device-appeared", {"id": "gpu-0"})
    short, same = with_group_ranges([group, other])
    assert short.attributes == {"pid": 4, "group": 9, "ranks": range(3)}
    assert same is other


def test_only_the_selected_leave_samples_are_kept() -> None:
    first, second = (LeaveTimeSamples(5, *(np.array([k]),) * 3) for k in (1, 2))
    none = np.zeros((0, 4), np.int64)
    samples = keep_packed(none[:, :3].T)
    operations = RankOperations(none, none[:, 0], (), none.T, samples, {}, first, second)
    for host_waits, leaves, barriers in (
        (True, first, NO_LEAVES),
        (False, NO_LEAVES, second),
        (None, NO_LEAVES, NO_LEAVES),
    ):
        chosen = operations.select_clock_samples(host_waits)
        assert chosen.leaves is leaves and chosen.barriers is barriers


def test_a_result_is_compressed_by_pickling() -> None:
    from clusterprof.analysis.node.analyze import NodeResult

    facts = SimpleNamespace(name="n1")
    result = NodeResult(facts, (), np.arange(50_000))  # type: ignore[arg-type]
    data = pickle.dumps(result, 5)
    back = pickle.loads(data)  # noqa: S301
    assert len(data) < 1000 and back.facts == facts and (back.loaded == np.arange(50_000)).all()
    assert back.network == result.network and back.setup == result.setup
