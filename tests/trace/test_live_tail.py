"""Following a recording that grows: what came is read, once, and nothing that was before."""

from __future__ import annotations

import os
import shutil
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from clusterprof.trace.live_tail import NodeTail, iterate_events
from clusterprof.trace.schema import Clock, Columns, Event, Spans
from clusterprof.trace.segments import format_segment_name
from clusterprof.trace.writer import RecordingWriter
from tests.support.builders import make_header

SECOND = 1_000_000_000
KEEP_NS = 10 * SECOND
WIDTH = 50


class Recorder:
    """Writes a second at a time, as a recorder does; people's clocks are 1,000 s ahead."""

    def __init__(self, folder: Path, segment_s: int = 600) -> None:
        self.second, self.folder = 0, folder
        self._writer = RecordingWriter(
            folder, make_header(), self._clock, segment_ns=segment_s * SECOND, keep_free_bytes=0
        )
        self._writer.append(Event(0, "process-registered", {"pid": 7, "started_ticks": 1}))

    def _clock(self) -> Clock:
        now_ns = self.second * SECOND
        return Clock(now_ns, now_ns, now_ns + 1000 * SECOND)

    def record(self, seconds: int, *more: Event) -> None:
        for _ in range(seconds):
            self.second += 1
            at = self.second * SECOND
            names = [f"signal{n}" for n in range(WIDTH)]
            values = [array("q", [self.second * (n + 1)]) for n in range(WIDTH)]
            samples = Columns("some", names, [""] * WIDTH, array("q", [at]), values, [None] * WIDTH)
            self._writer.append(samples, _span(at))
        if more:
            self._writer.append(*more)

    def stop(self) -> None:
        at = self.second * SECOND
        self._writer.append(Event(at, "recorder-stopped", {"reason": "enough"}), self._clock())
        self._writer.close()


