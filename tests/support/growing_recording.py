"""A recording that grows second by second, for the live view."""

from __future__ import annotations

from pathlib import Path

from clusterprof.trace.schema import Clock, Event
from clusterprof.trace.writer import RecordingWriter
from tests.support.recordings import SECOND, Script, _make_header, iterate_seconds

# 20 steps of 1 s without a wait, then 20 that wait for 0.4 s, half of it for the disk.
STEPS = [(0.0, 1.0)] * 20 + [(0.4, 0.6)] * 20
WINDOW_NS = 10 * SECOND


class GrowingRecording:
    """A recording that is written up to a given time."""

    def __init__(self, script: Script, folder: Path, ahead_ns: int = 0) -> None:
        """ahead_ns: how far the wall clock is ahead of the time of the script."""
        self._seconds = list(enumerate(iterate_seconds(script)))
        self._now_ns, self._ahead_ns = 0, ahead_ns
        self._writer = RecordingWriter(
            folder, _make_header(script, folder.name), self._clock, keep_free_bytes=0
        )

    def _clock(self) -> Clock:
        return Clock(self._now_ns, self._now_ns, self._now_ns + self._ahead_ns)

    def write_until(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] < second:
            number, records = self._seconds.pop(0)
            self._now_ns = number * SECOND
            self._writer.append(*records)

    def report_full_disk(self) -> None:
        self._writer.append(Event(self._now_ns, "disk-full", {"message": "no space"}))

    def stop(self) -> None:
        event = Event(self._now_ns, "recorder-stopped", {"reason": "the duration is over"})
        self._writer.append(event, self._clock())
        self._writer.close()
