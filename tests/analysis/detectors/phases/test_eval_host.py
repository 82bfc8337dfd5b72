"""Evaluation and logging: marked, or derived from where the main thread was blocked."""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.analysis.detectors.base import Claims, limit_to_lost_time
from clusterprof.analysis.detectors.phases.eval_host import EvalHost
from clusterprof.analysis.timeline.model import (
    PHASE_COMPUTE,
    PHASE_DATA_WAIT,
    PHASE_EVAL,
    ProcessIo,
)
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
    ns,
    parse_activity,
)
from tests.support.data_waits import make_breakdown

KIB, MIB = 1 << 10, 1 << 20


def claim(
    doing: str, *pieces: tuple[float, float, float, int], wrote: ProcessIo | None = None, marks=None
) -> Claims:
    rows = parse_activity(doing)
    end = rows[-1][1] / 1e9
    main = make_process(100, spans=marks, thread=make_thread(rows, end), io=wrote)
    fed = make_breakdown(*({} for _ in pieces))
    got = EvalHost().claim(
        make_rank(end, main), make_lost_segments(*pieces, source=2, step=3), fed, EvalHost.Limits()
    )
    assert got is not None
    return got


def evidence(got: Claims) -> dict[str, float]:
    return {item.name: item.value for item in got.evidence}


def test_marked_evaluation_is_claimed_whole() -> None:
    marks = {layout.EVAL: make_spans((1, 2), (5, 5.5))}
    got = claim("U6", (1, 2, 0.4, PHASE_EVAL), (3, 4, 0.4, PHASE_COMPUTE), marks=marks)
    np.testing.assert_array_equal(got.share, [1.0, 0.0])
    assert (got.grade, evidence(got)) == ("A", {"eval.mean_ns": ns(0.75)})


def test_a_main_thread_blocked_in_a_journal_is_logging() -> None:
    # [0, 1): blocked for 0.5 s, 0.3 s of the device lost: all of it. [1, 2): 0.2 of 0.4.
    # [2, 3): on the CPU. The same sleep in a wait for data is that wait's.
    pieces = (
        (0, 1, 0.3, PHASE_COMPUTE),
        (1, 2, 0.4, PHASE_COMPUTE),
        (2, 3, 0.4, PHASE_COMPUTE),
        (3, 4, 1.0, PHASE_DATA_WAIT),
    )
    wrote = make_io_samples([0, 1, 2, 3, 4], write_chars=[0, 4 * KIB, 8 * KIB, 8 * KIB, 8 * KIB])
    got = claim("U0.5 F0.5 U0.8 F0.2 U1 F1", *pieces, wrote=wrote)
    np.testing.assert_allclose(got.share, [1.0, 0.5, 0.0, 0.0])
    assert got.grade == "B"
    assert evidence(got)["process.write_chars_total"] == 8 * KIB


def test_synchronous_buffer_writes_are_logging(monkeypatch) -> None:
    # a file system without a journal writes its buffers itself: 0.5 s of the device's 0.5
    monkeypatch.setattr("tests.support.builders.WCHAN_NAMES", ("0",) * 8 + ("__sync_dirty_buffer",))
    got = claim("U0.5 F0.5", (0, 1, 0.5, PHASE_COMPUTE))
    np.testing.assert_allclose(got.share, [1.0])


@pytest.mark.parametrize("wrote", [None, make_io_samples([0, 1], write_chars=[7, 7])])
def test_journal_sleep_without_written_bytes_has_a_low_grade(wrote) -> None:
    got = claim("U0.5 F0.5", (0, 1, 0.5, PHASE_COMPUTE), wrote=wrote)
    np.testing.assert_allclose(got.share, [1.0])
    assert got.grade == "C"


@pytest.mark.parametrize(("written", "share"), [(16 * MIB - 1, 0.5), (16 * MIB, 0.0)])
def test_a_large_unmarked_write_is_not_logging(written, share) -> None:
    # blocked for 1 s of the 2 lost; what is no log is a checkpoint (test_checkpoint_writes)
    column = [0, 0, written, written]
    wrote = make_io_samples(
        [0, 1, 2, 3], write_chars=column, write_bytes=column, read_bytes=[0, 0, 0, 0]
    )
    got = claim("U1 F1 U1", (0, 3, 2.0, PHASE_COMPUTE), wrote=wrote)
    np.testing.assert_allclose(got.share, [share])


@pytest.mark.parametrize(("read", "share"), [(0, 1.0), (4096, 0.0)])
def test_page_waits_are_writes_only_in_non_reading_processes(read, share) -> None:
    wrote = make_io_samples(
        [0, 1], write_chars=[0, MIB], write_bytes=[0, MIB], read_bytes=[0, read]
    )
    got = claim("U0.5 D0.5", (0, 1, 0.5, PHASE_COMPUTE), wrote=wrote)
    np.testing.assert_allclose(got.share, [share])


