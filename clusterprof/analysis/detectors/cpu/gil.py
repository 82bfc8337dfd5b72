"""Another thread of the training process keeps its interpreter.

## What it sees

Lost time inside a step in which the main thread slept on a lock while another thread of the same
process was on a CPU.

## Why the GPU waits

One Python interpreter runs one thread at a time. A thread that computes in Python (metrics, a
progress bar, a data loader of threads) is asked to let go every 5 ms only, so the main thread pays
up to 5 ms for each time it had let go itself, and it does at nearly every launch.

## How it decides

Counters of the scheduler say how long the main thread was on no CPU in each lost piece outside any
wait for data or other ranks, and how long the busiest other thread of the process was on one: the
lesser of the two is what may be. Samples say how much of it is: the part of them, at instants at
which the other thread was running, that found the main thread asleep in a futex (`wchan`), beyond
the part that found it there while the other rested. Where all that is little, nothing is claimed.
Threads of autograd, NCCL and the driver are left out: they work for the main thread, and what they
launch is its launching.

## What to do

Move the work of that thread to a process of its own (`multiprocessing`), call it less often, or do
it in code that releases the lock. `py-spy top --pid` shows what it runs.

## Where it is blind

Any lock looks the same: one that the other thread holds in C code too. A thread is seen from about
a second after it began. Where names of threads were not recorded nothing is claimed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof.detectors.asleep import asleep_ns, asleep_samples, part_of, within
from clusterprof.detectors.base import Claims, in_phase, mean_over
from clusterprof.findings import Cause, Evidence
from clusterprof.timeline.model import PHASE_COMPUTE, Feeding, Float, Int, Lost, Rank, ThreadTable
from clusterprof.timeline.series import rise_of
from clusterprof.timeline.sleeping import asleep_at

_HELPERS = (
    "pt_autograd", "pt_nccl", "pt_gloo", "pt_tcp", "nccl", "NCCL", "cuda", "nv_", "UVM", "gloo",
)  # fmt: skip


class CpuGil:
    """Claims time of the main thread on a lock while another thread of its process computes."""

    cause = Cause(
        "cpu-gil",
        "cpu",
        "Another thread of the training process keeps its interpreter",
        "Move what that thread computes to a process of its own",
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """When a sleeping main thread counts as kept from its interpreter."""

        kept_at_least_ratio: float = 0.04
        """Part of the pieces in which it must have slept on a lock while another ran."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim time on a lock inside steps, as far as another thread computed."""
        share = np.zeros(lost.start_ns.size)
        inside = in_phase(lost, PHASE_COMPUTE)
        others = {tid: one for tid, one in rank.main.threads.items() if tid != rank.pid}
        thread = rank.main.threads.get(rank.pid)
        if thread is None or not others or not inside.any():
            return Claims(share, "B")
        if not any(one.name for one in others.values()):
            return None
        others = {tid: one for tid, one in others.items() if not one.name.startswith(_HELPERS)}
        tid, other_ns = _busiest(rank, lost, inside, sorted(others))
        if not tid:
            return Claims(share, "B")
        locked = asleep_at(thread, rank.chunk.wchan_names, lambda name: "futex" in name)
        asleep = asleep_ns(rank, lost, inside)
        used = np.zeros(share.size)
        used[inside] = other_ns
        both = np.minimum(asleep, used)
        kept = _kept_ratio(rank, lost, inside, locked, _running(others[tid], thread.t_ns))
        length = lost.end_ns - lost.start_ns
        if kept * float(both.sum()) < limits.kept_at_least_ratio * float(length[inside].sum()):
            return Claims(share, "B")
        share = kept * within(both, lost, inside) / np.maximum(lost.lost_ns, 1)
        parts = np.stack([asleep * kept, used]) / np.maximum(length, 1)
        evidence = (
            Evidence(
                "thread.on_lock_ratio",
                mean_over(lost, share, parts[0]),
                "ratio",
                "of that time the main thread slept on a lock",
            ),
            Evidence(
                "other_thread.on_cpu_ratio",
                mean_over(lost, share, parts[1]),
                "ratio",
                "of that time another thread of the process was on a CPU",
            ),
        )
        return Claims(share, "B", evidence, f"thread {others[tid].name} {tid}")


def _kept_ratio(
    rank: Rank,
    lost: Lost,
    inside: NDArray[np.bool_],
    locked: NDArray[np.bool_],
    runs: NDArray[np.bool_],
) -> float:
    """How much oftener the main thread was found on a lock while another ran than while it rested.

    1 = always and never, 0 = no oftener: on a lock 8 of 10 times and 3 of 10 times is 5 / 7.
    """
    asleep = asleep_samples(rank, lost, inside)
    then, else_ = part_of(asleep & runs, locked), part_of(asleep & ~runs, locked)
    return max(0.0, then - else_) / (1.0 - else_) if else_ < 1.0 else 0.0


def _running(other: ThreadTable, t_ns: Int) -> NDArray[np.bool_]:
    """bool[n]: whether a thread had work at each sample of another; no row = it slept."""
    row = np.searchsorted(other.t_ns, t_ns)
    at = np.minimum(row, other.t_ns.size - 1)
    return np.asarray((other.t_ns[at] == t_ns) & (other.state[at] == ord("R")), np.bool_)


def _busiest(
    rank: Rank, lost: Lost, inside: NDArray[np.bool_], tids: list[int]
) -> tuple[int, Float]:
    """Return who used most CPU time in the pieces together, and how much in each: float64[m].

    0 = nobody used any.
    """
    best, most = 0, np.zeros(int(inside.sum()))
    for tid in tids:
        one = rank.main.threads[tid]
        used = rise_of(one.t_ns, one.on_cpu_ns, lost.start_ns[inside], lost.end_ns[inside])
        used = np.nan_to_num(used)
        if used.sum() > most.sum():
            best, most = tid, used
    return best, most
