"""The view of one recorder: a node, its threads, its ticks, and the samples it misses."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from clusterprof.errors import Unavailable
from clusterprof_lab.synth.activity_counters import NAMES, ActivityCodes, Clock, ThreadTrack
from clusterprof_lab.synth.interval_sums import hold_gauge, sum_rates
from clusterprof_lab.synth.story import Node, Rank, Rate, Story, Thread

Int = NDArray[np.int64]
Float = NDArray[np.float64]

UPTIME_NS = 1_000_000_000_000
"""What a clock without offset shows at true time 0."""
TICK_NS = 100_000_000
_OF_TASKS = ("threads", "processes", "sockets")
_HIDDEN = Unavailable(
    "denied",
    "/proc: mounted with hidepid",
    "run as the job's user or as root, or mount /proc without hidepid",
)
_DENIED = Unavailable("denied", "permission denied", "run as root")
OFFSET_NS, DRIFT_RATIO = 50_000_000, 50e-6


@dataclass(frozen=True)
class RecordingQuality:
    """The quality of a recording; by default nothing is lost, late or off."""

    jitter_ns: int = 0
    """Mean by which a tick is late (drawn from an exponential distribution)."""
    clocks: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """By node: offset in ns and drift, from `draw_clocks`; `Truth.clocks` keeps them."""
    lost_samples_ratio: float = 0.0
    """Share of the ticks that were not taken."""
    lost_spans_ratio: float = 0.0
    """Share of the spans that were overwritten before they were read."""
    missing_ranks: tuple[int, ...] = ()
    """Not recorded at all; a node without any other rank has no recording."""
    missing: tuple[str, ...] = ()
    """Collectors ("threads") and signals ("cgroup.throttled_ns_total") that could not be read;
    "spans" for the probe."""
    reasons: Mapping[str, Unavailable] = field(default_factory=dict)
    """Why, by name; where there is none, a permission was missing."""
    threads_sampled: bool = True
    delay_accounting: bool = True
    """The kernel accounts how long a thread waited for block I/O (`task_delayacct`)."""

    def explain_missing(self, name: str) -> Unavailable | None:
        """Return why a collector or signal cannot be read, None when it can."""
        if name in self.missing or (name == "threads" and not self.threads_sampled):
            return self.reasons.get(name, _HIDDEN if name in _OF_TASKS else _DENIED)
        return None


def draw_clocks(random: np.random.Generator, nodes: Iterable[str]) -> dict[str, tuple[int, float]]:
    """Draw offset (at most 50 ms either way) and drift (50 ppm) of each node's clock."""
    return {
        node: (
            int(random.integers(-OFFSET_NS, OFFSET_NS, endpoint=True)),
            float(random.uniform(-DRIFT_RATIO, DRIFT_RATIO)),
        )
        for node in nodes
    }


