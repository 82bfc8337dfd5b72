"""Definitions of stacks in a ring's log: what is valid is taken once, the rest ends the log."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterprof.agent.processes.span_rings import SpanRings
from clusterprof.agent.processes.stack_definitions import StackDefinitions
from clusterprof.trace.schema import Event
from tests.support.ring_writer import NOW_NS, PID, TICKS, RingWriter, announce_ring

LOG_BYTES = 4096


def define_file(path: bytes) -> bytes:
    return b"F" + struct.pack("<H", len(path)) + path


def define_function(file: int, line: int, name: bytes) -> bytes:
    return b"N" + struct.pack("<HIH", file, line, len(name)) + name


def define_place(function: int, line: int) -> bytes:
    return b"P" + struct.pack("<HI", function, line)


def define_stack(parent: int, place: int) -> bytes:
    return b"S" + struct.pack("<HH", parent, place)


# train.py: main (from line 1) calls load (from line 5) in line 3; load is at line 7.
LOG = b"".join(
    [
        define_file(b"/job/train.py"),
        define_function(0, 1, b"main"),
        define_place(0, 3),
        define_stack(0, 0),
        define_function(0, 5, b"load"),
        define_place(1, 7),
        define_stack(1, 1),
    ]
)
DEFINED = {
    "files": [0, ["/job/train.py"]],
    "places": [0, [[0, 1, 3, "main"], [0, 5, 7, "load"]]],
    "stacks": [1, [[0, 0], [1, 1]]],
}


@pytest.fixture(params=[True, False], ids=["sealed", "unsealed"])
def writer(request: pytest.FixtureRequest) -> Iterator[RingWriter]:
    made = RingWriter(seal=request.param, log_bytes=LOG_BYTES)
    yield made
    made.close()


def test_stack_definitions_are_taken_once_and_continue_numbering() -> None:
    definitions = StackDefinitions()
    definitions.add(LOG)
    assert definitions.take_new() == DEFINED
    assert definitions.take_new() is None
    definitions.add(define_place(1, 8) + define_stack(1, 2))
    assert definitions.take_new() == {
        "files": [1, []],
        "places": [2, [[0, 5, 8, "load"]]],
        "stacks": [3, [[1, 2]]],
    }
    everything = definitions.list_all()
    assert everything is not None
    assert everything["stacks"] == [1, [[0, 0], [1, 1], [1, 2]]]


@pytest.mark.parametrize("cut", range(1, len(LOG)))
def test_a_partial_entry_is_read_once_complete(cut: int) -> None:
    definitions = StackDefinitions()
    definitions.add(LOG[:cut])
    assert definitions.read_bytes <= cut
    definitions.add(LOG[definitions.read_bytes :])
    assert definitions.take_new() == DEFINED
    assert not definitions.is_invalid


INVALID = {
    "no tag": b"X" + LOG,
    "a file that is not defined": define_function(1, 1, b"f"),
    "a function that is not defined": define_place(2, 1),
    "a place that is not defined": define_stack(0, 2),
    "a caller that is not defined": define_stack(3, 0),
    "a line out of range": define_place(0, 2**31),
    "a text that is too long": define_file(b"x" * 4000),
}


@pytest.mark.parametrize("entry", INVALID.values(), ids=INVALID.keys())
def test_an_invalid_entry_ends_the_log(entry: bytes) -> None:
    definitions = StackDefinitions()
    definitions.add(LOG + entry + define_stack(0, 0))
    assert definitions.is_invalid
    taken = definitions.take_new()
    assert taken is not None
    assert taken["stacks"] == DEFINED["stacks"]


@given(st.binary(max_size=200), st.integers(0, len(LOG)))
def test_arbitrary_log_bytes_are_read_without_an_exception(noise: bytes, cut: int) -> None:
    definitions = StackDefinitions()
    definitions.add(LOG[:cut] + noise)
    taken = definitions.take_new() or {"files": [0, []], "places": [0, []], "stacks": [1, []]}
    for number, (parent, place) in enumerate(taken["stacks"][1], 1):
        assert 0 <= parent < number
        assert 0 <= place < len(taken["places"][1])
    for file, first_line, line, name in taken["places"][1]:
        assert 0 <= file < len(taken["files"][1])
        assert 0 <= first_line < 2**31 and 0 <= line < 2**31 and isinstance(name, str)


def test_the_definition_log_is_read_up_to_the_previous_poll(writer: RingWriter) -> None:
    ring = writer.open()
    writer.write_log(LOG)
    ring.look()
    assert ring.take_definitions() is None  # its stores may still be on their way
    ring.look()
    assert ring.take_definitions() == {"pid": PID, "started_ticks": TICKS, **DEFINED}
    assert ring.take_definitions() is None
    assert ring.take_definitions(repeat=True) == {"pid": PID, "started_ticks": TICKS, **DEFINED}
    ring.close()


@pytest.mark.parametrize("written", [LOG_BYTES + 1, 2**63])
def test_a_length_beyond_the_log_is_not_read(writer: RingWriter, written: int) -> None:
    ring = writer.open()
    writer.write_log(LOG, written)
    ring.ended = True
    assert ring.take_definitions() is None
    ring.close()


@pytest.mark.parametrize("size", [LOG_BYTES + 1, 2**64 - 1])
def test_a_log_size_beyond_the_file_is_ignored(writer: RingWriter, size: int) -> None:
    struct.pack_into("<Q", writer.memory, 48, size)
    ring = writer.open()
    assert ring.log_bytes == 0
    ring.close()


def test_a_ring_without_a_log_is_read() -> None:
    writer = RingWriter()
    ring = writer.open()
    writer.put()
    ring.ended = True
    assert ring.take_definitions() is None
    assert len(ring.take(NOW_NS)) == 1
    ring.close()
    writer.close()


def test_stack_definitions_become_events_and_are_repeated_on_request(
    tmp_path: Path, writer: RingWriter
) -> None:
    (tmp_path / "rings").mkdir()
    rings = SpanRings(tmp_path)
    fd = writer.fd
    announce_ring(
        tmp_path / "rings", f"{PID}.0.json", pid=PID, started_ticks=TICKS, fd=fd, path=None
    )
    writer.write_log(LOG)
    for _ in range(3):
        rings.look(NOW_NS)
    expected = [Event(NOW_NS, "stacks-defined", {"pid": PID, "started_ticks": TICKS, **DEFINED})]
    assert rings.take(NOW_NS) == expected
    assert rings.take(NOW_NS) == []
    rings.repeat_definitions()
    assert rings.take(NOW_NS) == expected
    assert rings.take(NOW_NS) == []
    rings.close()
