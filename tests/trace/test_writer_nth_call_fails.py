"""Fail the N-th call of each kind, N from 1 until a run needs no N-th: never raises, loses nothing.

The technique is SQLite's. The calls are the real ones; only the N-th is refused, after it may have
done half of its work, as a disk that fills up does.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import pytest

from clusterprof.trace.reader import NodeReader
from clusterprof.trace.schema import Columns
from clusterprof.trace.writer import RecordingWriter
from tests.support.builders import is_whole
from tests.support.trace_samples import HEADER, SECOND_NS, ManualClock, make_second

SECONDS = 9
ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EFBIG)


class NthCall:
    """Passes calls on, but refuses those of a given rank."""

    def __init__(self, real: Callable[..., Any], refused: Container[int], error: int) -> None:
        self._real = real
        self._refused = refused
        self._error = error
        self.calls = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls not in self._refused:
            return self._real(*args, **options)
        if self._real is WRITE:
            self._real(args[0], bytes(args[1])[: len(args[1]) // 2])
        raise OSError(self._error, os.strerror(self._error))


WRITE = os.write


def record(node: Path) -> RecordingWriter:
    clock = ManualClock()
    writer = RecordingWriter(
        node, HEADER, clock, segment_bytes=6_000, keep_free_bytes=1, sync_ns=2 * SECOND_NS
    )
    for number in range(SECONDS):
        clock.now_ns += SECOND_NS
        writer.append(*make_second(number))
    clock.now_ns += SECOND_NS
    writer.close()
    return writer


def seconds_in(node: Path) -> list[int]:
    return [
        int(record.t_ns[0]) // SECOND_NS - 10
        for record in NodeReader(node)
        if isinstance(record, Columns) and record.collector == "disk"
    ]


@pytest.mark.parametrize("name", ["write", "ftruncate", "fdatasync", "fstatvfs"])
@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_a_failure_of_any_single_call_loses_no_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: int
) -> None:
    real = getattr(os, name)
    for n in range(1, 200):
        spy = NthCall(real, range(n, n + 1), error)
        monkeypatch.setattr(os, name, spy)
        if name == "ftruncate":  # called after a failed write only
            monkeypatch.setattr(os, "write", NthCall(WRITE, {4, 16}, error))
        writer = record(tmp_path / str(n))
        assert seconds_in(tmp_path / str(n)) == list(range(SECONDS))
        assert writer.frames_dropped == 0
        if spy.calls < n:
            break
    assert n > 1  # the call was made at all, and the run that needed no N-th was reached
    assert n < 199


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_a_temporary_disk_failure_at_any_call_loses_no_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    for n in range(1, 20):
        monkeypatch.setattr(os, "write", NthCall(WRITE, range(n, n + 3), error))
        writer = record(tmp_path / str(n))
        reader = NodeReader(tmp_path / str(n))
        assert sum(1 for _ in reader) > 0
        assert seconds_in(tmp_path / str(n)) == list(range(SECONDS))
        assert writer.trouble == ""
        assert is_whole(reader.damage)