def _span(at: int) -> Spans:
    row = {"start_ns": at - 5, "end_ns": at - 1, "kind": 1, "a": 0, "b": 0, "c": 0, "d": 0}
    return Spans(7, 1, at // SECOND, 0, {}, {name: array("q", [v]) for name, v in row.items()})


def sampled(tail: NodeTail, since_ns: int = 0) -> list[int]:
    """The seconds of which samples are there."""
    records = [value for batch in tail.records(since_ns) for value in batch]
    return [int(record.t_ns[0]) // SECOND for record in records if isinstance(record, Columns)]


def kinds(tail: NodeTail) -> list[str]:
    return [
        record.kind for batch in tail.records(0) for record in batch if isinstance(record, Event)
    ]


def read_bytes() -> int:
    """What this process has read so far, from files and everywhere."""
    text = Path("/proc/self/io").read_text(encoding="ascii")
    return int(text.split("rchar: ")[1].split()[0])


def test_the_tail_keeps_recent_records_and_reads_only_new_bytes(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "n")
    recorder.record(30)
    tail = NodeTail(tmp_path / "n")
    assert tail.poll(KEEP_NS)
    assert sampled(tail) == list(range(20, 31))
    assert sampled(tail, 28 * SECOND) == [28, 29, 30]
    assert not tail.poll(KEEP_NS)
    recorder.record(2)
    assert tail.poll(KEEP_NS)
    assert sampled(tail) == list(range(22, 33))
    assert tail.realtime_ns() == 1032 * SECOND
    assert kinds(tail) == ["process-registered"], (
        "who it was is known, however long ago it was said"
    )


def test_poll_cost_does_not_grow_with_the_recording(tmp_path: Path) -> None:
    costs = []
    for before in (20, 300):
        recorder = Recorder(tmp_path / f"n{before}")
        recorder.record(before)
        tail = NodeTail(tmp_path / f"n{before}")
        tail.poll(KEEP_NS)
        recorder.record(2)
        began = read_bytes()
        tail.poll(KEEP_NS)
        costs.append(read_bytes() - began)
    assert costs[1] < 2 * costs[0], costs


def test_the_tail_follows_new_segments_after_old_segments_are_deleted(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "n", segment_s=5)
    recorder.record(12)
    tail = NodeTail(tmp_path / "n")
    tail.poll(KEEP_NS)
    assert len(list((tmp_path / "n").iterdir())) > 2
    assert kinds(tail) == ["process-registered"], "found in the first segment"
    (tmp_path / "n" / format_segment_name(1)).unlink()
    recorder.record(11)
    tail.poll(KEEP_NS)
    assert sampled(tail) == list(range(13, 24))
    assert kinds(tail) == ["process-registered"]
    assert tail.state == "recording"


def test_a_registration_in_the_middle_of_the_file_is_found(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "n", segment_s=5)
    recorder.record(8)
    late = {"pid": 9, "started_ticks": 2, "role": "python"}
    recorder.record(1, Event(9 * SECOND, "process-registered", late))
    recorder.record(20)
    shutil.rmtree(tmp_path / "m", ignore_errors=True)
    assert [
        e.attributes["pid"] for e in iterate_events(tmp_path / "n" / format_segment_name(1))
    ] == [7]
    tail = NodeTail(tmp_path / "n")
    tail._persistent.add_processes(
        Spans(9, 2, 0, 0, {}, {})
    )  # it marks spans, and nobody knows who it is
    tail.poll(KEEP_NS)
    events = [e for batch in tail.records(20 * SECOND) for e in batch if isinstance(e, Event)]
    assert sorted(e.attributes["pid"] for e in events) == [7, 9]
    assert {e.t_ns for e in events} == {20 * SECOND}


def test_the_tail_reports_an_ended_recording_and_a_deleted_folder(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "n")
    recorder.record(3)
    tail = NodeTail(tmp_path / "n")
    tail.poll(KEEP_NS)
    assert (tail.state, tail.why_ended) == ("recording", "")
    recorder.stop()
    tail.poll(KEEP_NS)
    assert (tail.state, tail.why_ended) == ("ended", "enough")
    shutil.rmtree(tmp_path / "n")
    assert not tail.poll(KEEP_NS)
    assert tail.state == "gone"
    assert sampled(tail) == [1, 2, 3], "what was read stays"


def _frames(path: Path) -> Sequence[int]:
    data, at, starts = path.read_bytes(), 0, []
    while (at := data.find(b"CPF\x01", at)) >= 0:
        starts.append(at)
        at += 4
    return starts


@pytest.mark.parametrize("bytes_there", [1, 10, 17, 100])
def test_an_incomplete_frame_is_read_once_complete(tmp_path: Path, bytes_there: int) -> None:
    recorder = Recorder(tmp_path / "n")
    recorder.record(5)
    whole = (tmp_path / "n" / format_segment_name(1)).read_bytes()
    cut = _frames(tmp_path / "n" / format_segment_name(1))[-2] + bytes_there
    growing = tmp_path / "m" / format_segment_name(1)
    growing.parent.mkdir()
    growing.write_bytes(whole[:cut])
    tail = NodeTail(tmp_path / "m")
    tail.poll(KEEP_NS)
    assert sampled(tail) == [1, 2, 3, 4]
    growing.write_bytes(whole)
    tail.poll(KEEP_NS)
    assert (sampled(tail), tail.damaged_bytes) == ([1, 2, 3, 4, 5], 0)


def test_damaged_bytes_are_skipped_and_counted(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "n")
    recorder.record(3)
    path = tmp_path / "n" / format_segment_name(1)
    tail = NodeTail(tmp_path / "n")
    tail.poll(KEEP_NS)
    with path.open("ab") as file:
        file.write(b"CPF\x01" + b"\xff" * 96)  # a frame that will never end
    tail.poll(KEEP_NS)
    recorder.record(2)
    tail.poll(KEEP_NS)
    assert (sampled(tail), tail.damaged_bytes) == ([1, 2, 3, 4, 5], 100)


def test_a_shrunken_file_is_read_from_the_start(tmp_path: Path) -> None:
    for name, seconds in (("long", 9), ("short", 2)):
        Recorder(tmp_path / name).record(seconds)
    tail = NodeTail(tmp_path / "long")
    tail.poll(KEEP_NS)
    os.replace(
        tmp_path / "short" / format_segment_name(1), tmp_path / "long" / format_segment_name(1)
    )
    assert tail.poll(KEEP_NS)
    assert sampled(tail)[-2:] == [1, 2]


# A segment begins with a clock; at 2**62 ns that is no clock at all.
@pytest.mark.parametrize(("far_s", "refused"), [(30 * 86_400, 2), ((1 << 62) // SECOND, 1)])
@pytest.mark.parametrize("is_seen_later", [False, True])
def test_a_record_with_a_far_future_time_is_ignored(
    tmp_path: Path, far_s: int, refused: int, is_seen_later: bool
) -> None:
    recorder = Recorder(tmp_path / "n")
    recorder.record(20)
    tail = NodeTail(tmp_path / "n")
    if is_seen_later:
        tail.poll(KEEP_NS)
    last_s = recorder.second
    recorder.second = far_s - 1
    recorder.record(1)
    recorder.second = last_s
    recorder.record(5)
    assert tail.poll(KEEP_NS)
    assert sampled(tail) == list(range(15, 26))
    assert tail.latest_ns == 25 * SECOND
    assert tail.implausible_records == refused
    recorder.record(1)
    assert tail.poll(KEEP_NS)
    assert sampled(tail) == list(range(16, 27))


def test_a_pipe_and_a_folder_named_as_segments_are_ignored(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "n")
    recorder.record(20)
    os.mkfifo(tmp_path / "n" / format_segment_name(2))
    (tmp_path / "n" / format_segment_name(999_999)).mkdir()
    tail = NodeTail(tmp_path / "n")
    assert tail.poll(KEEP_NS)
    assert sampled(tail) == list(range(10, 21))


def test_records_after_an_hour_long_stop_are_accepted(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "n")
    recorder.record(20)
    tail = NodeTail(tmp_path / "n")
    tail.poll(KEEP_NS)
    recorder.second += 3600
    recorder.record(1)
    tail.poll(KEEP_NS)
    assert tail.latest_ns == 20 * SECOND, "one frame may lie"
    recorder.record(2)
    tail.poll(KEEP_NS)
    assert sampled(tail) == [3621, 3622, 3623]
    assert tail.implausible_records == 0
