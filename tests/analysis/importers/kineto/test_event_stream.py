"""Usual blocks are read as all others are, and long tables in pieces as at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clusterprof.analysis.importers.kineto import classify, device_gaps, event_columns
from clusterprof.analysis.importers.kineto.event_columns import (
    IntervalUnion,
    PackedColumn,
    join_sorted_chunks,
)
from clusterprof.analysis.importers.kineto.event_stream import CommonEventDecoder
from clusterprof.probe import layout
from tests.support.kineto_traces import (
    import_trace,
    list_busy_ns,
    list_spans,
    make_device_event,
    make_event,
    make_runtime_call,
    make_step,
    write_trace,
)

FLOW = {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1, "pid": 0, "tid": 7, "ts": 5}
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def block(*events: dict[str, Any]) -> bytes:
    return json.dumps(events).encode()


def test_common_events_are_decoded_with_their_kind() -> None:
    result = CommonEventDecoder(classify.Kinds()).events(
        block(
            make_event("cpu_op", "aten::add", 1, 2, args={"External id": "no number"}),
            FLOW,
            make_runtime_call("cudaDeviceSynchronize", 3, 4, 9),
            make_device_event("ncclKernel_AllReduce", 5, 6, 9),
            make_event("python_function", "torch/_dynamo/convert_frame.py(1): _compile", 7, 8),
        )
    )
    assert result is not None
    kinds = [classify.OPERATOR, classify.IGNORED, classify.SYNC, classify.COMM, classify.COMPILE]
    names: list[Any] = [item.name for item in result]
    assert [name.kind for name in names] == kinds
    assert names[3].value == "ncclKernel_AllReduce"
    assert [result[2].args.correlation, result[3].args.device] == [9, 0]
    assert (result[3].ts, result[3].dur, result[3].tid) == (1_000_005, 6, 7)


@pytest.mark.parametrize(
    "odd",
    [
        {"ph": "B", "cat": "cpu_op", "name": "x", "ts": 1},
        {"ph": "E", "cat": "ac2g", "ts": 1},
        {"ph": "X", "cat": "mine", "name": "x", "ts": 1, "dur": 1},
        {"ph": "M", "name": "process_name", "pid": 1},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": "1", "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1, "args": None},
        {"ph": "X", "cat": "cpu_op", "ts": 1, "dur": 1},
    ],
)
def test_a_block_with_an_unusual_event_is_not_decoded(odd: dict[str, Any]) -> None:
    assert (
        CommonEventDecoder(classify.Kinds()).events(block(make_device_event("gemm", 1, 1, 1), odd))
        is None
    )


def test_frequent_event_names_are_cached() -> None:
    reader = CommonEventDecoder(classify.Kinds())
    few = block(make_device_event("gemm", 1, 1, 1), make_device_event("ncclKernel", 2, 1, 2))
    many = block(*[make_device_event("gemm", n, 1, n) for n in range(600)])
    seen: list[Any] = [reader.events(text) for text in (few, many, few, few)]
    kinds = [[item.name.kind for item in batch] for batch in seen]
    assert kinds[0] == kinds[2] == kinds[3] == [classify.KERNEL, classify.COMM]
    assert set(kinds[1]) == {classify.KERNEL}
    assert seen[2][0].name is seen[3][0].name  # a member now
    assert seen[0][0].name is not seen[2][0].name


def trace() -> list[dict[str, Any]]:
    """Two devices, three threads, work that overlaps, numbers that come again."""
    events = [make_step(n, 1000 * n, 900) for n in (1, 2, 3)]
    events += [make_event("user_annotation", LOADER, 1000 * n + 800, 50) for n in (1, 2, 3)]
    for n in range(60):
        at = 1000 + 50 * n
        events.append(make_event("cpu_op", "aten::mm", at, 20, tid=100 + n % 3))
        events.append(make_runtime_call("cudaLaunchKernel", at + 2, 5, n % 40, tid=100 + n % 3))
        name = "ncclKernel_AllReduce_Sum" if n % 7 == 3 else "gemm"
        took = 120 if n % 9 == 4 else 7
        events.append(make_device_event(name, at + 10 + n % 5, took, n % 40, device=n % 2))
    events.append(make_runtime_call("cudaDeviceSynchronize", 3000, 400))
    return events


def all_of(path: Path) -> tuple[list[str], dict[str, int]]:
    (node,), account = import_trace(path)
    return [repr(value) for batch in node.records() for value in batch], dict(account.read)


def test_the_common_and_general_decoders_give_equal_results(tmp_path: Path) -> None:
    plain = write_trace(tmp_path, json.dumps({"traceEvents": trace()}), "rank0.json")
    odd = {"ph": "i", "name": "no category", "ts": 1, "pid": 1, "tid": 1}
    other = write_trace(tmp_path, json.dumps({"traceEvents": [*trace(), odd]}), "rank00.json")
    assert CommonEventDecoder(classify.Kinds()).events(block(*trace())) is not None
    assert CommonEventDecoder(classify.Kinds()).events(block(*trace(), odd)) is None
    assert all_of(plain) == all_of(other)


def test_sliced_tables_give_the_same_result(tmp_path: Path, monkeypatch: Any) -> None:
    path = write_trace(tmp_path, json.dumps({"traceEvents": trace()}))
    at_once = all_of(path)
    monkeypatch.setattr(event_columns, "ROWS_PER_SLICE", 4)
    monkeypatch.setattr(event_columns, "_PACK_AFTER_ROWS", 1)
    monkeypatch.setattr(event_columns, "_MERGE_AFTER_ROWS", 2)
    assert all_of(path) == at_once
    (node,), _ = import_trace(path)
    # The trace begins with the first step; 10 µs later the first kernel does.
    assert list_busy_ns(node)[1] == (10_000, 0)
    assert len(list_spans(node, layout.STEP)) == 3


def test_a_column_holds_the_values_of_all_pieces() -> None:
    values = [np.array([5, 5]), np.array([1 << 40, -3]), np.array([], np.int64), np.array([7])]
    column = PackedColumn()
    for value in values:
        column.add(value)
    assert column.minimum() == -3
    assert column.result().tolist() == [5, 5, 1 << 40, -3, 7]
    small = PackedColumn()
    small.add(np.array([100, 101]))
    small.add(np.array([-27]))
    made = small.result()
    assert made.tolist() == [100, 101, -27] and made.dtype == np.int8
    assert PackedColumn().minimum() is None and not PackedColumn().result().size


def test_covered_time_is_independent_of_chunk_size() -> None:
    start = np.array([0, 2, 4, 10, 10, 15, 20])
    end = np.array([3, 9, 5, 10, 12, 20, 21])
    for size in range(1, 8):
        pieces = [(start[i : i + size], end[i : i + size]) for i in range(0, 7, size)]
        made = join_sorted_chunks(pieces)
        assert [array.tolist() for array in made] == [[0, 10, 15], [9, 12, 21]]
        stretches = IntervalUnion()
        for piece in reversed(pieces):
            stretches.add(*piece)
        assert [array.tolist() for array in stretches.result()] == [[0, 10, 15], [9, 12, 21]]
    assert [chunk.size for chunk in join_sorted_chunks([])] == [0, 0]


def test_messages_are_numbered_by_kind_and_peer() -> None:
    send, recv, all_ = layout.SEND, layout.RECV, layout.ALL_REDUCE
    operation = np.array([send, send, recv, send, all_, all_, send])
    peer = np.array([1, 2, 1, 1, -1, -1, -1])
    group, printed = np.full(7, 5), np.full(7, -1)
    made = device_gaps._compute_numbers(group, printed, operation, peer, operation != all_)
    assert made.tolist() == [0, 0, 0, 1, 0, 1, -1]
