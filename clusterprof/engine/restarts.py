"""Time lost to a restart: from the last record of one life of a rank to the first step of the next.

    life 0   |== steps ==|x exits with 1
    life 1                    gap     |-- starts up --|== steps ==|
                              |====== fail-restart ==|

A rank lives again when its launcher counted a restart, or when an earlier life of the same job
ended in failure. Two runs of one name, one after the other, are not that. The gap lies in no
recording of a rank: it is added to the books of the later life, whose window then begins where the
life before ended. It is known where both ran on one machine, by one clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from clusterprof.attribution.families import CAUSES
from clusterprof.attribution.ledger import STARTUP, RankBooks
from clusterprof.engine.jobs import Job
from clusterprof.engine.node import NodeResult
from clusterprof.findings import Culprit, Evidence, Finding

FAIL_RESTART = "fail-restart"
_CONFIDENCE, _CONFIDENCE_UNTOLD = 0.95, 0.8
_SIGTERM = 15  # how a launcher ends the ranks that did not fail


@dataclass(frozen=True, slots=True)
class Restarted:
    """All nodes, with the time of restarts in their books."""

    nodes: tuple[NodeResult, ...]
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class _Life:
    """One rank in one life of its job."""

    job: Job
    machine: str
    books: RankBooks
    failed_ns: int | None
    """When it failed, on its machine's clock; None = it did not, or nobody saw it end."""


def restarted(nodes: Sequence[NodeResult], jobs: Sequence[Job]) -> Restarted:
    """Move what later lives spent on starting, and the gaps between, to `fail-restart`."""
    lives = _lives(nodes, jobs)
    gaps: dict[tuple[str, int, int], int] = {}
    failed: list[_Life] = []
    told = True
    for ones in lives.values():
        before: _Life | None = None
        for one in ones:
            broken = before is not None and before.failed_ns is not None
            if one.job.restart or broken:
                gaps[_id(one.books)] = _gap_ns(before, one)
                told &= bool(one.job.restart)
                if before is not None and broken:
                    failed.append(before)
            before = one
    if not gaps:
        return Restarted(tuple(nodes))
    moved = tuple(
        replace(node, books=tuple(_moved(one, gaps.get(_id(one))) for one in node.books))
        for node in nodes
    )
    return Restarted(moved, _finding(moved, failed, told))


def _id(books: RankBooks) -> tuple[str, int, int]:
    return books.ledger.node, books.ledger.pid, books.started_ticks


def _lives(nodes: Sequence[NodeResult], jobs: Sequence[Job]) -> dict[tuple, list[_Life]]:
    """By job and rank, in the order in which they lived."""
    numbered = {job.number: job for job in jobs}
    out: dict[tuple, list[_Life]] = {}
    for node in nodes:
        ends = {(one.pid, one.started_ticks): one for one in node.endings}
        for one in node.books:
            job = numbered.get(one.job)
            if job is None or not job.name or one.place.rank is None:
                continue
            end = ends.get((one.ledger.pid, one.started_ticks))
            exited = {} if end is None or end.exited is None else end.exited
            signal, code = exited.get("signal"), exited.get("exit_code")
            failed = bool(code) or bool(signal and signal != _SIGTERM)
            failed_ns = end.exited_ns if failed and end is not None else None
            life = _Life(job, node.facts.boot_id or node.facts.key, one, failed_ns)
            out.setdefault((job.name, job.world_size, one.place.rank), []).append(life)
    for ones in out.values():
        ones.sort(key=lambda one: (one.job.restart, one.job.life))
    return out


def _gap_ns(before: _Life | None, one: _Life) -> int:
    if before is None or before.machine != one.machine:
        return 0
    return max(0, one.books.first_ns - before.books.last_ns)


def _moved(one: RankBooks, gap_ns: int | None) -> RankBooks:
    if gap_ns is None:
        return one
    ledger = one.ledger
    lines = dict(ledger.outside_buckets)
    ns = lines.pop(STARTUP, 0) + gap_ns
    if not ns:
        return one
    lines = {FAIL_RESTART: ns, **lines}
    new = replace(
        ledger,
        window_ns=ledger.window_ns + gap_ns,
        outside_ns=ledger.outside_ns + gap_ns,
        outside_buckets=tuple(lines.items()),
    )
    return replace(one, ledger=new)


def _finding(
    nodes: Sequence[NodeResult], failed: Sequence[_Life], told: bool
) -> tuple[Finding, ...]:
    ledgers = [one.ledger for node in nodes for one in node.books]
    spent = [dict(one.outside_buckets).get(FAIL_RESTART, 0) for one in ledgers]
    if not any(spent):
        return ()
    window_ns = sum(one.window_ns for one in ledgers)
    first = sorted(failed, key=lambda one: one.failed_ns or 0)
    culprits = [
        Culprit(one.books.ledger.node, one.books.ledger.rank, one.books.ledger.device)
        for one in first
    ]
    return (
        Finding(
            cause=CAUSES[FAIL_RESTART],
            lost_ns=sum(spent),
            share_ratio=sum(spent) / window_ns if window_ns else 0.0,
            recoverable_ns=None,
            confidence_ratio=_CONFIDENCE if told else _CONFIDENCE_UNTOLD,
            grade="A" if told else "B",
            upper_bound=False,
            outside_steps=True,
            culprits=tuple(dict.fromkeys(culprits)),
            evidence=(
                Evidence(
                    "restart.longest_ns",
                    float(max(spent)),
                    "ns",
                    "from the end of a rank to its first step after the restart, at the longest",
                ),
            ),
        ),
    )
