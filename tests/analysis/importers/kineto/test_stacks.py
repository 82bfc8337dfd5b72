"""Stacks of Python functions in a profiler's trace; times and names by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.base import Account
from clusterprof.analysis.importers.core.byte_sources import open_sources
from clusterprof.analysis.importers.kineto.importer import Kineto
from clusterprof.analysis.importers.kineto.stacks import parse_function_name
from tests.support.kineto_traces import (
    make_device_event,
    make_event,
    make_runtime_call,
    make_step,
    make_trace,
    write_trace,
)
from tests.support.stacks import list_samples

MS = 1_000


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("train.py(42): augment", ("train.py", 42, "augment")),
        ("/a (1): b/train.py(42): <lambda>", ("/a (1): b/train.py", 42, "<lambda>")),
        ("<frozen abc>(117): __instancecheck__", ("<frozen abc>", 117, "__instancecheck__")),
        ("<built-in function sleep>", ("<built-in>", 0, "sleep")),
        ("<built-in method item of Tensor object>", ("<built-in>", 0, "Tensor.item")),
        ("<built-in method conv2d of type object at 0x7f>", ("<built-in>", 0, "conv2d")),
        ("<method 'acquire' of '_thread.lock' objects>", ("<built-in>", 0, "lock.acquire")),
        ("<slot wrapper '__add__' of 'int' objects>", ("<built-in>", 0, "int.__add__")),
        ("<built-in method dumps>", ("<built-in>", 0, "dumps")),
        ("nn.Module: Linear_0", ("<nn.Module>", 0, "Linear_0")),
        ("<>", ("<built-in>", 0, "<>")),
        ("odd", ("<built-in>", 0, "odd")),
    ],
)
def test_function_names_are_parsed_into_places(name: str, place: tuple[str, int, str]) -> None:
    assert parse_function_name(name) == place


def read_samples(events: list[dict], folder: Path) -> tuple[dict, Account]:
    """Samples by thread, and the account."""
    (source,) = open_sources(write_trace(folder, make_trace(events)))
    account = Account(source.path, "test")
    (node,) = Kineto().nodes([source], [account])
    return list_samples(node, 100), account


def function(name: str, at: float, dur: float, **more: object) -> dict:
    """A call of a Python function."""
    return make_event("python_function", name, at, dur, **more)


def test_each_stack_interval_of_the_training_thread_is_sampled(tmp_path: Path) -> None:
    address = " object at 0x7f0123456789>"
    events = [
        make_step(1, 0, 100 * MS),
        make_runtime_call("cudaLaunchKernel", 0, 10, 1),
        make_device_event("gemm", 0, 10 * MS, 1),
        function("train.py(30): main", -50 * MS, 200 * MS),  # around the only step
        function("data.py(9): augment", 12 * MS, 6 * MS),
        function("PIL/Image.py(2153): resize", 13 * MS, 4 * MS),
        function("<built-in method resize of ImagingCore" + address, 14 * MS, 2 * MS),
        function("<built-in method item of Tensor" + address, 30 * MS, 0.099 * MS),  # too short
        make_event("cpu_op", "aten::mm", 40 * MS, 5 * MS),  # no Python function
        function("nobody.py(1): waits", 0, 90 * MS, tid=7),
        function("torch/utils/data/_utils/pin_memory.py(20): loop", 50 * MS, 8 * MS, tid=8),
    ]
    samples, account = read_samples(events, tmp_path)
    main, augment = "train.py:30 main", "data.py:9 augment"
    resize = "PIL/Image.py:2153 resize"
    assert samples[0][:7] == [
        # 12 ms of main are two samples of 6 ms
        (3.0, 6.0, [main]),
        (9.0, 6.0, [main]),
        (12.5, 1.0, [main, augment]),
        (13.5, 1.0, [main, augment, resize]),
        (15.0, 2.0, [main, augment, resize, "<built-in>:0 ImagingCore.resize"]),
        (16.5, 1.0, [main, augment, resize]),
        (17.5, 1.0, [main, augment]),
    ]
    # from 18 to 100 ms nine samples of main: 82 / 9 ms each
    assert [stack for _, _, stack in samples[0][7:]] == [[main]] * 9
    assert sum(length for _, length, _ in samples[0]) == pytest.approx(100.0)
    assert samples[1] == [(54.0, 8.0, ["torch/utils/data/_utils/pin_memory.py:20 loop"])]
    assert set(samples) == {0, 1}  # thread 7 loads nothing
    assert account.read["samples of stacks"] == 17


def test_a_trace_without_stacks_has_no_samples(tmp_path: Path) -> None:
    events = [
        make_step(1, 0, 100 * MS),
        make_runtime_call("cudaLaunchKernel", 0, 10, 1),
        make_device_event("gemm", 0, 10 * MS, 1),
        make_event("cpu_op", "aten::mm", 40 * MS, 5 * MS),
    ]
    samples, account = read_samples(events, tmp_path)
    assert samples == {} and "samples of stacks" not in account.read
