"""A disk that refuses: recording goes on in memory, and on disk as soon as it may."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterprof.trace.reader import NodeReader
from clusterprof.trace.schema import Columns, Event, Gap
from clusterprof.trace.writer import RecordingWriter
from tests.support.builders import is_whole
from tests.support.trace_samples import (
    HEADER,
    SECOND_NS,
    ManualClock,
    make_canonical,
    make_second,
    read_frames,
)

TMPFS_BYTES = 256 << 10


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root; the limit on file sizes is tested instead")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES},mode=0700", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting a tmpfs is not allowed here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def disk_seconds(reader: NodeReader) -> list[int]:
    """Return of which seconds the recording holds the disk collector's sample."""
    return [
        int(record.t_ns[0]) // SECOND_NS - 10
        for record in reader
        if isinstance(record, Columns) and record.collector == "disk"
    ]


def events(reader: NodeReader, kind: str) -> list[dict[str, Any]]:
    return [dict(r.attributes) for r in reader if isinstance(r, Event) and r.kind == kind]


def run(writer: RecordingWriter, clock: ManualClock, first: int, past: int) -> None:
    for number in range(first, past):
        clock.now_ns += SECOND_NS
        writer.append(*make_second(number))


def test_a_full_disk_loses_no_frames_that_fit_into_memory(small_disk: Path) -> None:
    clock = ManualClock()
    writer = RecordingWriter(small_disk / "node", HEADER, clock, keep_free_bytes=0)
    run(writer, clock, 0, 20)
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    run(writer, clock, 20, 60)  # first into the free rest of the last page, then into memory
    assert writer.trouble == os.strerror(errno.ENOSPC)
    assert writer.frames_dropped == 0
    _, reader = read_frames(small_disk / "node")
    assert is_whole(reader.damage)  # cut back to the last whole frame
    filler.unlink()
    run(writer, clock, 60, 64)
    assert writer.trouble == ""
    writer.close()
    reader = NodeReader(small_disk / "node")
    assert disk_seconds(reader) == list(range(64))
    assert is_whole(reader.damage)
    (full,) = events(reader, "disk-full")
    assert full["error"] == "ENOSPC"
    (resumed,) = events(reader, "disk-resumed")
    assert resumed["frames_dropped"] == 0


def test_frames_beyond_the_buffer_are_dropped_oldest_first_and_counted(small_disk: Path) -> None:
    clock = ManualClock()
    writer = RecordingWriter(
        small_disk / "node", HEADER, clock, keep_free_bytes=0, buffer_bytes=8_000
    )
    run(writer, clock, 0, 10)
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    run(writer, clock, 10, 110)
    filler.unlink()
    run(writer, clock, 110, 112)
    dropped = writer.frames_dropped
    assert dropped > 100
    writer.close()
    reader = NodeReader(small_disk / "node")
    kept = disk_seconds(reader)
    late = [number for number in kept if number >= 60]
    assert late == list(range(late[0], 112))  # the newest, without a hole
    assert kept[:10] == list(range(10))
    (resumed,) = events(reader, "disk-resumed")
    assert resumed["frames_dropped"] == dropped
    (gap,) = [record for record in reader if isinstance(record, Gap)]
    assert gap.kind == "failed"
    assert gap.message == f"{dropped} frames were dropped: {os.strerror(errno.ENOSPC)}"
    # 3 frames a second, and the event that says the disk was full is among those that were lost.
    written = sum(1 for _ in reader.frames())
    assert written == 2 + 112 * 3 + 1 - dropped + 2


def test_the_writer_keeps_the_reserved_disk_space_free(small_disk: Path) -> None:
    clock = ManualClock()
    writer = RecordingWriter(small_disk / "node", HEADER, clock, keep_free_bytes=128 << 10)
    (small_disk / "filler").write_bytes(bytes(160 << 10))  # 96 KiB are left, 128 wanted
    run(writer, clock, 0, 5)
    assert "are left to others" in writer.trouble
    assert list(disk_seconds(NodeReader(small_disk / "node"))) == []
    (small_disk / "filler").write_bytes(bytes(100 << 10))
    run(writer, clock, 5, 8)
    writer.close()
    assert disk_seconds(NodeReader(small_disk / "node")) == list(range(8))