class RecorderView:
    """One node as one recorder sees it; times on the node's clock."""

    def __init__(
        self,
        story: Story,
        node: Node,
        other_jobs: Sequence[Story],
        seen: RecordingQuality,
        random: np.random.Generator,
    ) -> None:
        """`other_jobs`: their threads show in the node's counters only."""
        offset_ns, drift = seen.clocks.get(node.name, (0, 0.0))
        self.story, self.node, self.seen, self.random = story, node, seen, random
        self.clock = Clock(UPTIME_NS + offset_ns, drift)
        self.start_ns, self.end_ns = self.clock.at(story.start_ns), self.clock.at(story.end_ns)
        self.codes = ActivityCodes()
        self.every = [rank for rank in story.ranks if rank.node == node.name]
        self.ranks = [rank for rank in self.every if rank.rank not in seen.missing_ranks]
        self.late_ns, self.kept = self._draw_ticks()
        self.t_ns = self.start_ns + TICK_NS * np.arange(len(self.late_ns)) + self.late_ns
        hidden = {
            id(thread)
            for rank in self.every
            if rank.rank in seen.missing_ranks
            for thread in (rank.main, *rank.threads, *rank.workers)
        }
        self.exits = {
            thread.pid: self.clock.at(rank.exit_ns)
            for rank in self.every
            if rank.exit_ns is not None
            for thread in (rank.main, *rank.threads, *rank.workers)
        }
        self.exits |= {
            worker.pid: self.clock.at(worker.exit_ns)
            for rank in self.every
            for worker in rank.workers
            if worker.exit_ns is not None
        }
        own = _make_tracks(self.every, node.others)
        foreign = _make_tracks([r for s in other_jobs for r in s.ranks if r.node == node.name], ())
        self.tracks = [ThreadTrack(thread, self.codes, self.clock) for thread in own]
        everybody = [*self.tracks, *(ThreadTrack(t, self.codes, self.clock) for t in foreign)]
        self.everybody = everybody
        self.recorded = [i for i, t in enumerate(self.tracks) if id(t.thread) not in hidden]
        grown = [track.compute_counters(self.t_ns, self.codes) for track in everybody]
        self.grown = np.array(grown).reshape(len(everybody), len(NAMES), len(self.t_ns))
        rows = [
            np.where(r >= 0, t.code[r], -1) if t.acts else r
            for t in everybody
            for r in (t.find_activity(self.t_ns),)
        ]
        self.doing = np.array(rows, np.int64).reshape(len(everybody), len(self.t_ns))

    def list_ticks(self, interval_ticks: int) -> Int:
        """Return the numbers of the ticks at which a collector with that interval was read.

        One that could not be read when it was due is read with the next tick that was taken.
        """
        due = np.arange(0, len(self.t_ns), interval_ticks)
        row = np.searchsorted(self.kept, due)
        taken = self.kept[np.minimum(row, len(self.kept) - 1)]
        return taken[(taken >= due) & (taken < due + interval_ticks)]

    def sum_threads(self, ticks: Int, own: bool = False) -> Float:
        """Return float64[names, n]: the counters of all threads together."""
        return self.grown[: len(self.tracks) if own else None, :, ticks].sum(axis=0)

    def get_story_values(self, signal: str, device: str) -> list[Rate]:
        """Return the values of a signal in the story."""
        return self.node.extra.get((signal, device), [])

    def compute_story_growth(self, signal: str, device: str, ticks: Int) -> Float:
        """Return what is to be added to a counter."""
        return sum_rates(self.get_story_values(signal, device), self.clock, self.t_ns[ticks])

    def get_story_gauge(
        self, signal: str, device: str, ticks: Int, otherwise: float | Float
    ) -> Float:
        """Return a gauge."""
        return hold_gauge(
            self.get_story_values(signal, device), self.clock, self.t_ns[ticks], otherwise
        )

    def list_story_devices(self, *prefixes: str) -> list[str]:
        """Return the devices with signals of these prefixes in the story."""
        devices = {d: None for name, d in self.node.extra if name.startswith(prefixes) and d}
        return list(devices)

    def draw_initial_value(self, grain: int = 1) -> int:
        """Return what a counter showed before: it has run since the machine started."""
        return int(self.random.integers(1_000, 1_000_000)) * grain

    def _draw_ticks(self) -> tuple[Int, Int]:
        """Draw how late each tick was, and the ticks that were taken; the first always is."""
        count = (self.end_ns - self.start_ns) // TICK_NS + 1
        late = np.zeros(count, np.int64)
        if self.seen.jitter_ns:
            drawn = self.random.exponential(self.seen.jitter_ns, count)
            late = np.minimum(drawn, TICK_NS // 2).astype(np.int64)
        lost = self.random.random(count) < self.seen.lost_samples_ratio
        lost[:1] = False
        return late, np.flatnonzero(~lost)


def _make_tracks(ranks: Sequence[Rank], others: Sequence[Thread]) -> list[Thread]:
    threads = {id(t): t for rank in ranks for t in (rank.main, *rank.threads, *rank.workers)}
    threads.update({id(thread): thread for thread in others})
    return list(threads.values())


def hash_to_number(text: str) -> int:
    """Return a number that a name always has."""
    return zlib.crc32(text.encode())
