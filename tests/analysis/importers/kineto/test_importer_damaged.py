"""Damaged and hostile traces: what is whole is read, the rest is counted, nothing is raised."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from clusterprof.analysis.importers.core.base import Account, CannotImportError
from clusterprof.analysis.importers.kineto import classify, event_stream
from clusterprof.analysis.importers.kineto.event_stream import EventStream, find_list_objects
from clusterprof.analysis.importers.kineto.importer import Kineto
from clusterprof.probe import layout
from tests.support.kineto_traces import (
    import_trace,
    list_busy_ns,
    list_spans,
    make_device_event,
    make_event,
    make_runtime_call,
    make_step,
    make_trace,
    write_trace,
)

GOOD = [
    make_step(1, 0, 100),
    make_runtime_call("cudaLaunchKernel", 5, 2, 1),
    make_device_event("gemm", 10, 10, 1),
    make_runtime_call("cudaLaunchKernel", 30, 2, 2),
    make_device_event("gemm", 40, 30, 2),
]
BUSY = [
    (0, 0),
    (10_000, 0),
    (20_000, 10_000),
    (40_000, 10_000),
    (70_000, 40_000),
    (100_000, 40_000),
]


def text_with(*more: str, where: int = 2) -> str:
    """The good trace with more elements, as they stand."""
    listed = [json.dumps(value) for value in GOOD]
    listed[where:where] = more
    return '{"traceEvents": [' + ",\n".join(listed) + "]}"


K = '{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "args": {"device": 0}'
BAD = [
    (K + ', "ts": NaN, "dur": 5}', "without a usable time"),
    (K + ', "ts": 1e999, "dur": 5}', "without a usable time"),
    (K + ', "ts": "soon", "dur": 5}', "without a usable time"),
    (K + ', "ts": [1], "dur": 5}', "without a usable time"),
    (K + ', "dur": 5}', "without a usable time"),
    (K + ', "ts": 1000001}', "without a duration"),
    (K + ', "ts": 1000001, "dur": null}', "without a duration"),
    (K + ', "ts": 1000001, "dur": -1}', "with a negative duration"),
    (K + ', "ts": 1000001, "dur": Infinity}', "with an impossible duration"),
    ("17", "not an event"),
    ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    ('{"ph": "X" "cat"}', "not JSON"),
    ('{"ph": "E", "pid": 1, "tid": 1, "ts": 1000005}', "end without a begin event (E)"),
    (
        '{"ph": "B", "cat": "cpu_op", "name": "x", "pid": 1, "tid": 1, "ts": 1000005}',
        "begin without an end event (B)",
    ),
    (
        '{"ph": "X", "cat": "mine", "name": "x", "pid": 1, "tid": 1, "ts": 1000005, "dur": 1}',
        "of category 'mine'",
    ),
]


@pytest.mark.parametrize(("element", "reason"), BAD)
def test_unusable_events_are_skipped_and_counted(tmp_path: Path, element: str, reason: str) -> None:
    (node,), account = import_trace(write_trace(tmp_path, text_with(element)))
    assert list_busy_ns(node) == BUSY
    if element != "17":  # between objects only objects are looked for
        assert dict(account.skipped) == {reason: 1}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("text for numbers", '"ts": "1000010", "dur": "10", "args": {"correlation": "1"}'),
        (
            "integers beyond 64 bits",
            '"ts": 1000010, "dur": 10, "args": {"correlation": 1%s}' % ("0" * 30),
        ),
        ("no arguments", '"ts": 1000010, "dur": 10, "args": null'),
        ("arguments that are none", '"ts": 1000010, "dur": 10, "args": [1]'),
        ("a device that is none", '"ts": 1000010, "dur": 10, "args": {"device": {}}'),
    ],
)
def test_odd_but_valid_events_are_read(tmp_path: Path, name: str, more: str) -> None:
    odd = '{"ph": "X", "cat": "kernel", "name": "' + name + '", "pid": 0, "tid": 7, ' + more + "}"
    rest = [json.dumps(GOOD[i]) for i in (0, 1, 3, 4)]
    (node,), account = import_trace(
        write_trace(tmp_path, '{"traceEvents": [' + ",".join([odd, *rest]) + "]}")
    )
    assert list_busy_ns(node) == BUSY and not account.skipped


def test_bad_text_and_control_characters_in_names_change_nothing(tmp_path: Path) -> None:
    text = text_with().encode().replace(b'"gemm"', b'"ge\xff\xfe\x00\x1b[31m\n},{mm"')
    (node,), account = import_trace(write_trace(tmp_path, text))
    assert list_busy_ns(node) == BUSY and not account.skipped


def test_event_delimiters_within_names_are_ignored(tmp_path: Path) -> None:
    odd = make_event(
        "cpu_op", '}, {"ph": "X", "name": "\\', 12, 3, args={"a": [{"ph": "X"}, {"ph": 1}]}
    )
    (node,), account = import_trace(
        write_trace(tmp_path, text_with(json.dumps(odd), json.dumps(odd)))
    )
    assert list_busy_ns(node) == BUSY and account.read["operators"] == 2


class Cut:
    """A source whose bytes come in small blocks."""

    def __init__(self, data: bytes, block: int) -> None:
        self.data, self.block = data, block
        self.path = self.file = Path("rank0.json")
        self.head, self.damage = data[:65536], ""

    def blocks(self, block_bytes: int = 0) -> Any:
        return (self.data[i : i + self.block] for i in range(0, len(self.data), self.block))


@pytest.mark.parametrize("block", [37, 300, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_events_are_read_for_any_block_size(block: int, indent: int | None) -> None:
    odd = make_event("cpu_op", '}, {"ph": "\\"', 12, 3, args={"a": [{"ph": "X"}, {"ph": 1}]})
    events = [*GOOD, odd] * 3
    text = json.dumps({"a": {"traceEvents": []}, "traceEvents": events, "z": [1]}, indent=indent)
    account = Account(Path("x"))
    trace = EventStream(Cut(text.encode(), block), account)
    selected = [value for batch in trace.events() for value in batch]
    assert [(e.name, e.ts, e.dur) for e in selected] == [
        (e["name"], e["ts"], e["dur"]) for e in events
    ]
    assert not account.skipped and not account.cut


def test_a_file_that_was_cut_off_is_read_to_the_last_whole_event(tmp_path: Path) -> None:
    text = make_trace(GOOD)
    middle = text.index('"gemm"', text.index('"gemm"') + 1)
    (node,), account = import_trace(write_trace(tmp_path, text[:middle]))
    assert list_busy_ns(node) == [(0, 0), (10_000, 0), (20_000, 10_000), (100_000, 10_000)]
    assert account.cut == "cut off in the middle of an event; all events before it were read"
    packed = gzip.compress(text.encode())[:-12]
    (again,), account = import_trace(write_trace(tmp_path, packed, "rank0.json.gz"))
    assert list_spans(again, layout.STEP) == list_spans(node, layout.STEP) and account.cut


def test_begin_and_end_events_are_joined_in_any_order(tmp_path: Path) -> None:
    thread = {"pid": 100, "tid": 100}
    loader = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    halves = [
        {"ph": "B", "cat": "cpu_op", "name": loader, **thread, "ts": 1_000_050},
        {"ph": "B", "cat": "cpu_op", "name": "aten::add", **thread, "ts": 1_000_055},
        {"ph": "E", **thread, "ts": 1_000_058},
        {"ph": "E", "cat": "cpu_op", "name": loader, **thread, "ts": 1_000_060},
    ]
    (node,), account = import_trace(write_trace(tmp_path, make_trace([*halves, *reversed(GOOD)])))
    assert list_spans(node, layout.DATA_WAIT) == [(50_000, 60_000, -1, -1, -1, -1)]
    assert list_busy_ns(node) == BUSY and account.read["operators"] == 1 and not account.skipped


def test_negative_relative_times_are_read(tmp_path: Path) -> None:
    early = [{**entry, "ts": entry["ts"] - 5_000_000} for entry in GOOD]
    (node,), _ = import_trace(write_trace(tmp_path, make_trace(early)))
    assert list_busy_ns(node) == BUSY


def test_a_trace_with_too_many_event_names_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(classify, "MAX_NAMES", 10)
    names = [
        make_event("cpu_op", f"step {n}", n, 1) for n in range(10 * (classify._MAX_REFILLS + 2))
    ]
    with pytest.raises(CannotImportError, match="different event names"):
        import_trace(write_trace(tmp_path, make_trace([*GOOD, *names])))


def test_an_event_without_end_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(event_stream, "MAX_EVENT_BYTES", 1000)
    monkeypatch.setattr(event_stream, "BLOCK_BYTES", 500)
    with pytest.raises(CannotImportError, match="an event of more than"):
        import_trace(write_trace(tmp_path, text_with()[:-2] + ',{"name": "' + "x" * 5000))


def test_damaged_metadata_leaves_the_events_readable(tmp_path: Path) -> None:
    text = text_with()[1:]
    (node,), account = import_trace(write_trace(tmp_path, '{"schemaVersion": nonsense, ' + text))
    assert list_busy_ns(node) == BUSY
    assert dict(account.skipped) == {"metadata before the events that is not JSON": 1}
    (node,), account = import_trace(
        write_trace(tmp_path, "{" + text[:-1] + ', "distributedInfo": {"rank')
    )
    assert list_busy_ns(node) == BUSY
    assert dict(account.skipped) == {"metadata after the events that is not JSON": 1}


def test_list_elements_are_found_despite_braces_in_strings() -> None:
    text = rb' {"a": "}\"{", "b": [{}]}, {"c": "\\"} , 5, {"d": 1} ] , "e": []}'
    list_objects, end, ended = find_list_objects(text)
    assert [text[a:b] for a, b in list_objects] == [
        rb'{"a": "}\"{", "b": [{}]}',
        rb'{"c": "\\"}',
        b'{"d": 1}',
    ]
    assert ended and text[end:] == b' , "e": []}'
    assert find_list_objects(b'{"a": 1}, {"b": ')[1:] == (10, False)


def test_rubbish_is_not_recognised(tmp_path: Path) -> None:
    for head in (b"", b"\x00" * 100, b"\x80\x04\x95", b"<xml/>", b"[]", b"{}", b"[[[[["):
        assert not Kineto().recognizes(head, tmp_path)


@pytest.mark.parametrize("text", ['{"traceEvents": []}', '{"traceEvents": [{"ph": "M"}]}'])
def test_a_trace_without_profiler_events_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(CannotImportError, match="no event of the PyTorch profiler"):
        import_trace(write_trace(tmp_path, text))
