"""The truth of a demo run is arithmetic on stopwatches; here it is done by hand."""

from __future__ import annotations

from clusterprof.demo.truth import Wait, attribute_idle_time


def test_idle_time_is_split_among_causes_of_the_host_wait() -> None:
    # The device is idle from 60 to 100; the host waited from 10 to 98 for a batch that took 75
    # reading and 25 decoding: 38 of the 40 idle ns are the wait's, 28.5 reading and 9.5 decoding.
    log = [(0, 60), (100, 160)]
    waits = [Wait(10, 98, {"storage-local": 75, "cpu-preprocess": 25})]
    assert attribute_idle_time(log, waits, 0, 160) == {
        "in_step_ns": 160,
        "idle_ns": 40,
        "causes": {"storage-local": 28, "cpu-preprocess": 10, "other": 2},
    }


def test_a_wait_hidden_behind_the_device_costs_nothing() -> None:
    log = [(0, 100), (100, 200)]
    assert attribute_idle_time(log, [Wait(20, 90, {"storage-local": 1})], 0, 200) == {
        "in_step_ns": 200,
        "idle_ns": 0,
        "causes": {"storage-local": 0},
    }


def test_idle_time_at_both_ends_counts() -> None:
    # idle [0, 30) and [80, 100); the wait covers the first 30 only
    log = [(30, 80)]
    assert attribute_idle_time(log, [Wait(0, 30, {"checkpoint": 1})], 0, 100) == {
        "in_step_ns": 100,
        "idle_ns": 50,
        "causes": {"checkpoint": 30, "other": 20},
    }


def test_work_that_outlasts_the_window_is_cut_at_its_end() -> None:
    assert attribute_idle_time([(0, 40), (60, 150)], [], 0, 100) == {
        "in_step_ns": 100,
        "idle_ns": 20,
        "causes": {"other": 20},
    }
