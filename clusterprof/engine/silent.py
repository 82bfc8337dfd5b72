"""Jobs that came to a halt though nobody marked what they were in.

    device of every rank      idle since at least `HANG_NS`, to the end of its recording
    main thread of each       asleep, and not on a CPU in the last ten seconds
    how it ended              recorded to the end, or by a signal: not by itself

A job that is done ends; one that saves or evaluates uses its CPUs. Whom the others wait for is not
known, but for a few ranks that sleep elsewhere in the kernel than most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from clusterprof.attribution.families import CAUSES
from clusterprof.attribution.ledger import AFTER_STEPS, RankBooks
from clusterprof.engine.endings import Ending
from clusterprof.engine.hang_report import FAIL_HANG
from clusterprof.engine.hanging import HANG_NS
from clusterprof.engine.jobs import UNCLEAR, ranges
from clusterprof.engine.node import NodeResult
from clusterprof.findings import Culprit, Evidence, Finding

ASLEEP_BELOW_RATIO = 0.01
"""Of the last seconds on a CPU: a thread that only looks at its clock now and then."""
_CONFIDENCE = 0.7


@dataclass(frozen=True, slots=True)
class Silent:
    """All nodes, with the time after such a halt in their books."""

    nodes: tuple[NodeResult, ...]
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


_Member = tuple[NodeResult, RankBooks, Ending]


def silent(nodes: Sequence[NodeResult]) -> Silent:
    """Move the time of jobs without marks that stood still in the end to `fail-hang`."""
    halted = [members for members in _jobs(nodes).values() if _halted(members)]
    if not halted:
        return Silent(tuple(nodes))
    jobs = {members[0][1].job for members in halted}
    moved = tuple(
        replace(node, books=tuple(_moved(one) if one.job in jobs else one for one in node.books))
        for node in nodes
    )
    notes = tuple(_sentence(members) for members in halted)
    return Silent(moved, (_finding(moved, halted),), notes)


def _jobs(nodes: Sequence[NodeResult]) -> dict[int, list[_Member]]:
    out: dict[int, list[_Member]] = {}
    for node in nodes:
        ends = {(one.pid, one.started_ticks): one for one in node.endings}
        for one in node.books:
            end = ends.get((one.ledger.pid, one.started_ticks))
            if one.job != UNCLEAR and end is not None:
                out.setdefault(one.job, []).append((node, one, end))
    return out


def _halted(members: Sequence[_Member]) -> bool:
    if len(members) < max(2, max(one.place.world_size or 0 for _, one, _ in members)):
        return False
    return all(_stands(one, end) for _, one, end in members)


def _stands(one: RankBooks, end: Ending) -> bool:
    if one.marked or dict(one.ledger.outside_buckets).get(AFTER_STEPS, 0) < HANG_NS:
        return False
    if end.exited is not None and not end.exited.get("signal"):
        return False
    asleep = end.on_cpu_ratio is not None and end.on_cpu_ratio < ASLEEP_BELOW_RATIO
    return asleep and end.state in ("S", "D")


def _elsewhere(members: Sequence[_Member]) -> list[_Member]:
    """Those that do not sleep where more than half of all do."""
    places = Counter(end.wchan for _, _, end in members)
    most, count = places.most_common(1)[0]
    if 2 * count <= len(members):
        return []
    return [one for one in members if one[2].wchan != most]


def _moved(one: RankBooks) -> RankBooks:
    lines = dict(one.ledger.outside_buckets)
    lines[FAIL_HANG] = lines.get(FAIL_HANG, 0) + lines.pop(AFTER_STEPS)
    return replace(one, ledger=replace(one.ledger, outside_buckets=tuple(lines.items())))


def _finding(nodes: Sequence[NodeResult], halted: Sequence[Sequence[_Member]]) -> Finding:
    ledgers = [one.ledger for node in nodes for one in node.books]
    each = [dict(one.outside_buckets).get(FAIL_HANG, 0) for one in ledgers]
    window_ns = sum(one.window_ns for one in ledgers)
    culprits = [
        Culprit(node.facts.name, one.ledger.rank, one.ledger.device)
        for members in halted
        for node, one, _ in _elsewhere(members)
    ]
    return Finding(
        cause=CAUSES[FAIL_HANG],
        lost_ns=sum(each),
        share_ratio=sum(each) / window_ns if window_ns else 0.0,
        recoverable_ns=None,
        confidence_ratio=_CONFIDENCE,
        grade="C",
        upper_bound=False,
        outside_steps=True,
        culprits=tuple(culprits),
        evidence=(
            Evidence(
                "hang.longest_ns", float(max(each)), "ns",
                "from the last work of a device to the end of its recording, at the longest",
            ),
        ),
    )  # fmt: skip


def _sentence(members: Sequence[_Member]) -> str:
    seconds = min(dict(one.ledger.outside_buckets)[AFTER_STEPS] for _, one, _ in members) / 1e9
    ranks = ranges(one.ledger.rank or 0 for _, one, _ in members)
    said = f"progress stopped: no device of ranks {ranks} did anything in the last {seconds:.0f} s,"
    return f"{said} and their main threads slept"
