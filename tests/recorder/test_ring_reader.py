"""Rings written by hand, well and badly: what is whole is read, the rest is counted."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterprof.errors import Unavailable
from clusterprof.probe import layout
from clusterprof.recorder.identity import started_ticks
from clusterprof.recorder.ring import Ring, open_ring
from clusterprof.recorder.rings import Rings
from clusterprof.trace.schema import Event, Spans

NOW_NS = 10_000_000_000
PID = os.getpid()
TICKS = started_ticks("/proc", PID) or 0


class Writer:
    """What the probe does, in a process that is this one."""

    def __init__(self, capacity: int = 8, seal: bool = True) -> None:
        self.capacity = capacity
        size = layout.RECORDS_OFFSET + capacity * layout.RECORD_BYTES
        self.fd = os.memfd_create("clusterprof-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        if seal:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.memory = mmap.mmap(self.fd, size)
        layout.HEADER.pack_into(
            self.memory, 0, layout.MAGIC, 64, capacity, PID, layout.NAMES_CAPACITY, TICKS, 0, 0
        )
        self.written = 0

    def put(self, kind: int = layout.STEP, start: int = 1, end: int = 2, a: int = 0) -> None:
        self.written += 1
        self.record(self.written, self.written, start, end, kind, a)
        self.counter(self.written)

    def record(self, slot: int, *fields: int) -> None:
        values = (*fields, *(0,) * (8 - len(fields)))
        offset = layout.RECORDS_OFFSET + (slot - 1) % self.capacity * layout.RECORD_BYTES
        layout.RECORD.pack_into(self.memory, offset, *values)

    def counter(self, value: int) -> None:
        layout.COUNTER.pack_into(self.memory, layout.WRITTEN_OFFSET, value)

    def open(self) -> Ring:
        return open_ring(f"/proc/self/fd/{self.fd}", PID, TICKS, memory_file=True)

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)


@pytest.fixture(params=[True, False], ids=["sealed", "unsealed"])
def writer(request: pytest.FixtureRequest) -> Iterator[Writer]:
    made = Writer(seal=request.param)
    yield made
    made.close()


def drained(ring: Ring, looks: int = 2) -> list[Spans]:
    for _ in range(looks):
        ring.look()
    return ring.take(NOW_NS)


def sequences(spans: list[Spans]) -> list[int]:
    return [one.first_sequence + i for one in spans for i in range(len(one.columns["kind"]))]


def test_a_span_arrives_as_it_was_written(writer: Writer) -> None:
    ring = writer.open()
    writer.put(layout.FETCH, 100, 250, a=32)
    (spans,) = drained(ring)
    assert (spans.pid, spans.started_ticks, spans.first_sequence) == (PID, TICKS, 1)
    assert (spans.dropped, spans.names) == (0, {})
    assert {name: list(column) for name, column in spans.columns.items()} == {
        "start_ns": [100], "end_ns": [250], "kind": [layout.FETCH],
        "a": [32], "b": [0], "c": [0], "d": [0],
    }  # fmt: skip
    ring.close()


def test_only_what_was_written_before_the_look_before_is_taken(writer: Writer) -> None:
    ring = writer.open()
    writer.put()
    ring.look()
    assert ring.take(NOW_NS) == []  # the stores of a record may still be on their way
    writer.put()
    ring.look()
    assert sequences(ring.take(NOW_NS)) == [1]
    ring.look()
    assert sequences(ring.take(NOW_NS)) == [2]
    ring.close()


def test_everything_is_taken_when_the_process_has_ended(writer: Writer) -> None:
    ring = writer.open()
    writer.put()
    writer.put()
    ring.ended = True
    assert sequences(ring.take(NOW_NS)) == [1, 2]
    ring.close()


def test_what_the_writer_overwrote_is_counted(writer: Writer) -> None:
    ring = writer.open()
    for _ in range(20):
        writer.put()
    spans = drained(ring)
    # 8 slots: of 20 the newest 8 are there; slot of 13 is where number 21 is being written now
    assert sequences(spans) == list(range(14, 21))
    assert sum(one.dropped for one in spans) == 13
    ring.close()


def test_an_ended_ring_is_read_to_its_last_slot(writer: Writer) -> None:
    ring = writer.open()
    for _ in range(20):
        writer.put()
    ring.ended = True
    spans = ring.take(NOW_NS)
    assert sequences(spans) == list(range(13, 21))
    assert sum(one.dropped for one in spans) == 12
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
def test_a_record_that_does_not_hold_is_dropped_alone(
    writer: Writer, fields: tuple[int, ...]
) -> None:
    ring = writer.open()
    for _ in range(5):
        writer.put()
    writer.record(3, *fields)
    spans = drained(ring)
    assert [(one.first_sequence, len(one.columns["kind"])) for one in spans] == [(1, 2), (4, 2)]
    assert sum(one.dropped for one in spans) == 1
    ring.close()


def test_names_of_own_kinds_come_with_the_spans_that_use_them(writer: Writer) -> None:
    ring = writer.open()
    name = "Aufwärmen".encode()
    writer.memory[layout.NAMES_OFFSET : layout.NAMES_OFFSET + len(name)] = name
    writer.memory[layout.NAMES_OFFSET + 48 : layout.NAMES_OFFSET + 50] = b"\xff\xfe"
    for kind in (64, 65, 66):
        writer.put(kind)
    (spans,) = drained(ring)
    assert spans.names == {64: "Aufwärmen", 65: "\N{REPLACEMENT CHARACTER}" * 2, 66: "user-2"}
    ring.close()


@pytest.mark.parametrize("written", [2**63, 2**64 - 1, 2**62])
def test_a_counter_out_of_range_ends_the_reading(writer: Writer, written: int) -> None:
    ring = writer.open()
    writer.counter(written)
    assert drained(ring) == []
    assert ring.refused
    ring.close()


def test_a_counter_that_runs_backwards_ends_the_reading(writer: Writer) -> None:
    ring = writer.open()
    for _ in range(5):
        writer.put()
    assert len(drained(ring)) == 1
    writer.counter(2)
    assert drained(ring) == []
    assert ring.refused
    ring.close()


def test_a_counter_that_jumps_is_counted_as_dropped(writer: Writer) -> None:
    ring = writer.open()
    writer.counter(2**61)
    spans = drained(ring)
    assert sequences(spans) == []
    assert ring.dropped == 2**53  # what a reader of JSON can still hold
    ring.close()


def test_a_shortened_ring_reads_as_zeros_and_kills_nobody() -> None:
    writer = Writer(seal=False)
    ring = writer.open()
    assert ring.memory is None  # what can shrink is never mapped
    writer.put()
    writer.memory.close()
    os.ftruncate(writer.fd, 100)
    assert drained(ring) == []
    os.close(writer.fd)
    ring.close()


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.binary(min_size=0, max_size=64),
    records=st.binary(max_size=600),
    written=st.integers(0, 2**64 - 1),
)
def test_nothing_in_a_ring_makes_the_reader_fail(
    header: bytes, records: bytes, written: int
) -> None:
    writer = Writer()
    ring = writer.open()
    writer.put()
    ring.look()
    writer.memory[layout.RECORDS_OFFSET : layout.RECORDS_OFFSET + len(records)] = records[:512]
    writer.counter(written)
    writer.memory[0 : len(header)] = header  # the header moves under the reader's eyes
    for spans in [*drained(ring), *drained(ring)]:
        lengths = {len(column) for column in spans.columns.values()}
        assert len(lengths) == 1
        assert all(0 < kind <= 127 for kind in spans.columns["kind"])
    ring.ended = True
    ring.take(NOW_NS)
    ring.close()
    writer.close()


def headers() -> dict[str, bytes]:
    good = (layout.MAGIC, 64, 8, PID, 64, TICKS, 0, 0)
    other = {
        "magic": (0, b"CPRING9\n"), "record size": (1, 65), "capacity": (2, 1 << 31),
        "no capacity": (2, 0), "pid": (3, 1), "names": (4, 65), "start": (5, TICKS + 1),
    }  # fmt: skip
    made = {}
    for name, (index, value) in other.items():
        fields = list(good)
        fields[index] = value
        made[name] = struct.pack("<8sIIIIQQQ", *fields)
    return made


@pytest.mark.parametrize("header", headers().values(), ids=headers().keys())
def test_a_header_that_does_not_hold_is_refused(header: bytes) -> None:
    writer = Writer()
    writer.memory[: len(header)] = header
    with pytest.raises(Unavailable):
        writer.open()
    writer.close()


def test_only_memory_files_of_a_process_are_opened(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    end = os.open(fifo, os.O_RDWR)
    with open(tmp_path / "file", "wb") as file:
        file.truncate(8192)
        for descriptor in (end, file.fileno(), 0, 9999):
            with pytest.raises(Unavailable):
                open_ring(f"/proc/self/fd/{descriptor}", PID, TICKS, memory_file=True)
    os.close(end)


def announce(folder: Path, name: str, **content: object) -> None:
    (folder / name).write_text(json.dumps(content))
    (folder / name).chmod(0o600)


def test_announcements_are_followed_refused_and_never_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "rings"
    folder.mkdir()
    writer = Writer()
    writer.put()
    announce(folder, f"{PID}.0.json", pid=PID, started_ticks=TICKS, fd=writer.fd, path=None)
    announce(folder, "1.json", pid=PID, started_ticks=TICKS, fd="x", path=None)
    announce(folder, "2.json", pid=-1, started_ticks=TICKS, fd=writer.fd, path=None)
    announce(folder, "3.json", pid=PID, started_ticks=TICKS, fd=None, path="/etc/passwd")
    (folder / "4.json").write_text("[" * 3000)
    (folder / "5.json").write_text("{" + " " * 5000 + "}")
    (folder / "6.json").symlink_to("/etc/passwd")
    rings = Rings(tmp_path)
    rings.look(NOW_NS)
    rings.look(NOW_NS)
    records = rings.take(NOW_NS)
    refused = [one.attributes["ring"] for one in records if isinstance(one, Event)]
    assert sorted(refused) == [f"{number}.json" for number in range(1, 7)]
    assert sequences([one for one in records if isinstance(one, Spans)]) == [1]
    assert rings.take(NOW_NS) == []  # told once
    rings.close()
    writer.close()


def test_an_earlier_recorders_spans_are_not_taken_again(tmp_path: Path) -> None:
    folder = tmp_path / "rings"
    folder.mkdir()
    writer = Writer()
    writer.put()
    announce(folder, f"{PID}.0.json", pid=PID, started_ticks=TICKS, fd=writer.fd, path=None)
    rings = Rings(tmp_path, skip_old=True)
    rings.look(NOW_NS)
    writer.put()
    rings.look(NOW_NS)
    rings.look(NOW_NS)
    assert sequences([one for one in rings.take(NOW_NS) if isinstance(one, Spans)]) == [2]
    rings.close()
    writer.close()


def test_a_process_that_executes_another_program_has_a_new_ring(tmp_path: Path) -> None:
    folder = tmp_path / "rings"
    folder.mkdir()
    first, second = Writer(), Writer()
    announce(folder, f"{PID}.0.json", pid=PID, started_ticks=TICKS, fd=first.fd, path=None)
    rings = Rings(tmp_path)
    rings.look(NOW_NS)
    first.put(a=1)  # the last thing before it executes: no look has seen it yet
    second.put(a=2)
    announce(folder, "new", pid=PID, started_ticks=TICKS, fd=second.fd, path=None)
    os.rename(folder / "new", folder / f"{PID}.0.json")
    rings.look(NOW_NS)
    rings.look(NOW_NS)
    spans = [one for one in rings.take(NOW_NS) if isinstance(one, Spans)]
    assert [list(one.columns["a"]) for one in spans] == [[1], [2]]
    rings.close()
    first.close()
    second.close()
