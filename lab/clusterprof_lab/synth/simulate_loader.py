"""Loader workers as PyTorch runs them: batch k is of worker k mod n, prefetch is bounded, batches
are handed over in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from clusterprof.probe import layout
from clusterprof_lab.synth.simulated_rank import HostPart, SimulatedRank
from clusterprof_lab.synth.story import Act, Mark, Thread
from clusterprof_lab.synth.wait_truth import Label, add_amounts

CYCLES = 4
ITEMS = 32
Produce = Callable[[int, int], list[HostPart]]
"""(rank, batch) -> what making the batch consists of, in order."""


def split_into_items(parts: Sequence[HostPart]) -> list[HostPart]:
    """Spread the parts over a batch, whose items are read and decoded one after the other."""
    out = []
    for i in range(CYCLES):
        for part in parts:
            cut = [
                _split_part(n, i) for n in (part.ns, part.bytes, part.operations, part.queued_ns)
            ]
            if cut[0]:
                out.append(
                    part._replace(ns=cut[0], bytes=cut[1], operations=cut[2], queued_ns=cut[3])
                )
    return out


def _split_part(whole: int, i: int) -> int:
    return whole * (i + 1) // CYCLES - whole * i // CYCLES


class Loader:
    """The data loader of one rank; without workers the main thread loads."""

    def __init__(
        self,
        player: SimulatedRank,
        workers: Sequence[Thread],
        prefetch: int,
        produce: Produce,
        persistent: bool = True,
        first_batch: int = 0,
    ) -> None:
        """Start the workers of an epoch; batches of the whole job count from `first_batch` on."""
        self._player, self._workers, self._prefetch = player, workers, prefetch
        self._produce, self._first_batch = produce, first_batch
        self._received: list[int] = []
        now = player.t
        self._free = [now] * len(workers)
        self._start = now
        for i, thread in enumerate(workers):
            thread.marks.append(
                Mark(now, now, layout.WORKER_START, i, len(workers), player.rank.main.pid)
            )
        player.mark(now, layout.LOADER_START, len(workers), 1, prefetch, int(persistent))

    def close(self) -> None:
        """End the workers, as a loader without `persistent_workers` does after an epoch."""
        for worker, free_ns in zip(self._workers, self._free):
            worker.exit_ns = max(free_ns, self._player.t)

    def wait_for_batch(self) -> None:
        """Let the main thread wait for the next batch."""
        player, batch = self._player, len(self._received)
        began = player.t
        if not self._workers:
            self._load_in_main_thread(batch)
            owner = 0
        else:
            owner = self._wait_for_worker(batch)
        player.mark(began, layout.DATA_WAIT, batch, owner, len(self._workers), int(batch == 0))
        self._received.append(player.t)

    def _load_in_main_thread(self, batch: int) -> None:
        player, began = self._player, self._player.t
        parts = split_into_items(self._produce(player.number, self._first_batch + batch))
        for part in parts:
            player.run_part(part)
        player.mark(began, layout.FETCH, *_sum_fetch_use(parts))

    def _wait_for_worker(self, batch: int) -> int:
        player, n = self._player, len(self._workers)
        worker = self._workers[batch % n]
        ahead = batch - self._prefetch * n
        asked = self._start if ahead < 0 else self._received[ahead]
        at = begin = max(asked, self._free[batch % n])
        parts = split_into_items(self._produce(player.number, self._first_batch + batch))
        waited: dict[Label, int] = {}
        since, pieces = player.t, []
        if begin > self._free[batch % n]:
            worker.acts.append(Act(self._free[batch % n], begin, "idle"))
        for part in parts:
            worker.acts.append(part.make_act(at))
            inside = at + part.ns - max(at, since)
            if inside > 0:
                pieces.append((inside, (part.cause, player.number)))
                add_amounts(waited, {pieces[-1][1]: inside})
            at += part.ns
        worker.marks.append(Mark(begin, at, layout.FETCH, *_sum_fetch_use(parts)))
        self._free[batch % n] = at
        if at > since:
            player.rank.main.acts.append(Act(since, at, "idle"))
            for ns, label in pieces:
                player.pass_time(ns, {label: ns})
        return worker.pid


def _sum_fetch_use(parts: Sequence[HostPart]) -> tuple[int, int, int, int]:
    """Return items, user and system CPU time, and what the kernel counts as bytes read."""
    user = sum(p.ns for p in parts if p.doing == "user")
    system = sum(p.ns for p in parts if p.doing == "system")
    return ITEMS, user, system, sum(p.bytes for p in parts if _counts_as_read(p))


def _counts_as_read(part: HostPart) -> bool:
    """True for what `ru_inblock` counts: reads of block devices and NFS, pages brought back."""
    if part.doing == "memory":
        return part.what in ("swap", "fault")
    return part.doing in ("block-io", "nfs") and part.what in ("", "READ")
