"""Take a profiler window of a rank that works longer than the others of its node, and of one more.

    rank 0   step 45 ms = 30 ms own work + 15 ms in operations with other ranks    healthy
    rank 1   step 45 ms = 44 ms own work +  1 ms in operations                     stands out

All ranks of a job end a step together, so a late rank does not have longer steps: it waits less.
Its own work is compared with the median of the others every few seconds. If the same rank stands
out for minutes, the probe of it and of the other rank nearest to that median is asked for a window
of PyTorch's profiler (`probe.dive`), at most once an hour.

Events: `dive-begun`, then `dive-finished` with what each probe answered. The traces are compressed
into the folder `dives` of the node's recording, a mebibyte at every flush: nothing here waits.
"""

from __future__ import annotations

import contextlib
import os
import stat
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

from clusterprof.agent.launch.election import read_small_json, write_private_file
from clusterprof.agent.processes.registry import MIN_FREE_BYTES, parse_registration
from clusterprof.agent.processes.span_rings import RankProgress, SpanRings
from clusterprof.trace.schema import Event, Record

FOLDER = "dives"
_WANTED = "wanted"
MIN_RATIO, MIN_STEP_SHARE = 1.2, 0.05
"""Own work over the median of the others, and its excess over the step, from which on a rank stands
out."""
WINDOWS = 8
"""Comparisons in a row, at least about, in which a rank stands out before it is profiled."""
MAX_WINDOW_NS = 30_000_000_000
INTERVAL_NS = 3_600_000_000_000
"""Least time between two dives, ns."""
MAX_DIVES = 20
"""Per recording: two traces of some megabytes each."""
PATIENCE_NS = 300_000_000_000
"""Time for which the answers are awaited, ns: a step may last a minute."""
MAX_TRACE_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_ANSWER_KEYS = ("steps", "begun_ns", "ended_ns", "step_ns", "events", "cost_ns")
_ENDED = "the process ended before its window did"
_NOT_RECORDED = "the recording ended before its window did"


@dataclass(frozen=True, slots=True)
class Straggler:
    """A straggling rank, and a rank to compare it with."""

    pid: int
    healthy_pid: int
    since_ns: int
    own_ns: int
    healthy_own_ns: int
    """Own work per step in the last comparison."""


@dataclass(frozen=True, slots=True)
class _Work:
    pid: int
    own_ns: float
    step_ns: float


