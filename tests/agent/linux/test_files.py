from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterprof.agent.linux.files import (
    LONG_RECORDS,
    MissingFile,
    OpenFile,
    OpenFolder,
    ParsedFile,
    open_file,
    read_file_once,
)
from clusterprof.errors import Unavailable
from tests.support.opened_collector import pread_as_cgroupfs_does


def test_each_read_returns_the_current_content(tmp_path) -> None:
    path = tmp_path / "stat"
    path.write_bytes(b"one\n")
    held = OpenFile(path)
    assert held.read() == b"one\n"
    path.write_bytes(b"two\n")
    assert held.read() == b"two\n"
    held.close()
    held.close()


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 8191, 8192, 8193, 100_000])
@pytest.mark.parametrize("longest_record", [0, 512, LONG_RECORDS])
def test_files_of_any_size_are_read_completely(tmp_path, size: int, longest_record: int) -> None:
    path = tmp_path / "file"
    content = bytes(n % 251 for n in range(size))
    path.write_bytes(content)
    held = OpenFile(path, longest_record=longest_record)
    assert [held.read() == content for _ in range(3)] == [True] * 3
    path.write_bytes(content + b"more")
    assert held.read() == content + b"more"


def pread_by_records(records: list[bytes], page: int, calls: list[int]):
    """A pread like seq_file's: whole records of one page a call, a longer record alone."""
    content = b"".join(records)

    def pread(fd: int, size: int, offset: int) -> bytes:
        calls.append(offset)
        at, chunk = 0, b""
        for record in records:
            if at >= offset and chunk and len(chunk) + len(record) > page:
                break
            if at + len(record) > offset:
                chunk += record[max(0, offset - at) :]
            at += len(record)
        assert content[offset:].startswith(chunk)
        return chunk[:size]

    return pread


@pytest.mark.parametrize("lengths", [[100] * 400, [100, 9_000, 50, 4_095, 3], [3_584], [40, 40]])
def test_a_file_delivered_record_by_record_is_read_completely(
    monkeypatch, tmp_path, lengths: list[int]
) -> None:
    records = [bytes([65 + n % 26]) * length for n, length in enumerate(lengths)]
    (tmp_path / "mountstats").touch()
    monkeypatch.setattr(os, "pread", pread_by_records(records, 4096, []))
    held = OpenFile(tmp_path / "mountstats", longest_record=LONG_RECORDS)
    assert [held.read() == b"".join(records) for _ in range(3)] == [True] * 3


@pytest.mark.parametrize(
    ("lengths", "offsets"),
    [
        pytest.param([100] * 30, [0], id="room left for a record: one call"),
        pytest.param([100] * 38, [0, 3800], id="a record may have been cut: ask once more"),
        pytest.param([100] * 60, [0, 4000, 6000], id="two pages"),
    ],
)
def test_short_records_need_a_second_read_only_near_page_size(
    monkeypatch, tmp_path, lengths: list[int], offsets: list[int]
) -> None:
    (tmp_path / "diskstats").touch()
    calls: list[int] = []
    monkeypatch.setattr(os, "pread", pread_by_records([b"x" * n for n in lengths], 4096, calls))
    assert len(OpenFile(tmp_path / "diskstats", longest_record=512).read()) == sum(lengths)
    assert calls == offsets


def test_mountinfo_of_this_process_is_read_completely() -> None:
    expected = Path("/proc/self/mountinfo").read_bytes()
    assert OpenFile("/proc/self/mountinfo", longest_record=LONG_RECORDS).read() == expected


def test_a_file_that_returns_is_reopened(tmp_path, monkeypatch) -> None:
    path = tmp_path / "cpu.stat"
    path.write_bytes(b"usage_usec 1\n")
    held = OpenFile(path)
    monkeypatch.setattr(os, "pread", pread_as_cgroupfs_does)
    path.unlink()
    with pytest.raises(Unavailable) as caught:
        held.read()
    assert caught.value == Unavailable("absent", f"{path}: no such file or directory", "")
    path.write_bytes(b"usage_usec 2\n")
    assert held.read() == b"usage_usec 2\n"


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        (errno.ESRCH, "failed", "no such process"),
        (errno.EIO, "failed", "input/output error"),
        (errno.EOPNOTSUPP, "absent", "operation not supported"),
        (errno.EACCES, "denied", "permission denied"),
    ],
)
def test_kernel_errors_are_reported_in_plain_words(
    tmp_path, monkeypatch, code: int, kind: str, message: str
) -> None:
    path = tmp_path / "io"
    path.touch()
    held = OpenFile(path, "boot with psi=1")

    def refuse(fd: int, size: int, offset: int) -> bytes:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pread", refuse)
    with pytest.raises(Unavailable) as caught:
        held.read()
    assert (caught.value.kind, caught.value.message) == (kind, f"{path}: {message}")
    assert (caught.value.remedy == "boot with psi=1") == (kind == "absent")


def test_a_missing_file_keeps_the_reason_without_growing_tracebacks(tmp_path) -> None:
    missing = open_file(tmp_path / "no", "mount it")
    assert isinstance(missing, MissingFile)
    depths = []
    for _ in range(3):
        with pytest.raises(Unavailable) as caught:
            missing.read()
        assert caught.value == Unavailable(
            "absent", f"{tmp_path}/no: no such file or directory", "mount it"
        )
        depths.append(len(caught.traceback))
    assert depths[0] == depths[1] == depths[2]
    missing.close()


def test_descriptors_are_not_inherited_and_not_leaked(
    tmp_path: Path, open_files: Callable[[], int]
) -> None:
    path = tmp_path / "stat"
    path.write_bytes(b"x")
    before = open_files()
    held = OpenFile(path)
    assert os.get_inheritable(held._fd) is False
    read_file_once(path)
    del held
    with pytest.raises(Unavailable):
        OpenFile(tmp_path / "no")
    assert open_files() == before


def test_unchanged_content_is_not_parsed_again(tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_text("1")
    seen: list[bytes] = []

    def parse(data: bytes) -> int:
        seen.append(data)
        return int(data)

    parsed = ParsedFile(OpenFile(path), parse)
    assert [parsed.read(), parsed.read()] == [1, 1]
    path.write_text("two")
    for _ in range(2):  # what has no meaning has none the second time either
        with pytest.raises(ValueError):
            parsed.read()
    path.write_text("1")
    assert parsed.read() == 1
    assert seen == [b"1", b"two", b"two"]
    parsed.close()


def test_a_folder_reports_changes_and_replacement(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    folder = OpenFolder(path)
    assert folder.read_mtime_ns() is None  # there is none yet
    path.mkdir()
    os.utime(path, ns=(5, 5))
    assert folder.read_mtime_ns() == 5
    os.utime(path, ns=(5, 7))
    assert folder.read_mtime_ns() == 7
    path.rmdir()
    assert folder.read_mtime_ns() is None
    path.mkdir()
    os.utime(path, ns=(5, 9))
    assert folder.read_mtime_ns() == 9
    folder.close()
