"""Whatever happens to the bytes: what is whole is read, the loss is stated, nothing is raised."""

from __future__ import annotations

import io
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clusterprof.trace.reader import DamageCounter, NodeReader, Scanner
from tests.support.builders import is_whole
from tests.support.trace_samples import (
    find_frame_boundaries,
    make_second,
    make_simple_records,
    read_frames,
    write_recording,
)

Frames = list[list[dict[str, Any]]]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[int], Frames]:
    """A recording of one segment: its bytes, where its frames begin, what they hold."""
    node = tmp_path_factory.mktemp("healthy") / "node"
    write_recording(node, [make_simple_records(), *(make_second(n) for n in range(8))])
    data = (node / "000001.cpf").read_bytes()
    frames, reader = read_frames(node)
    assert is_whole(reader.damage)
    assert len(frames) == len(find_frame_boundaries(data)) - 1 == 2 + 3 + 8 * 3
    return data, find_frame_boundaries(data), frames


def read(path: Path, data: bytes) -> tuple[Frames, NodeReader]:
    segment = path / "000001.cpf"
    segment.write_bytes(data)
    return read_frames(segment)


def test_a_file_cut_at_any_byte_gives_its_complete_frames(
    tmp_path: Path, healthy: tuple[bytes, list[int], Frames]
) -> None:
    data, starts, frames = healthy
    draw = random.Random(2)
    near_boundaries = {start + by for start in starts for by in (-1, 0, 1, 4, 15, 16, 17)}
    for cut in range(len(data)):
        whole = sum(end <= cut for end in starts[1:])
        count = DamageCounter()
        assert len(list(Scanner(io.BytesIO(data[:cut]), count).frames())) == whole
        assert count.torn_tail_bytes == cut - starts[whole]
        assert count.damaged_places == 0
        if cut in near_boundaries or draw.random() < 0.02:
            got, reader = read(tmp_path, data[:cut])
            assert got == frames[:whole]
            assert reader.damage.torn_tail_bytes == cut - starts[whole]
            assert (reader.damage.damaged_places, reader.damage.unknown_frames) == (0, 0)


def test_a_flipped_bit_loses_only_its_frame(
    tmp_path: Path, healthy: tuple[bytes, list[int], Frames]
) -> None:
    data, starts, frames = healthy
    draw = random.Random(3)
    for _ in range(200):
        at = draw.randrange(len(data))
        hit = sum(start <= at for start in starts) - 1
        bad = bytearray(data)
        bad[at] ^= 1 << draw.randrange(8)
        got, reader = read(tmp_path, bytes(bad))
        assert got == frames[:hit] + frames[hit + 1 :]
        damage = reader.damage
        assert damage.damaged_places + (damage.torn_tail_bytes > 0) == 1
        assert damage.damaged_bytes + damage.torn_tail_bytes == starts[hit + 1] - starts[hit]


