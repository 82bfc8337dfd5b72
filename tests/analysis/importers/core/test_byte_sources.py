"""Foreign files as streams of bytes, however they are packed, however they are damaged."""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.byte_sources import open_sources
from clusterprof.errors import UsageError

TEXT = b"".join(b'{"n": %d}\n' % n for n in range(50_000))


def whole(path: Path) -> tuple[bytes, str]:
    (source,) = open_sources(path)
    data = b"".join(source.blocks(1 << 14))
    return data, source.damage


def test_plain_and_concatenated_gzip_files_are_read(tmp_path: Path) -> None:
    plain, packed, twice = (tmp_path / name for name in ("a.json", "a.gz", "b.gz"))
    plain.write_bytes(TEXT)
    packed.write_bytes(gzip.compress(TEXT))
    twice.write_bytes(gzip.compress(TEXT[:1000]) + gzip.compress(TEXT[1000:]))
    assert whole(plain) == whole(packed) == whole(twice) == (TEXT, "")
    (source,) = open_sources(packed)
    assert source.head == TEXT[: 64 << 10] and source.file == packed


def test_each_zip_member_is_a_separate_source(tmp_path: Path) -> None:
    path = tmp_path / "traces.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rank0.json", TEXT)
        archive.writestr("sub/rank1.json.gz", gzip.compress(TEXT))
    sources = list(open_sources(path))
    assert [source.path.name for source in sources] == ["traces.zip:rank0.json", "rank1.json.gz"]
    assert [b"".join(source.blocks()) for source in sources] == [TEXT, TEXT]
    assert {source.file for source in sources} == {path}


def test_a_damaged_gzip_is_read_up_to_the_damage(tmp_path: Path) -> None:
    packed = gzip.compress(TEXT)
    cut, broken = tmp_path / "cut.gz", tmp_path / "broken.gz"
    cut.write_bytes(packed[: len(packed) // 2])
    data, damage = whole(cut)
    assert 0 < len(data) < len(TEXT) and TEXT.startswith(data)
    assert damage == f"cut off after {len(data):,} bytes"
    broken.write_bytes(packed[:40] + b"\xff" * 40 + packed[80:])
    data, damage = whole(broken)
    assert damage.startswith("damaged after ")


def test_a_damaged_zip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    path.write_bytes(b"PK\x03\x04" + b"\0" * 40)
    with pytest.raises(UsageError, match=r"damaged zip"):
        list(open_sources(path))


def test_a_gzip_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"\0" * (80 << 20), 9))
    (source,) = open_sources(path)
    out = 0
    with pytest.raises(UsageError, match="unpacks to more than 250 times its size"):
        for block in source.blocks():
            out += len(block)
    assert out <= (64 << 20) + (4 << 20)


def test_an_empty_file_is_an_empty_source(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.write_bytes(b"")
    assert whole(path) == (b"", "")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_utf_16_text_of_powershell_is_read_as_utf_8(
    tmp_path: Path, encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    text = "timestamp, utilization.gpu [%]\r\n" + "2026/08/01 03:59:40.361, 100 %, µs\r\n" * 9
    path = tmp_path / "gpu.csv"
    path.write_bytes(pack(f"\ufeff{text}".encode(encoding)))
    (source,) = open_sources(path)
    assert source.head == text.encode()
    # blocks of 7 bytes end within a character
    assert b"".join(source.blocks(7)) == text.encode()


def test_bytes_that_only_begin_like_utf_16_are_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    for data in (b"\xff\xfe epoch 1\n", b"\xff\xfe\0\0a\0\0\0", b"\xff\xfe", b"\xff"):
        path.write_bytes(data)
        (source,) = open_sources(path)
        assert source.head == data


def test_a_text_sample_is_bounded_and_covers_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    lines = b"".join(b"%07d\n" % number for number in range(1 << 20))  # 8 MiB
    path.write_bytes(lines)
    (source,) = open_sources(path)
    sample = source.sample_text()
    assert len(sample) <= (4 << 20) + 64  # a line end between two windows
    assert sample.startswith(lines[:800]) and sample.endswith(lines[-800:])
    sampled = {int(line) for line in sample.split() if len(line) == 7}
    eighth = len(lines) // 8 // 8
    assert {number // eighth for number in sampled} == set(range(8))
    path.write_bytes(lines[:8000] + b"\x00")
    (binary,) = open_sources(path)
    assert binary.sample_text() == b""
