"""Acts of a thread as numbers: how each kind of act changes the counters of the kernel.

Each line of `PLACES` describes one kind of act: the thread's state letter, the kernel function it
sleeps in (as Linux 6.18 prints it), and the counters that grow meanwhile. The kernel adds a wait
for a CPU when the wait ends; everything else grows evenly over its act.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clusterprof_lab.synth.story import Act, Thread

Int = NDArray[np.int64]
Float = NDArray[np.float64]


class Place(NamedTuple):
    """What the kernel shows of a thread that does one thing."""

    state: str
    wchan: str = ""
    counts: tuple[str, ...] = ()
    """Names of `NS` that grow by a nanosecond in each."""
    of_bytes: tuple[str, ...] = ()
    """Names of `AMOUNTS` that grow by the act's bytes."""
    of_operations: tuple[str, ...] = ()


NS = ("user", "system", "delay", "throttled", "iowait", "memory", "not_idle")
"""Nanoseconds: on a CPU (two), waiting for one, throttled by the quota, in `io_schedule`, in
`psi_memstall`, and all time in which the scheduler's pressure takes the CPU for not idle."""
AMOUNTS = ("read_chars", "read_bytes", "write_chars", "write_bytes", "faults", "swap_in")
NAMES = (*NS, *AMOUNTS)
ROW = {name: row for row, name in enumerate(NAMES)}
_BOOKED_LATE = [ROW["delay"], ROW["throttled"]]

_PAGE, _POLL, _FUTEX = "folio_wait_bit_common", "poll_schedule_timeout.constprop.0", "futex_do_wait"
_READS, _IO = ("read_chars", "read_bytes"), ("iowait", "not_idle")
_STALL = ("memory", "not_idle")
PLACES: dict[tuple[str, str], Place] = {
    ("user", ""): Place("R", counts=("user", "not_idle")),
    ("system", ""): Place("R", counts=("system", "not_idle"), of_bytes=("read_chars",)),
    ("system", "write"): Place("R", counts=("system", "not_idle"), of_bytes=("write_chars",)),
    ("runnable", ""): Place("R", counts=("delay", "not_idle")),
    ("throttled", ""): Place("R", counts=("delay", "throttled", "not_idle")),
    ("block-io", ""): Place("D", _PAGE, _IO, _READS),
    ("block-io", "write"): Place("D", "balance_dirty_pages", _IO, ("write_chars", "write_bytes")),
    ("block-io", "fsync"): Place("D", "jbd2_log_wait_commit", _IO, ("write_chars", "write_bytes")),
    # A buffered read waits for its page, other requests wait for their reply.
    ("nfs", ""): Place("D", _PAGE, _IO, _READS),
    ("nfs", "READ"): Place("D", _PAGE, _IO, _READS),
    ("nfs", "WRITE"): Place("D", "nfs_wait_bit_killable", (), ("write_chars", "write_bytes")),
    ("nfs", "*"): Place("D", "rpc_wait_bit_killable"),
    ("fuse", ""): Place("S", "request_wait_answer", (), ("read_chars",)),
    ("fuse", "READ"): Place("D", _PAGE, _IO, ("read_chars",)),
    ("fuse", "WRITE"): Place("S", "request_wait_answer", (), ("write_chars",)),
    ("fuse", "*"): Place("S", "request_wait_answer"),
    ("socket", ""): Place("S", "wait_woken"),
    ("memory", ""): Place("D", "__mem_cgroup_handle_over_high", _STALL),
    ("memory", "reclaim"): Place("D", "reclaim_throttle", _STALL),
    ("memory", "swap"): Place(
        "D", _PAGE, ("iowait", *_STALL), ("read_bytes", "swap_in"), ("faults",)
    ),
    ("memory", "fault"): Place("D", _PAGE, _IO, ("read_bytes",), ("faults",)),
    ("lock", ""): Place("S", _FUTEX),
    ("device", ""): Place("S", _POLL),
    ("peer", ""): Place("S", _FUTEX),
    ("idle", ""): Place("S", _POLL),
}
"""(doing, what) -> place; what "*" stands for any other, and where there is none "" does."""


def find_place(doing: str, what: str) -> Place:
    """Return where a thread is that does this."""
    for key in ((doing, what), (doing, "*") if what else (doing, ""), (doing, "")):
        if key in PLACES:
            return PLACES[key]
    raise ValueError(f"no thread can be doing {doing!r}")


