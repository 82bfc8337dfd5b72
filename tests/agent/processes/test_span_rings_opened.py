"""Which rings are opened, and which announcements are refused; none is ever trusted."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from clusterprof.agent.processes.span_rings import SpanRings, open_ring
from clusterprof.errors import Unavailable
from clusterprof.probe import layout
from clusterprof.trace.schema import Event, Spans
from tests.support.ring_writer import NOW_NS, PID, TICKS, RingWriter, announce_ring, list_sequences


def headers() -> dict[str, bytes]:
    good = (layout.MAGIC, 64, 8, PID, 64, TICKS, 0, 0)
    other = {
        "magic": (0, b"CPRING9\n"),
        "record size": (1, 65),
        "capacity": (2, 1 << 31),
        "no capacity": (2, 0),
        "pid": (3, 1),
        "names": (4, 65),
        "start": (5, TICKS + 1),
    }
    made = {}
    for name, (index, value) in other.items():
        fields = list(good)
        fields[index] = value
        made[name] = struct.pack("<8sIIIIQQQ", *fields)
    return made


@pytest.mark.parametrize("header", headers().values(), ids=headers().keys())
def test_an_invalid_ring_header_is_refused(header: bytes) -> None:
    writer = RingWriter()
    writer.memory[: len(header)] = header
    with pytest.raises(Unavailable):
        writer.open()
    writer.close()


def test_only_memory_files_of_a_process_are_opened(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    end = os.open(fifo, os.O_RDWR)
    with open(tmp_path / "file", "wb") as file:
        good = RingWriter()
        file.write(good.memory[:])  # a whole ring, but in a file that somebody may shorten
        file.flush()
        good.close()
        for descriptor in (end, file.fileno(), 0, 9999):
            with pytest.raises(Unavailable):
                open_ring(f"/proc/self/fd/{descriptor}", PID, TICKS, memory_file=True)
    os.close(end)


def test_invalid_ring_announcements_are_refused_and_reported_once(tmp_path: Path) -> None:
    folder = tmp_path / "rings"
    folder.mkdir()
    writer = RingWriter()
    writer.put()
    announce_ring(folder, f"{PID}.0.json", pid=PID, started_ticks=TICKS, fd=writer.fd, path=None)
    announce_ring(folder, "1.json", pid=PID, started_ticks=TICKS, fd="x", path=None)
    announce_ring(folder, "2.json", pid=-1, started_ticks=TICKS, fd=writer.fd, path=None)
    announce_ring(folder, "3.json", pid=PID, started_ticks=TICKS, fd=None, path="/etc/passwd")
    (folder / "4.json").write_text("[" * 3000)
    (folder / "5.json").write_text("{" + " " * 5000 + "}")
    (folder / "6.json").symlink_to("/etc/passwd")
    for number, path in ((7, "half a surrogate pair \ud800"), (8, "a NUL \0")):
        announce_ring(folder, f"{number}.json", pid=PID, started_ticks=TICKS, fd=None, path=path)
    rings = SpanRings(tmp_path)
    rings.look(NOW_NS)
    rings.look(NOW_NS)
    records = rings.take(NOW_NS)
    refused = [record.attributes["ring"] for record in records if isinstance(record, Event)]
    assert sorted(refused) == [f"{number}.json" for number in range(1, 9)]
    assert list_sequences([record for record in records if isinstance(record, Spans)]) == [1]
    assert rings.take(NOW_NS) == []  # reported once
    rings.close()
    writer.close()


def test_spans_from_before_a_restarted_recorder_are_skipped(tmp_path: Path) -> None:
    folder = tmp_path / "rings"
    folder.mkdir()
    writer = RingWriter()
    writer.put()
    announce_ring(folder, f"{PID}.0.json", pid=PID, started_ticks=TICKS, fd=writer.fd, path=None)
    rings = SpanRings(tmp_path, skip_old=True)
    rings.look(NOW_NS)
    writer.put()
    rings.look(NOW_NS)
    rings.look(NOW_NS)
    assert list_sequences(
        [record for record in rings.take(NOW_NS) if isinstance(record, Spans)]
    ) == [2]
    rings.close()
    writer.close()


def test_a_process_that_executes_another_program_has_a_new_ring(tmp_path: Path) -> None:
    folder = tmp_path / "rings"
    folder.mkdir()
    first, second = RingWriter(), RingWriter()
    announce_ring(folder, f"{PID}.0.json", pid=PID, started_ticks=TICKS, fd=first.fd, path=None)
    rings = SpanRings(tmp_path)
    rings.look(NOW_NS)
    first.put(a=1)  # the last thing before it executes: no look has seen it yet
    second.put(a=2)
    announce_ring(folder, "new", pid=PID, started_ticks=TICKS, fd=second.fd, path=None)
    os.rename(folder / "new", folder / f"{PID}.0.json")
    rings.look(NOW_NS)
    rings.look(NOW_NS)
    spans = [record for record in rings.take(NOW_NS) if isinstance(record, Spans)]
    assert [list(span.columns["a"]) for span in spans] == [[1], [2]]
    rings.close()
    first.close()
    second.close()


def test_ring_files_are_read_only_from_the_rings_folder(tmp_path: Path) -> None:
    folder = tmp_path / "rings"
    folder.mkdir()
    writer = RingWriter()
    writer.put(a=7)
    for place in (folder / "here.ring", tmp_path / "elsewhere.ring"):
        place.write_bytes(writer.memory[:])
    for name in ("here", "elsewhere"):
        path = str(next(tmp_path.rglob(f"{name}.ring")))
        announce_ring(folder, f"{name}.json", pid=PID, started_ticks=TICKS, fd=None, path=path)
    rings = SpanRings(tmp_path)
    rings.look(NOW_NS)
    rings.look(NOW_NS)
    records = rings.take(NOW_NS)
    assert [list(record.columns["a"]) for record in records if isinstance(record, Spans)] == [[7]]
    assert [record.attributes["ring"] for record in records if isinstance(record, Event)] == [
        "elsewhere.json"
    ]
    rings.close()
    writer.close()
