"""One rank in true time: a host that launches, and a device that runs its queue in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from clusterprof.probe import layout
from clusterprof.probe.hooks.torch_state import READ_INTERVAL_NS
from clusterprof_lab.synth.story import Act, Doing, Mark, Rank, Work
from clusterprof_lab.synth.wait_truth import (
    WORK,
    History,
    Label,
    LostSegment,
    add_amounts,
    explain_wait,
    split_by_weight,
)
from clusterprof_lab.truth import OTHER


class HostPart(NamedTuple):
    """Something a thread does for a while, and its cause if a device waits for it."""

    ns: int
    doing: Doing
    cause: str
    resource: str = ""
    bytes: int = 0
    operations: int = 0
    queued_ns: int = 0
    what: str = ""

    def make_act(self, start_ns: int) -> Act:
        """Return what it is in a story."""
        return Act(
            start_ns,
            start_ns + self.ns,
            self.doing,
            self.resource,
            self.bytes,
            self.operations,
            self.queued_ns,
            self.what,
        )


_MEMORY_RATIO = 0.1


class ExtraKernelTime(NamedTuple):
    """Time a kernel takes beyond its due."""

    ns: int
    cause: str
    own_loss: bool
    """True when its own device loses it (throttled); False when only those who wait do (work)."""
    throttle_bits: int = 0

    def clock_ratio(self, ns: int) -> float:
        """Return the clock at which a kernel of `ns` takes so much longer; 1 when not throttled.

        A throttled device keeps the clock of its memory, which some of a kernel waits for.
        """
        stretched = (1 - _MEMORY_RATIO) * ns
        return stretched / (stretched + self.ns) if self.throttle_bits and stretched else 1.0


class SimulatedRank:
    """A rank's host and device; `rank` collects what happened, `lost` what it cost."""

    def __init__(self, rank: Rank, depth: int, start_ns: int = 0) -> None:
        self.rank, self.number = rank, rank.rank
        self.t = self.device_t = start_ns
        self.why: History = {WORK: start_ns}
        self.device_why: History = {WORK: start_ns}
        self.lost: list[LostSegment] = []
        self.trail: list[LostSegment] = []
        """All that the host did, as what it costs a device that waits for it."""
        self.steps: list[tuple[int, int]] = []
        self.slowed: list[tuple[int, int]] = []
        """When kernels took longer than their due, and the device lost it."""
        self._depth = depth
        self._queue: deque[tuple[int, History]] = deque()
        self._allocator = [start_ns, 0, 0]
        """When its counters were read last, and what was tried again and moved since."""

    def run_part(self, part: HostPart) -> None:
        """Let the host spend time on something."""
        if part.ns > 0:
            self.rank.main.acts.append(part.make_act(self.t))
            self.pass_time(part.ns, {(part.cause, self.number): part.ns})

    def pass_time(self, ns: int, shares: Mapping[Label, int]) -> None:
        """Move the host on, for these reasons; its act is noted elsewhere."""
        if ns > 0:
            self.trail.append(LostSegment(self.t, self.t + ns, shares))
            self.t += ns
            add_amounts(self.why, shares)

    def mark(self, start_ns: int, kind: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> int:
        """Write a span that ends now; return its sequence number in the ring."""
        self.rank.main.marks.append(Mark(start_ns, self.t, kind, a, b, c, d))
        return len(self.rank.main.marks)

    def count_marks(self, kind: int, cause: str = "") -> int:
        """Return field a of a mark: the generation of a collection, how often it was compiled."""
        if kind == layout.HOST_WORK:
            return layout.WARMING_UP if cause == "warm-up" else layout.FREEING_MEMORY
        if kind == layout.COMPILE:
            return sum(mark.kind == kind for mark in self.rank.main.marks)
        return 2 if kind == layout.GC else 0

    def allocate(self, blocks: int = 8) -> None:
        """Let the allocator give memory back to the driver, and get some again."""
        self._allocator[1] += 1
        self._allocator[2] += blocks

    def mark_allocator(self) -> None:
        """Write what its counters rose by, at most once a second."""
        read_ns, retries, blocks = self._allocator
        if self.t - read_ns >= READ_INTERVAL_NS:
            self.mark(read_ns, layout.ALLOCATOR, retries, blocks, blocks)
            self._allocator = [self.t, 0, 0]

    def launch(
        self,
        ns: int,
        what: Any = "compute",
        extra: ExtraKernelTime | None = None,
        sm_ratio: float = 0.9,
    ) -> None:
        """Put work on the device; the host goes on at once unless the queue is full."""
        while len(self._queue) >= self._depth:
            self._wait_until(*self._queue.popleft())
        start = self.wait_for_queue()
        more = 0 if extra is None else extra.ns
        end = start + ns + more
        clock, bits = (1.0, 0) if extra is None else (extra.clock_ratio(ns), extra.throttle_bits)
        self.rank.work.append(Work(start, end, what, sm_ratio, clock, bits))
        if what == "copy":  # no kernel: the device computes nothing meanwhile
            cause = "h2d-copy" if extra is None else extra.cause
            self._add_lost(start, end, {(cause, self.number): ns + more})
            add_amounts(self.device_why, {(cause, self.number): ns + more})
        else:
            add_amounts(self.device_why, {WORK: ns})
        if extra is not None and more and what != "copy":
            label = (extra.cause, self.number)
            add_amounts(self.device_why, {label: more})
            if extra.own_loss:
                self._add_lost(end - more, end, {label: more})
                self.slowed.append((end - more, end))
        self.device_t = end
        self._queue.append((end, dict(self.device_why)))

    def wait_for_queue(self) -> int:
        """Return when the device can begin what the host launches now; it idles until then."""
        if self.t > self.device_t:
            self._add_lost(self.device_t, self.t, self.list_host_activity(self.device_t, self.t))
            self.device_t, self.device_why = self.t, dict(self.why)
        return self.device_t

    def list_host_activity(self, start_ns: int, end_ns: int) -> dict[Label, int]:
        """Return what the host did between two moments."""
        out: dict[Label, int] = {}
        for loss in reversed(self.trail):
            if loss.end_ns <= start_ns:
                break
            inside = min(loss.end_ns, end_ns) - max(loss.start_ns, start_ns)
            if inside > 0:
                add_amounts(out, split_by_weight(inside, loss.shares))
        missing = end_ns - start_ns - sum(out.values())
        if missing:
            add_amounts(out, {(OTHER, self.number): missing})
        return out

    def synchronize(self) -> None:
        """Let the host wait until its device has nothing left to do."""
        self._queue.clear()
        self._wait_until(self.device_t, dict(self.device_why))

    def join_host_collective(
        self, last: SimulatedRank, release: int, why: History, net: Mapping[Label, int], p2p: bool
    ) -> None:
        """Wait in a collective of the host from now on until the data are transferred."""
        wait, moving = release - self.t, sum(net.values())
        shares = explain_wait(why, self.why, wait, last.number, p2p)
        if wait + moving > 0:
            self.rank.main.acts.append(Act(self.t, release + moving, "peer"))
        if wait > 0:
            self.trail.append(LostSegment(self.t, release, shares))
        if moving:
            self.trail.append(LostSegment(release, release + moving, net))
        self.t = release + moving
        self.why = dict(why)
        add_amounts(self.why, net)

    def join_device_collective(
        self, last: SimulatedRank, release: int, why: History, net: Mapping[Label, int], p2p: bool
    ) -> int:
        """Let a kernel busy-wait until all ranks have arrived and the data are transferred; return
        for how long."""
        start, end = self.device_t, release + sum(net.values())
        self._add_lost(
            start, release, explain_wait(why, self.device_why, release - start, last.number, p2p)
        )
        self._add_lost(release, end, net)
        if end > start:
            self.rank.work.append(Work(start, end, "collective", 0.05))
        self.device_t = end
        self.device_why = dict(why)
        add_amounts(self.device_why, net)
        self._queue.append((end, dict(self.device_why)))
        return end - start

    def finish(self) -> None:
        """Count the device's idle time up to now."""
        self.wait_for_queue()

    def _wait_until(self, moment: int, why: History) -> None:
        if moment > self.t:
            self.rank.main.acts.append(Act(self.t, moment, "device"))
            self.trail.append(LostSegment(self.t, moment, {(OTHER, self.number): moment - self.t}))
            self.t, self.why = moment, dict(why)

    def _add_lost(self, start: int, end: int, shares: Mapping[Label, int]) -> None:
        if end > start:
            assert sum(shares.values()) == end - start
            self.lost.append(LostSegment(start, end, shares))