class ActivityCodes:
    """Numbers for the kinds of acts that occur, and what each number stands for."""

    def __init__(self) -> None:
        self.of: dict[tuple[str, str], int] = {}
        self.places: list[Place] = []
        self._weights: list[list[list[float]]] = []

    def get_codes(self, acts: Sequence[Act]) -> Int:
        """Return the number of each act's kind."""
        of = self.of
        numbers = []
        for act in acts:
            key = (act.doing, act.what)
            code = of.get(key)
            numbers.append(self._add_code(key) if code is None else code)
        return np.array(numbers, np.int64)

    def weights(self) -> tuple[Float, Float, Float]:
        """Return float64[codes, names] each: growth per nanosecond, per byte, per operation."""
        table = np.array(self._weights, np.float64).reshape(-1, 3, len(NAMES))
        return table[:, 0], table[:, 1], table[:, 2]

    def _add_code(self, key: tuple[str, str]) -> int:
        place = find_place(*key)
        self.places.append(place)
        grown = (place.counts, place.of_bytes, place.of_operations)
        self._weights.append([[float(name in counters) for name in NAMES] for counters in grown])
        self.of[key] = len(self.places) - 1
        return self.of[key]


class ThreadTrack:
    """One thread on its node's clock; acts sorted by start."""

    def __init__(self, thread: Thread, codes: ActivityCodes, clock: Clock) -> None:
        self.thread = thread
        acts = [act for act in thread.acts if act.end_ns > act.start_ns]
        self.acts = acts
        self.code = codes.get_codes(acts)
        self.start_ns = clock.read(np.array([act.start_ns for act in acts], np.int64))
        self.end_ns = clock.read(np.array([act.end_ns for act in acts], np.int64))
        self.bytes = np.array([act.bytes for act in acts], np.int64)
        self.operations = np.array([act.operations for act in acts], np.int64)
        firsts = [intervals[0].start_ns for intervals in (acts, thread.marks) if intervals]
        self.born_ns = clock.at(min(firsts, default=0))

    def compute_counters(self, t_ns: Int, codes: ActivityCodes) -> Float:
        """Return float64[names, n]: every counter of the thread at each time."""
        if not self.acts:
            return np.zeros((len(NAMES), len(t_ns)))
        per_ns, per_byte, per_operation = codes.weights()
        length = (self.end_ns - self.start_ns).astype(np.float64)
        each = per_ns[self.code] * length[:, None] + per_byte[self.code] * self.bytes[:, None]
        each = (each + per_operation[self.code] * self.operations[:, None]).T
        each[_BOOKED_LATE] = self._move_waits_to_end(each[_BOOKED_LATE])
        before = np.zeros((len(NAMES), len(self.acts) + 1))
        np.cumsum(each, axis=1, out=before[:, 1:])
        row, part = self._find_position(t_ns)
        value = before[:, row] + each[:, row] * part
        value[_BOOKED_LATE] = (before[:, row] + each[:, row] * np.floor(part))[_BOOKED_LATE]
        return value

    def find_activity(self, t_ns: Int) -> Int:
        """Return int64[n]: which act the thread is in at each time, -1 = in none."""
        if not self.acts:
            return np.full(len(t_ns), -1, np.int64)
        row = np.searchsorted(self.start_ns, t_ns, side="right") - 1
        return np.where((row >= 0) & (t_ns < self.end_ns[row]), row, -1)

    def _find_position(self, t_ns: Int) -> tuple[Int, Float]:
        row = np.searchsorted(self.start_ns, t_ns, side="right") - 1
        at = np.maximum(row, 0)
        length = np.maximum(self.end_ns - self.start_ns, 1)
        part = np.clip((t_ns - self.start_ns[at]) / length[at], 0.0, 1.0)
        return at, np.where(row < 0, 0.0, part)

    def _move_waits_to_end(self, waits: Float) -> Float:
        """Waits for a CPU that follow each other without one are booked with the last of them."""
        waiting = waits[0] > 0
        if not waiting.any():
            return waits
        goes_on = np.zeros(len(self.acts), np.bool_)
        goes_on[1:] = waiting[1:] & waiting[:-1] & (self.start_ns[1:] <= self.end_ns[:-1])
        group = np.cumsum(~goes_on) - 1
        last = np.append(np.flatnonzero(~goes_on)[1:] - 1, len(self.acts) - 1)
        out = np.zeros_like(waits)
        for row, amounts in enumerate(waits):
            out[row, last] = np.bincount(group, amounts)
        return out


class Clock(NamedTuple):
    """CLOCK_MONOTONIC of a node: what it shows at an instant of true time."""

    zero_ns: int
    """At true time 0."""
    drift: float
    """By how much it runs faster."""

    def read(self, t_ns: Int) -> Int:
        """Return what it shows at each true time."""
        return self.zero_ns + t_ns + np.rint(self.drift * t_ns).astype(np.int64)

    def at(self, t_ns: int) -> int:
        """Return what it shows at one true time."""
        return self.zero_ns + t_ns + round(self.drift * t_ns)
