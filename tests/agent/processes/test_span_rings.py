"""Rings written by hand, well and badly: what is whole is read, the rest is counted."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterprof.agent.processes.span_rings import LONG_OPERATION_NS
from clusterprof.probe import layout
from tests.support.ring_writer import NOW_NS, PID, TICKS, RingWriter, drain_ring, list_sequences


@pytest.fixture(params=[True, False], ids=["sealed", "unsealed"])
def writer(request: pytest.FixtureRequest) -> Iterator[RingWriter]:
    made = RingWriter(seal=request.param)
    yield made
    made.close()


def test_a_span_is_read_as_written(writer: RingWriter) -> None:
    ring = writer.open()
    writer.put(layout.FETCH, 100, 250, a=32)
    (spans,) = drain_ring(ring)
    assert (spans.pid, spans.started_ticks, spans.first_sequence) == (PID, TICKS, 1)
    assert (spans.dropped, spans.names) == (0, {})
    assert {name: list(column) for name, column in spans.columns.items()} == {
        "start_ns": [100],
        "end_ns": [250],
        "kind": [layout.FETCH],
        "a": [32],
        "b": [0],
        "c": [0],
        "d": [0],
    }
    ring.close()


def test_only_records_written_before_the_previous_poll_are_taken(writer: RingWriter) -> None:
    ring = writer.open()
    writer.put()
    ring.look()
    assert ring.take(NOW_NS) == []  # the stores of a record may still be on their way
    writer.put()
    ring.look()
    assert list_sequences(ring.take(NOW_NS)) == [1]
    ring.look()
    assert list_sequences(ring.take(NOW_NS)) == [2]
    ring.close()


def test_all_records_are_read_after_the_process_has_ended(writer: RingWriter) -> None:
    ring = writer.open()
    writer.put()
    writer.put()
    ring.ended = True
    assert list_sequences(ring.take(NOW_NS)) == [1, 2]
    ring.close()


def test_overwritten_records_are_counted(writer: RingWriter) -> None:
    ring = writer.open()
    for _ in range(20):
        writer.put()
    spans = drain_ring(ring)
    # 8 slots: of 20 the newest 8 are there; slot of 13 is where number 21 is being written now
    assert list_sequences(spans) == list(range(14, 21))
    assert sum(span.dropped for span in spans) == 13
    ring.close()


def test_an_ended_ring_is_read_to_its_last_slot(writer: RingWriter) -> None:
    ring = writer.open()
    for _ in range(20):
        writer.put()
    ring.ended = True
    spans = ring.take(NOW_NS)
    assert list_sequences(spans) == list(range(13, 21))
    assert sum(span.dropped for span in spans) == 12
    ring.close()


BAD = {
    "another sequence": (99, 1, 2, layout.STEP),
    "end before start": (3, 5, 4, layout.STEP),
    "start of nothing": (3, 0, 2, layout.STEP),
    "negative": (3, -5, 2, layout.STEP),
    "in the future": (3, 1, NOW_NS + 2_000_000_000, layout.STEP),
    "no kind": (3, 1, 2, 0),
    "a kind beyond the names": (3, 1, 2, 128),
}


@pytest.mark.parametrize("fields", BAD.values(), ids=BAD.keys())
def test_an_implausible_record_is_dropped_without_the_others(
    writer: RingWriter, fields: tuple[int, ...]
) -> None:
    ring = writer.open()
    for _ in range(5):
        writer.put()
    writer.read_slot(3, *fields)
    spans = drain_ring(ring)
    assert [(span.first_sequence, len(span.columns["kind"])) for span in spans] == [(1, 2), (4, 2)]
    assert sum(span.dropped for span in spans) == 1
    ring.close()


def test_user_defined_names_are_delivered_with_their_spans(writer: RingWriter) -> None:
    ring = writer.open()
    name = "Aufwärmen".encode()
    writer.memory[layout.NAMES_OFFSET : layout.NAMES_OFFSET + len(name)] = name
    writer.memory[layout.NAMES_OFFSET + 48 : layout.NAMES_OFFSET + 50] = b"\xff\xfe"
    for kind in (64, 65, 66):
        writer.put(kind)
    (spans,) = drain_ring(ring)
    assert spans.names == {64: "Aufwärmen", 65: "\N{REPLACEMENT CHARACTER}" * 2, 66: "user-2"}
    ring.close()


@pytest.mark.parametrize("written", [2**63, 2**64 - 1, 2**62])
def test_a_counter_out_of_range_stops_reading_the_ring(writer: RingWriter, written: int) -> None:
    ring = writer.open()
    writer.set_counter(written)
    assert drain_ring(ring) == []
    assert ring.refusal
    ring.close()


def test_a_decreasing_counter_stops_reading_the_ring(writer: RingWriter) -> None:
    ring = writer.open()
    for _ in range(5):
        writer.put()
    assert len(drain_ring(ring)) == 1
    writer.set_counter(2)
    assert drain_ring(ring) == []
    assert ring.refusal
    ring.close()


def test_a_counter_jump_is_counted_as_dropped_records(writer: RingWriter) -> None:
    ring = writer.open()
    writer.set_counter(2**61)
    spans = drain_ring(ring)
    assert list_sequences(spans) == []
    assert ring.dropped == 2**53  # what a reader of JSON can still hold
    ring.close()


@pytest.mark.parametrize("left", [0, 36, 100, 4096])
def test_a_truncated_ring_yields_no_records_and_no_crash(left: int) -> None:
    writer = RingWriter(seal=False)
    ring = writer.open()
    assert ring.memory is None  # what can shrink is never mapped
    writer.put()
    writer.memory.close()
    os.ftruncate(writer.fd, left)
    assert drain_ring(ring) == []
    os.close(writer.fd)
    ring.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.binary(min_size=0, max_size=64),
    records=st.binary(max_size=600),
    written=st.integers(0, 2**64 - 1),
)
def test_arbitrary_ring_content_does_not_crash_the_reader(
    header: bytes, records: bytes, written: int
) -> None:
    writer = RingWriter()
    ring = writer.open()
    writer.put()
    ring.look()
    writer.memory[layout.RECORDS_OFFSET : layout.RECORDS_OFFSET + len(records)] = records[:512]
    writer.set_counter(written)
    writer.memory[0 : len(header)] = header  # the header moves under the reader's eyes
    for spans in [*drain_ring(ring), *drain_ring(ring)]:
        lengths = {len(column) for column in spans.columns.values()}
        assert len(lengths) == 1
        assert all(0 < kind <= 127 for kind in spans.columns["kind"])
    ring.ended = True
    ring.take(NOW_NS)
    ring.close()
    writer.close()


def test_an_operation_that_does_not_end_is_reported_once(writer: RingWriter) -> None:
    ring = writer.open()
    assert ring.under_way(NOW_NS, final=False) is None  # none was ever begun
    layout.UNDER_WAY.pack_into(writer.memory, layout.UNDER_WAY_OFFSET, 100, 7, 3, 40, 1)
    writer.put(layout.COLLECTIVE, 90, 100)  # the one before
    assert ring.under_way(100 + LONG_OPERATION_NS - 1, final=False) is None
    assert ring.under_way(100 + LONG_OPERATION_NS, final=False) == {
        "pid": PID,
        "started_ticks": TICKS,
        "start_ns": 100,
        "group": 7,
        "number": 3,
        "bytes": 40,
        "operation": 1,
    }
    assert ring.under_way(100 + LONG_OPERATION_NS, final=False) is None
    assert ring.under_way(100 + LONG_OPERATION_NS, final=True) is None
    ring.close()


def test_an_operation_with_a_recorded_span_has_ended(writer: RingWriter) -> None:
    ring = writer.open()
    layout.UNDER_WAY.pack_into(writer.memory, layout.UNDER_WAY_OFFSET, 100, 7, 3, 40, 1)
    for _ in range(writer.capacity - 1):
        writer.put()
    writer.put(layout.COLLECTIVE, 100, 200, a=7)
    assert ring.under_way(100 + LONG_OPERATION_NS, final=False) is None
    layout.UNDER_WAY.pack_into(writer.memory, layout.UNDER_WAY_OFFSET, 300, 7, 4, 40, 1)
    # In the end one that has just begun counts too.
    assert ring.under_way(301, final=False) is None
    result = ring.under_way(301, final=True)
    assert result is not None and result["number"] == 4
    ring.close()
