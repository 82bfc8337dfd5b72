"""A helper says what has changed since its answer before; the recorder knows the rest."""

from __future__ import annotations

import math

from clusterprof.agent.isolation.collector import RemoteDevice
from clusterprof.agent.isolation.helper import _list_changes
from clusterprof.errors import Unavailable

WHY = Unavailable("failed", "no answer", "wait", True)


def remote() -> RemoteDevice:
    device = RemoteDevice("gpu_test", {"id": "GPU-1", "index": 0}, ["a", "b", "c"])
    device.mark_sent(0)
    return device


def test_only_changed_values_are_reported() -> None:
    encoded = ["failed", "no answer", "wait", True]
    assert _list_changes([], [1, 0.5, WHY]) == [0, 1, 1, 0.5, 2, encoded]
    assert _list_changes([1, 0.5, WHY], [1, 0.5, WHY]) == []
    assert _list_changes([1, 0.5, WHY], [1, 0.75, 3]) == [1, 0.75, 2, 3]


def test_a_changed_type_and_nan_count_as_changes() -> None:
    assert _list_changes([1], [1.0]) == [0, 1.0]
    assert _list_changes([0], [False]) == [0, False]
    changes = _list_changes([float("nan")], [float("nan")])
    assert changes[0] == 0 and math.isnan(changes[1])


def test_a_list_of_different_length_is_reported_completely() -> None:
    assert _list_changes([1, 2], [1, 2, 3]) == [0, 1, 1, 2, 2, 3]


def test_values_stay_until_they_change() -> None:
    device = remote()
    device.handle_values(["values", 0, 1, 10, [0, 1, 1, 2, 2, ["failed", "x", ""]], []], 0)
    assert device.take() == [1, 2, Unavailable("failed", "x", "")]
    assert device.take() is None
    device.mark_sent(0)
    device.handle_values(["values", 0, 2, 20, [2, 7], []], 0)
    assert (device.take(), device.t_ns) == ([1, 2, 7], 20)
    device.mark_sent(0)
    device.handle_values(["values", 0, 3, 30, [], []], 0)
    assert (device.take(), device.t_ns) == ([1, 2, 7], 30)


def test_late_values_are_recorded() -> None:
    device = remote()
    device.mark_sent(0)  # the second question
    device.handle_values(["values", 0, 1, 10, [0, 1, 1, 2, 2, 3], []], 0)
    assert device.take() is None
    device.handle_values(["values", 0, 2, 20, [0, 5], []], 0)
    assert device.take() == [5, 2, 3]


def test_no_new_reading_differs_from_an_unchanged_reading() -> None:
    device = remote()
    device.handle_values(["values", 0, 1, 10, [0, 1, 1, 2, 2, 3], []], 0)
    device.take()
    device.mark_sent(0)
    device.handle_values(["values", 0, 2, 20, None, []], 0)
    assert (device.take(), device.has_no_new_values, device.t_ns) == (None, True, 10)


def test_changes_beyond_the_signals_of_a_device_are_rejected() -> None:
    device = remote()
    device.handle_values(["values", 0, 1, 10, [0, 1, 1, 2, 2, 3, 3, 4], []], 0)
    assert device.take() == []  # of another length than its signals: the collector says why
