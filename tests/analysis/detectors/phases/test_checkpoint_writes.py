"""Blocked writes of the main thread: those of a save, of a log, and of neither."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from clusterprof.analysis.detectors.base import Claims
from clusterprof.analysis.detectors.phases.blocked_files import estimate_read_shares
from clusterprof.analysis.detectors.phases.checkpoint import Checkpoint
from clusterprof.analysis.detectors.phases.eval_host import EvalHost
from clusterprof.analysis.timeline.model import PHASE_CHECKPOINT, PHASE_COMPUTE, ProcessIo
from clusterprof.analysis.timeline.spans import SpanTable
from clusterprof.probe import layout
from tests.support.builders import (
    make_counter,
    make_header,
    make_io_samples,
    make_lost_segments,
    make_process,
    make_rank,
    make_spans,
    make_thread,
    parse_activity,
)
from tests.support.data_waits import make_breakdown

KIB, MIB = 1 << 10, 1 << 20
Piece = tuple[float, float, float, int]


def claim(
    doing: str,
    *pieces: Piece,
    wrote: ProcessIo | None = None,
    marks: Mapping[int, SpanTable] | None = None,
) -> tuple[Claims, Claims]:
    """What `checkpoint` and `eval-host` claim of a rank whose main thread does something."""
    rows = parse_activity(doing)
    end = rows[-1][1] / 1e9
    main = make_process(100, spans=marks, thread=make_thread(rows, end), io=wrote)
    timeline, pieces_ns = make_rank(end, main), make_lost_segments(*pieces, source=2, step=3)
    fed = make_breakdown(*({} for _ in pieces))
    saved, logged = (
        detector.claim(timeline, pieces_ns, fed, detector.Limits())
        for detector in (Checkpoint(), EvalHost())
    )
    assert saved is not None and logged is not None
    return saved, logged


def written(*columns: int, read: int = 0) -> ProcessIo:
    """Readings once a second of what the process wrote so far, and of what it read in each."""
    return make_io_samples(
        range(len(columns)),
        write_chars=columns,
        write_bytes=columns,
        read_bytes=[read * second for second in range(len(columns))],
    )


@pytest.mark.parametrize(
    ("begins_s", "shares"),
    [
        (1.0, (1.0, 0.0)),
        (1.3, (1.0, 0.0)),  # 0.3 s after the save's end: still its own
        (1.4, (0.0, 1.0)),  # a line of a log
    ],
)
def test_a_write_right_after_a_save_belongs_to_the_save(
    begins_s: float, shares: tuple[float, float]
) -> None:
    # the save's span is [0.5, 1); then the main thread is blocked for 0.5 s, in all of which the
    # device idles. A few kB are written in each second.
    pieces = ((0.5, 1, 0.5, PHASE_CHECKPOINT), (1, 2, 0.5, PHASE_COMPUTE))
    doing = f"U{begins_s} F0.5 U{1.5 - begins_s + 1:.1f}"
    marks = {layout.CHECKPOINT: make_spans((0.5, 1, -1))}
    saved, logged = claim(doing, *pieces, wrote=written(0, 4 * KIB, 8 * KIB, 8 * KIB), marks=marks)
    np.testing.assert_allclose(saved.share, [1.0, shares[0]])
    np.testing.assert_allclose(logged.share, [0.0, shares[1]])
    assert saved.grade == "A"  # the span has as much as the write after it


def test_a_save_with_a_span_needs_no_written_bytes() -> None:
    # fsync in the pages of the file: 0.9 s after a span that has 0.1 s
    pieces = ((0.9, 1, 0.1, PHASE_CHECKPOINT), (1, 2, 0.9, PHASE_COMPUTE))
    marks = {layout.CHECKPOINT: make_spans((0.9, 1, -1))}
    saved, logged = claim("U1 D0.9 U0.1", *pieces, marks=marks)
    np.testing.assert_allclose(saved.share, [1.0, 1.0])
    np.testing.assert_array_equal(logged.share, [0.0, 0.0])
    assert saved.grade == "B"
    values = {item.name: item.value for item in saved.evidence}
    assert values["thread.writing_ratio"] == pytest.approx(1.0)
    assert values["checkpoint.mean_ns"] == pytest.approx(1e9)  # not the 0.1 s of its span


@pytest.mark.parametrize("letter", ["F", "D"])  # in the journal, or in pages that are written
@pytest.mark.parametrize(("bytes_", "is_save"), [(16 * MIB - 1, False), (16 * MIB, True)])
def test_a_model_sized_write_without_a_span_is_a_save(
    letter: str, bytes_: int, is_save: bool
) -> None:
    # blocked for 1 s of 3, in which the device lost 2 s: half of it
    piece = (0, 3, 2.0, PHASE_COMPUTE)
    saved, logged = claim(f"U1 {letter}1 U1", piece, wrote=written(0, 0, bytes_, bytes_))
    np.testing.assert_allclose(saved.share, [0.5 if is_save else 0.0])
    np.testing.assert_allclose(logged.share, [0.0 if is_save else 0.5])
    assert (saved.grade, logged.grade) == (("B", "A") if is_save else ("A", "B"))


@pytest.mark.parametrize(
    ("blocked_s", "mebibytes", "is_save"),
    [(0.2, 63, False), (0.2, 64, True), (0.3, 15, False), (0.3, 16, True)],
)
def test_a_short_blocked_write_needs_more_bytes_for_a_save(
    blocked_s: float, mebibytes: int, is_save: bool
) -> None:
    piece = (0, 2, blocked_s, PHASE_COMPUTE)
    doing = f"U1 F{blocked_s} U{1 - blocked_s:.1f}"
    saved, logged = claim(doing, piece, wrote=written(0, 0, mebibytes * MIB))
    np.testing.assert_allclose(saved.share, [float(is_save)])
    np.testing.assert_allclose(logged.share, [float(not is_save)])


def test_bytes_shortly_before_a_blocked_write_are_counted() -> None:
    # 64 MiB in [1, 2), the block begins at 2.2: within 0.3 s; another one at 4.5 is a log
    wrote = written(0, 0, 64 * MIB, 64 * MIB + 1, 64 * MIB + 1, 64 * MIB + 2, 64 * MIB + 2)
    pieces = ((2, 3, 0.4, PHASE_COMPUTE), (4, 5, 0.4, PHASE_COMPUTE))
    saved, logged = claim("U2.2 F0.4 U1.9 F0.4 U1.1", *pieces, wrote=wrote)
    np.testing.assert_allclose(saved.share, [1.0, 0.0])
    np.testing.assert_allclose(logged.share, [0.0, 1.0])


def test_page_waits_of_a_reading_process_are_no_writes() -> None:
    piece = (0, 3, 2.0, PHASE_COMPUTE)
    wrote = written(0, 0, 64 * MIB, 64 * MIB, read=4 * KIB)
    saved, logged = claim("U1 D1 U1", piece, wrote=wrote)
    np.testing.assert_array_equal(saved.share, [0.0])
    np.testing.assert_array_equal(logged.share, [0.0])


def test_page_waits_with_unknown_bytes_are_no_writes() -> None:
    saved, logged = claim("U1 D1 U1", (0, 3, 2.0, PHASE_COMPUTE))
    np.testing.assert_array_equal(saved.share, [0.0])
    np.testing.assert_array_equal(logged.share, [0.0])


def read_shares(
    doing: str, *pieces: Piece, io_: ProcessIo | None = None, busy_s: float = 0, mounts: tuple = ()
) -> list[list[float]]:
    rows = parse_activity(doing)
    end = rows[-1][1] / 1e9
    main = make_process(100, thread=make_thread(rows, end), io=io_)
    series = {
        ("disk.busy_ns_total", "vda"): make_counter([0, end], [0, busy_s * 1e9]),
        ("disk.read_bytes_total", "vda"): make_counter([0, end], [0, busy_s * 64 * MIB]),
    }
    timeline = make_rank(
        end, main, series=series if mounts else None, node=make_header(mounts=list(mounts))
    )
    shares = estimate_read_shares(timeline, make_lost_segments(*pieces, source=2, step=3))
    return [] if shares is None else [share.round(2).tolist() for share in shares]


def test_reads_of_the_training_loop_are_claimed_as_storage() -> None:
    # Of each second 0.6 s blocked in reads of a local disk; the device lost 0.8 s of the first and
    # 0.5 s of the second: it still worked when the second read began, so 0.1 s is the first one's.
    doing = "D0.6 U0.4 D0.6 U0.4"
    pieces = ((0, 1, 0.8, PHASE_COMPUTE), (1, 2, 0.5, PHASE_COMPUTE))
    reads = make_io_samples((0, 1, 2), read_bytes=(0, 64 * MIB, 128 * MIB))
    assert read_shares(doing, *pieces, io_=reads) == [[0.75, 1.0], [0.0, 0.0]]


FUSE = ({"point": "/mnt/data", "type": "fuse"},)
FEW = 400  # characters of a small file


def test_page_waits_with_an_idle_disk_are_mount_reads() -> None:
    # a disk that is idle cannot have delivered the pages; opening the file (N) belongs to it
    pieces = ((0, 1, 0.8, PHASE_COMPUTE), (1, 2, 0.8, PHASE_COMPUTE))
    reads = make_io_samples(
        (0, 1, 2), read_chars=(0, FEW, 2 * FEW), read_bytes=(0, 0, 0), write_bytes=(0, 0, 0)
    )
    doing = "N0.2 D0.6 U0.2 N0.2 D0.6 U0.2"
    local, remote = read_shares(doing, *pieces, io_=reads, mounts=FUSE)
    assert (local, remote) == ([0.0, 0.0], [1.0, 1.0])
    # no mount is there, so nothing says what the pages are of
    assert read_shares(doing, *pieces, io_=reads) == []
    local_disk = ({"point": "/", "type": "ext4"},)
    assert read_shares(doing, *pieces, io_=reads, mounts=local_disk) == []


def test_a_mount_request_without_page_waits_is_not_a_read() -> None:
    piece = (0, 1, 0.8, PHASE_COMPUTE)
    reads = make_io_samples((0, 1), read_chars=(0, FEW), read_bytes=(0, 0), write_bytes=(0, 0))
    assert read_shares("N0.8 U0.2", piece, io_=reads, mounts=FUSE) == []


def test_blocked_writes_are_not_claimed_as_reads() -> None:
    piece = (0, 3, 2.0, PHASE_COMPUTE)
    assert read_shares("U1 F1 U1", piece, io_=written(0, 0, MIB, MIB)) == []