def test_an_initially_full_disk_is_used_after_space_is_freed(small_disk: Path) -> None:
    clock = ManualClock()
    filler = small_disk / "filler"
    filler.write_bytes(bytes(TMPFS_BYTES))
    writer = RecordingWriter(small_disk / "node", HEADER, clock, keep_free_bytes=0)
    run(writer, clock, 0, 30)
    assert writer.trouble
    filler.unlink()
    run(writer, clock, 30, 33)
    writer.close()
    reader = NodeReader(small_disk / "node")
    assert disk_seconds(reader) == list(range(33))
    assert make_canonical(next(iter(reader))) == make_canonical(HEADER)
    names = sorted(os.listdir(small_disk / "node"))
    assert names == ["000001.cpf", "SHA256SUMS"]  # thirty attempts left nothing behind


def test_names_of_dropped_frames_are_written_again(small_disk: Path) -> None:
    # The names of columns stand in the frames of seconds 0, 1, 3, 7, 15 and 31. All of those are
    # dropped or still to come; without a new definition seconds 28 and 29 would have no names.
    clock = ManualClock()
    writer = RecordingWriter(
        small_disk / "node", HEADER, clock, keep_free_bytes=128 << 10, buffer_bytes=6_000
    )
    filler = small_disk / "filler"
    filler.write_bytes(bytes(160 << 10))
    run(writer, clock, 0, 28)
    assert writer.trouble
    filler.unlink()
    run(writer, clock, 28, 30)
    writer.close()
    kept = disk_seconds(NodeReader(small_disk / "node"))
    assert kept[0] > 15
    assert kept == list(range(kept[0], 30))


def test_a_temporarily_read_only_disk_loses_no_frames(small_disk: Path) -> None:
    clock = ManualClock()
    writer = RecordingWriter(small_disk / "node", HEADER, clock, keep_free_bytes=0)
    run(writer, clock, 0, 3)
    writer._fd, held = os.open(small_disk / "node" / "000001.cpf", os.O_RDONLY), writer._fd
    os.close(held)  # the kernel refuses to remount while a file is open for writing
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    assert subprocess.run(remount).returncode == 0
    run(writer, clock, 3, 6)
    assert writer.trouble
    assert subprocess.run([*remount[:2], "remount,rw", remount[3]]).returncode == 0
    run(writer, clock, 6, 9)
    writer.close()
    reader = NodeReader(small_disk / "node")
    assert disk_seconds(reader) == list(range(9))
    assert sorted(os.listdir(small_disk / "node")) == ["000001.cpf", "000002.cpf", "SHA256SUMS"]


ROOT = Path(__file__).resolve().parents[2]
CHILD = """
    import resource, sys
    sys.path.insert(0, {root!r})
    from pathlib import Path
    from tests.support.trace_samples import HEADER, SECOND_NS, ManualClock, make_second
    from clusterprof.trace.writer import RecordingWriter

    limit = 20_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    clock = ManualClock()
    writer = RecordingWriter(Path(sys.argv[1]), HEADER, clock, keep_free_bytes=0)
    for number in range(120):
        clock.now_ns += SECOND_NS
        writer.append(*make_second(number))
    writer.close()
    print(writer.frames_dropped)
"""


def test_a_file_size_limit_gives_more_segments(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 20_000
    code = textwrap.dedent(CHILD.format(root=str(ROOT)))
    child = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "node")], capture_output=True, text=True
    )
    assert (child.returncode, child.stdout, child.stderr) == (0, "0\n", "")
    reader = NodeReader(tmp_path / "node")
    assert disk_seconds(reader) == list(range(120))
    assert is_whole(reader.damage)
    sizes = [path.stat().st_size for path in (tmp_path / "node").glob("*.cpf")]
    assert len(sizes) > 1 and max(sizes) <= 20_000
    assert events(reader, "disk-full") == [], "the next segment has room at once"


def test_a_frame_above_the_file_size_limit_is_dropped(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))
        clock = ManualClock()
        writer = RecordingWriter(tmp_path / "node", HEADER, clock, keep_free_bytes=0)
        for number in range(5):
            clock.now_ns += SECOND_NS
            large = Event(clock.now_ns, "large", {"text": os.urandom(6_000).hex()})
            writer.append(large, Event(clock.now_ns, "small", {"number": number}))
        writer.close()
        os._exit(0 if writer.frames_dropped == 5 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    reader = NodeReader(tmp_path / "node")
    assert [event["number"] for event in events(reader, "small")] == list(range(5))
    assert events(reader, "large") == []
    gaps = [record.message for record in reader if isinstance(record, Gap)]
    assert gaps == ["1 frames were dropped: too large"] * 5
    assert is_whole(reader.damage)