class StragglerWatch:
    """Finds the rank that has worked longer than the others for a while."""

    def __init__(self, after_ns: int) -> None:
        """after_ns: for how long a rank must straggle before it counts."""
        self._after_ns = after_ns
        self._window_ns = min(MAX_WINDOW_NS, after_ns // WINDOWS)
        self._begun_ns = 0
        self._before: dict[int, tuple[int, int, int]] = {}
        self._pid = self._since_ns = 0

    def check(self, ranks: Sequence[RankProgress], now_ns: int) -> Straggler | None:
        """Compare the ranks if the window is over; return a rank that straggled for long enough."""
        if self._begun_ns and now_ns - self._begun_ns < self._window_ns:
            return None
        work = [self._measure(rank) for rank in ranks if rank.pid in self._before]
        known_work = [item for item in work if item is not None]
        if len(known_work) < len(work):
            return None  # a rank has ended no step yet: the window goes on
        begun_ns, self._begun_ns = self._begun_ns, now_ns
        self._before = {rank.pid: (rank.steps, rank.step_ns, rank.operation_ns) for rank in ranks}
        culprit = find_straggler(known_work)
        if culprit is None or culprit[0].pid != self._pid:
            self._pid = 0 if culprit is None else culprit[0].pid
            self._since_ns = begun_ns
        if culprit is None or now_ns - self._since_ns < self._after_ns:
            return None
        late, healthy = culprit
        return Straggler(
            late.pid, healthy.pid, self._since_ns, round(late.own_ns), round(healthy.own_ns)
        )

    def _measure(self, rank: RankProgress) -> _Work | None:
        steps, step_ns, operation_ns = self._before[rank.pid]
        steps = rank.steps - steps
        if steps <= 0:
            return None
        step_ns, operation_ns = rank.step_ns - step_ns, rank.operation_ns - operation_ns
        return _Work(rank.pid, max(0, step_ns - operation_ns) / steps, step_ns / steps)


def find_straggler(work: Sequence[_Work]) -> tuple[_Work, _Work] | None:
    """Find the rank that works longest, and the one nearest to the median of the others.

    None if it does not work longer than them by enough.
    """
    if len(work) < 2:
        return None
    late = max(work, key=lambda item: (item.own_ns, -item.pid))
    peers = [item for item in work if item is not late]
    usual_ns = median(item.own_ns for item in peers)
    excess_ns = late.own_ns - usual_ns
    if late.own_ns < MIN_RATIO * usual_ns or excess_ns < MIN_STEP_SHARE * late.step_ns:
        return None
    return late, min(peers, key=lambda item: (abs(item.own_ns - usual_ns), item.pid))


class Dives:
    """A source: it watches the ranks, and asks for windows."""

    def __init__(self, run_dir: Path, folder: Path, rings: SpanRings, after_ns: int) -> None:
        """folder: of the node's recording. after_ns: for how long a rank stands out before."""
        self._run_dir, self._folder, self._rings = run_dir, folder, rings
        self._watch = StragglerWatch(after_ns)
        self._begun_ns = self._dives = 0
        self._dive: _Dive | None = None
        rings.measures_work = True

    def finish(self, now_ns: int) -> list[Record]:
        """Return what there is of a dive that is under way."""
        if self._dive is None:
            return []
        dive, self._dive = self._dive, None
        dive.poll(now_ns, {rank.pid for rank in self._rings.list_progress()})
        return [Event(now_ns, "dive-finished", dive.finish(_NOT_RECORDED))]

    def take(self, now_ns: int) -> list[Record]:
        """Return the events since the last call."""
        ranks = self._rings.list_progress()
        if self._dive is not None:
            if not self._dive.poll(now_ns, {rank.pid for rank in ranks}):
                return []
            dive, self._dive = self._dive, None
            return [Event(now_ns, "dive-finished", dive.finish())]
        straggler = self._watch.check(ranks, now_ns)
        is_early = bool(self._begun_ns) and now_ns - self._begun_ns < INTERVAL_NS
        if straggler is None or is_early or self._dives >= MAX_DIVES:
            return []
        self._begun_ns = now_ns
        self._dives += 1
        self._dive = _Dive(self._run_dir, self._folder, straggler, self._dives, now_ns)
        return [Event(now_ns, "dive-begun", describe_straggler(straggler))]


def describe_straggler(straggler: Straggler) -> dict[str, Any]:
    """Describe a straggler as attributes of an event."""
    return {
        "pid": straggler.pid,
        "healthy_pid": straggler.healthy_pid,
        "since_ns": straggler.since_ns,
        "own_ns": straggler.own_ns,
        "healthy_own_ns": straggler.healthy_own_ns,
    }


class _Dive:
    """The two windows of a dive."""

    def __init__(
        self, run_dir: Path, folder: Path, straggler: Straggler, number: int, now_ns: int
    ) -> None:
        self._straggler, self._end_ns = straggler, now_ns + PATIENCE_NS
        self._wanted = run_dir / FOLDER / _WANTED
        pids = straggler.pid, straggler.healthy_pid
        self._windows = [_WindowFiles(run_dir, folder, pid, number) for pid in pids]
        (run_dir / FOLDER).mkdir(mode=0o700, exist_ok=True)
        for window in self._windows:
            window.discard()
        write_private_file(self._wanted, " ".join(map(str, pids)).encode())

    def poll(self, now_ns: int, alive: set[int]) -> bool:
        """Take what has arrived; return whether nothing more is awaited."""
        for window in self._windows:
            window.poll(window.pid in alive)
        return now_ns >= self._end_ns or all(window.is_over for window in self._windows)

    def finish(self, reason: str = "it did not answer in time") -> dict[str, Any]:
        """Return the attributes of the event, and ask for no more windows.

        reason: why those windows are missing that are still awaited.
        """
        with contextlib.suppress(OSError):
            os.unlink(self._wanted)
        windows = [window.finish(reason) for window in self._windows]
        return {**describe_straggler(self._straggler), "windows": windows}


class _WindowFiles:
    """The answer of one process, and its trace on the way into the recording."""

    def __init__(self, run_dir: Path, folder: Path, pid: int, number: int) -> None:
        self.pid, self.is_over = pid, False
        self._answer: dict[str, Any] = {"pid": pid, "rank": -1, "file": "", "reason": ""}
        self._done, self._trace = (run_dir / FOLDER / f"{pid}.{end}" for end in ("done", "json"))
        registration = read_small_json(str(run_dir / "register" / f"{pid}.json")) or {}
        rank = (parse_registration(registration) or {}).get("rank")
        self._answer["rank"] = -1 if rank is None else rank
        self._folder, self._name = folder, f"{number}-rank-{self._answer['rank']}-{pid}.json.gz"
        self._source: BinaryIO | None = None
        self._target: BinaryIO | None = None
        self._packer = zlib.compressobj(1, wbits=31)  # gzip

    def discard(self) -> None:
        """Remove what an earlier dive has left in the run directory."""
        for path in (self._done, self._trace):
            with contextlib.suppress(OSError):
                os.unlink(path)

    def poll(self, is_alive: bool) -> None:
        """Read the answer when it is there, and move a part of the trace."""
        if self.is_over:
            return
        if self._source is not None:
            self._move_chunk()
        elif self._done.exists():
            self._begin()
        elif not is_alive:
            self._end(_ENDED)

    def finish(self, reason: str) -> dict[str, Any]:
        """Move the rest of the trace, and return what is known of the window."""
        if not self.is_over and self._source is None and self._done.exists():
            self._begin()
        while not self.is_over and self._source is not None:
            self._move_chunk()
        if not self.is_over:
            self._end(reason)
        self.discard()
        return self._answer

    def _begin(self) -> None:
        answer = read_small_json(str(self._done)) or {}
        numbers = {key: answer.get(key) for key in _ANSWER_KEYS}
        self._answer |= {key: value for key, value in numbers.items() if type(value) is int}
        reason = str(answer.get("reason") or "")[:300]
        if reason or len(self._answer) < 4 + len(_ANSWER_KEYS):
            self._end(reason or "its answer could not be read")
            return
        try:
            self._open()
        except OSError as error:
            self._end(f"its trace could not be kept: {error.strerror or error}")

    def _open(self) -> None:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._source = open(os.open(self._trace, flags), "rb")  # noqa: SIM115 - closed at its end
        status = os.fstat(self._source.fileno())
        stats = os.statvfs(self._folder)
        is_plain = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not is_plain or status.st_size > MAX_TRACE_BYTES:
            self._end(f"its trace of {status.st_size} bytes was not kept")
        elif stats.f_bavail * stats.f_frsize < MIN_FREE_BYTES:
            self._end("its trace was not kept: too little disk space is free")
        else:
            mode = stat.S_IMODE(os.stat(self._folder).st_mode)
            (self._folder / FOLDER).mkdir(mode=mode, exist_ok=True)
            path = self._folder / FOLDER / self._name
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            self._target = open(os.open(path, flags, mode & 0o666), "wb")  # noqa: SIM115

    def _move_chunk(self) -> None:
        assert self._source is not None and self._target is not None
        try:
            data = self._source.read(_CHUNK_BYTES)
            self._target.write(self._packer.compress(data) if data else self._packer.flush())
        except OSError as error:
            self._end(f"its trace could not be kept: {error.strerror or error}")
            return
        if not data:
            self._answer["file"] = self._name
            self._end("")

    def _end(self, reason: str) -> None:
        self.is_over = True
        self._answer["reason"] = reason
        for file in (self._source, self._target):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        self._source = self._target = None