def test_five_thousand_flipped_bits_are_all_detected(
    healthy: tuple[bytes, list[int], Frames],
) -> None:
    data, _, frames = healthy
    draw = random.Random(4)
    for _ in range(5_000):
        bad = bytearray(data)
        bad[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        count = DamageCounter()
        assert len(list(Scanner(io.BytesIO(bad), count).frames())) == len(frames) - 1
        assert count.damaged_bytes + count.torn_tail_bytes > 0


def test_overwritten_blocks_lose_only_overlapping_frames(tmp_path: Path) -> None:
    write_recording(tmp_path / "node", [make_second(n) for n in range(60)])
    segment = tmp_path / "node" / "000001.cpf"
    data, (frames, _) = segment.read_bytes(), read_frames(segment)
    starts = find_frame_boundaries(data)
    draw = random.Random(5)
    for _ in range(60):
        at = draw.randrange(len(data) - 4096)
        noise = draw.choice([bytes(4096), draw.randbytes(4096), b"CPF\x01" * 1024])
        untouched = [
            frame
            for frame, start, end in zip(frames, starts, starts[1:])
            if end <= at or start >= at + 4096
        ]
        got, reader = read(tmp_path, data[:at] + noise + data[at + 4096 :])
        assert got == untouched
        assert reader.damage.damaged_places + (reader.damage.torn_tail_bytes > 0) == 1


@pytest.mark.parametrize("where", ["front", "middle", "end"])
@pytest.mark.parametrize(
    "foreign",
    [b"#!/bin/sh\necho hello\n" * 9, b"\x00" * 5000, b"CPF\x01", b"CPF\x01" + b"\xff" * 40],
)
def test_foreign_bytes_are_skipped_and_counted(
    tmp_path: Path, healthy: tuple[bytes, list[int], Frames], where: str, foreign: bytes
) -> None:
    data, starts, frames = healthy
    at = {"front": 0, "middle": starts[7], "end": len(data)}[where]
    got, reader = read(tmp_path, data[:at] + foreign + data[at:])
    assert got == frames
    assert reader.damage.damaged_bytes + reader.damage.torn_tail_bytes == len(foreign)


def framed(kind: int, payload: bytes, schema: int = 1, codec: int = 0) -> bytes:
    rest = struct.pack("<BBBB", kind, schema, codec, 0) + payload
    return struct.pack("<4sII", b"CPF\x01", len(payload), zlib.crc32(rest)) + rest


@pytest.mark.parametrize("lie", [0, 1, 100, 5_000, 1 << 20, (16 << 20) - 1, 1 << 31, 0xFFFFFFFF])
def test_a_wrong_frame_length_loses_only_its_frame(
    tmp_path: Path, healthy: tuple[bytes, list[int], Frames], lie: int
) -> None:
    data, starts, frames = healthy
    at = starts[9] + 4
    got, reader = read(tmp_path, data[:at] + struct.pack("<I", lie) + data[at + 4 :])
    assert got == frames[:9] + frames[10:]
    assert reader.damage.damaged_places == 1


def header(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


CLOCK = msgspec.msgpack.encode({"monotonic_ns": 1, "boottime_ns": 2, "realtime_ns": 3})
DEEP = b"\x91" * 100_000 + b"\xc0"
NOT_UNDERSTOOD = {
    "a kind of a later version": framed(99, header(b"\x95\x00\x00\x90\x90\x90")),
    "a later schema": framed(2, header(CLOCK), schema=2),
    "no msgpack": framed(2, header(b"\xc1\xc1")),
    "msgpack cut short": framed(2, header(b"\x83\xa1")),
    "the wrong fields": framed(2, header(b"\x81\xa1a\x01")),
    "a header longer than the frame": framed(2, struct.pack("<I", len(CLOCK) + 1) + CLOCK),
    "nested without end": framed(
        6, header(b"\x83\xa4t_ns\x01\xa4kind\xa1x\xaaattributes\x81\xa1a" + DEEP)
    ),
    "an event of a process without a number": framed(
        6,
        header(
            msgspec.msgpack.encode({"t_ns": 1, "kind": "process-exited", "attributes": {"pid": {}}})
        ),
    ),
    "no header at all": framed(3, header(b"")),
    # raw 0, unpacked 0, no blocks, one part whose layout nobody defined
    "an unknown layout": framed(3, header(b"\x95\x00\x00\x90\x91\x93\x07\x01\x80\x90")),
    # one block of 2**40 columns and rows
    "columns beyond memory": framed(
        3,
        header(
            b"\x95\x00\x00\x91\x97\x00"
            + b"\xcf"
            + (1 << 40).to_bytes(8, "big") * 1
            + b"\xcf"
            + (1 << 40).to_bytes(8, "big")
            + b"\x01\x00\x00\x00"
            + b"\x90\x90"
        ),
    ),
    "spans beyond memory": framed(
        5, header(b"\x96\x00\x00\x90\x91\x96\x01\x01\x01\x00\x80\xce\x7f\xff\xff\xff\x00\x80")
    ),
    "spans that promise blocks and bring none": framed(
        5, header(b"\x96\x00\x00\x90\x91\x96\x01\x01\x01\x00\x80\x02\x00\x80")
    ),
    "a codec of a later version": framed(3, header(b"\x95\x00\x00\x90\x90\x90"), codec=7),
}


@pytest.mark.parametrize("name", NOT_UNDERSTOOD)
def test_invalid_frames_are_counted_and_the_other_frames_read(
    tmp_path: Path, healthy: tuple[bytes, list[int], Frames], name: str
) -> None:
    data, starts, frames = healthy
    at = starts[9]
    got, reader = read(tmp_path, data[:at] + NOT_UNDERSTOOD[name] + data[at:])
    assert got == frames
    assert reader.damage.unknown_frames + reader.damage.implausible_records == 1
    assert reader.damage.damaged_places == 0
    got, reader = read(tmp_path, data + NOT_UNDERSTOOD[name])
    assert got == frames
    assert reader.damage.unknown_frames + reader.damage.implausible_records == 1


def test_a_decompression_bomb_is_refused_before_decompression(tmp_path: Path) -> None:
    # 256 MiB of zeros in 260 kB. What a frame unfolds to must be what its blocks need: 256 MiB
    # for 32 Mi values of 8 packed planes (0x5555), which is more than the 64 MiB of any frame;
    # for one value it is not what they need. A block of zero planes brings nothing and says so.
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = b"".join(deflate.compress(bytes(1 << 20)) for _ in range(256)) + deflate.flush()
    for rows, claimed in ((32 << 20, 256 << 20), (1, 256 << 20), (1, 8), (32 << 20, 8)):
        block = [0, 1, rows, 0, 0, 0, 0x5555]
        head = header(msgspec.msgpack.encode([0, claimed, [block], [], []]))
        got, reader = read(tmp_path, framed(3, head + bomb, codec=1))
        assert got == []
        assert reader.damage.unknown_frames == 1


def test_many_small_frames_expanding_to_the_limit_are_stopped(tmp_path: Path) -> None:
    # 7 Mi values of zero planes are 56 MiB out of a 40-byte frame: allowed 9 times (512 MiB), and
    # then no more. A thousand of them would take 55 GiB of zeros to write.
    block = [0, 1, 7 << 20, 0, 0, 0, 0]
    head = header(msgspec.msgpack.encode([0, 0, [block], [], []]))
    got, reader = read(tmp_path, framed(3, head) * 1000)
    assert len(got) == 9
    assert reader.damage.unknown_frames == 991


def test_false_frame_headers_are_scanned_in_bounded_time(tmp_path: Path) -> None:
    # Without a limit each of 60,000 heads costs a checksum over up to 1 MB: 30 GB of arithmetic.
    hostile = struct.pack("<4sIIBBBB", b"CPF\x01", 500_000, 0, 3, 1, 0, 0) * 60_000
    count = DamageCounter()
    assert list(Scanner(io.BytesIO(hostile), count).frames()) == []
    assert count.bytes_searched <= (64 << 20) + 16 * len(hostile)
    assert count.damaged_bytes + count.torn_tail_bytes == len(hostile)


def test_arbitrary_bytes_never_raise(
    tmp_path: Path, healthy: tuple[bytes, list[int], Frames]
) -> None:
    data, starts, _ = healthy
    draw = random.Random(6)
    for _ in range(300):
        # Frames with valid checksums whose payload was tampered with: the decoder's own guards.
        at = draw.randrange(len(starts) - 1)
        frame = bytearray(data[starts[at] : starts[at + 1]])
        for _ in range(draw.randrange(1, 6)):
            frame[draw.randrange(12, len(frame))] = draw.randrange(256)
        frame[8:12] = struct.pack("<I", zlib.crc32(frame[12:]))
        read(tmp_path, data[: starts[at]] + bytes(frame) + data[starts[at + 1] :])
        read(tmp_path, draw.randbytes(draw.randrange(300)))


def test_names_survive_the_loss_of_their_defining_frame(
    tmp_path: Path, healthy: tuple[bytes, list[int], Frames]
) -> None:
    data, starts, frames = healthy
    # 2 frames of the segment's start, 3 simple ones; the columns of the first second are frame 5.
    got, reader = read(tmp_path, data[: starts[5]] + data[starts[8] :])
    assert got == frames[:5] + frames[8:]
    # And when both first definitions are gone, a later one serves: seconds 0 and 1 are cut out.
    got, reader = read(tmp_path, data[: starts[5]] + data[starts[11] :])
    assert got == frames[:5] + frames[11:]
    assert is_whole(reader.damage)  # cut out between two frames: nothing left to notice


def test_a_growing_recording_is_read_again_from_the_start(
    tmp_path: Path, healthy: tuple[bytes, list[int], Frames]
) -> None:
    data, starts, frames = healthy
    segment = tmp_path / "000001.cpf"
    segment.write_bytes(data[: starts[4] + 3])
    reader = NodeReader(tmp_path)
    assert sum(1 for _ in reader.frames()) == 4
    assert reader.damage.torn_tail_bytes == 3
    segment.write_bytes(data)
    assert sum(1 for _ in reader.frames()) == len(frames)
    assert is_whole(reader.damage)