FUSE = ("0", "folio_wait_bit_common", *("0",) * 6, "request_wait_answer")
MOUNT = {"point": "/m", "type": "fuse.sshfs", "source": "host:/d"}


@pytest.mark.parametrize(
    ("doing", "read", "written", "share"),
    [
        pytest.param("U0.5 F0.5", 0, KIB, 1.0, id="writes"),
        pytest.param("U0.5 F0.5", 64 * KIB, 2 * KIB, 1.0, id="as much of sockets"),
        pytest.param("U0.5 F0.5", 67 * KIB, 2 * KIB, 0.0, id="reads more"),
        pytest.param("U0.5 F0.5", 0, 0, 0.0, id="writes nothing"),
        pytest.param("U0.5 D0.3 F0.2", KIB, KIB, 0.0, id="waits for pages of the mount"),
    ],
)
def test_user_space_mount_requests_are_classified_by_bytes(
    doing, read, written, share, monkeypatch
) -> None:
    monkeypatch.setattr("tests.support.builders.WCHAN_NAMES", FUSE)
    column = {"read_chars": [0, read], "write_chars": [0, written]}
    wrote = make_io_samples([0, 1], read_bytes=[0, 0], write_bytes=[0, 0], **column)
    series = {
        ("disk.read_bytes_total", "sda"): make_counter([0, 1], [0, 0]),
        ("disk.busy_ns_total", "sda"): make_counter([0, 1], [0, 0]),
    }
    rows = parse_activity(doing)
    main = make_process(100, thread=make_thread(rows, 1), io=wrote)
    timeline = make_rank(1, main, series=series, node=make_header(mounts=[MOUNT]))
    pieces = make_lost_segments((0, 1, 0.5, PHASE_COMPUTE), source=2, step=3)
    got = EvalHost().claim(timeline, pieces, make_breakdown({}), EvalHost.Limits())
    assert got is not None
    np.testing.assert_allclose(got.share, [share])


@pytest.mark.parametrize("doing", ["U0.5 S0.5", "U0.5 L0.5", "U0.5 W0.5", "U0.5 I0.5"])
def test_sleep_in_other_places_is_not_logging(doing) -> None:
    wrote = make_io_samples([0, 1], write_chars=[0, MIB], write_bytes=[0, MIB], read_bytes=[0, 0])
    np.testing.assert_array_equal(claim(doing, (0, 1, 0.5, PHASE_COMPUTE), wrote=wrote).share, [0])


def test_marked_device_waits_are_not_counted_as_sleep() -> None:
    # 2 s, 1.2 of them marked waits for the device: of 6 samples asleep elsewhere 5 are in a
    # journal, of 0.6 s asleep and 0.2 s in the kernel 5 / 6 are writing: 2/3 s of 0.8 lost
    wrote = make_io_samples([0, 1, 2], write_chars=[0, MIB, MIB])
    marks = {layout.SYNC: make_spans((0.2, 1.4, layout.WHOLE_NS, 1))}
    doing = "K0.2 L1.2 S0.1 F0.5"
    got = claim(doing, (0, 2, 0.8, PHASE_COMPUTE), wrote=wrote, marks=marks)
    np.testing.assert_allclose(got.share, [2 / 3 / 0.8])


def test_excess_claims_move_to_other_pieces_of_the_same_second() -> None:
    rows = make_lost_segments(
        (0.1, 0.3, 0.03, 7), (0.3, 0.5, 0.03, 7), (0.5, 0.7, 0.04, 7), (1.1, 1.3, 0.1, 7)
    )
    whole = np.ones(4, np.bool_)
    amounts = np.array([0.06, 0.02, 0.0, 0.01]) * 1e9
    # 0.03 s too many in the first, room for 0.01 and 0.04: three fifths of both
    result = np.array([0.03, 0.026, 0.024, 0.01]) * 1e9
    np.testing.assert_allclose(limit_to_lost_time(amounts, rows, whole), result)
    chosen = np.array([True, True, False, True])
    result = np.array([0.03, 0.03, 0.0, 0.01]) * 1e9  # room for 0.01 only: the rest has no place
    np.testing.assert_allclose(limit_to_lost_time(amounts, rows, chosen), result)
    amounts = np.array([0.02, 0.01, 0.01, 0.3]) * 1e9  # enough room, and far too little
    result = np.array([0.02, 0.01, 0.01, 0.1]) * 1e9
    np.testing.assert_allclose(limit_to_lost_time(amounts, rows, whole), result)
