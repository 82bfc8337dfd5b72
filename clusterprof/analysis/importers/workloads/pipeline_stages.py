"""Operations of a pipeline: which stage has too much work, and when its ranks waited for others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from clusterprof.analysis.importers.core.base import Account
from clusterprof.analysis.importers.core.text import MAX_TIME_NS

_HEAVY_STAGE_RATIO = 1.2
SAME_INSTANT_NS = 2_000_000
"""Largest difference in ns between ranks that go on at the same instant."""
_MIN_SPREAD_NS = 10 * SAME_INSTANT_NS
"""Ranks that ended their work this far apart do not go on at the same instant by chance, ns."""
_MIN_JOINT_RATIO, _MIN_JOINT_RANKS = 0.8, 3


MAX_STEP = 1 << 40
MAX_POSITION = 1 << 20
MAX_ROWS = 20_000_000

PipelinePosition = tuple[int, int]
"""Pipeline stage, and index among the ranks of the same stage."""


@dataclass(slots=True)
class OperationRow:
    """One operation in one step; times in ns from the beginning of the step."""

    step: int
    sequence: int
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class OperationTable:
    """All rows, by position and operation."""

    rows: dict[PipelinePosition, dict[str, list[OperationRow]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    ranks: dict[PipelinePosition, int] = field(default_factory=dict)
    """Rank numbers, if the file has them."""
    count: int = 0

    def add(
        self, position: PipelinePosition, operation: str, row: OperationRow, account: Account
    ) -> None:
        """Add a row; invalid rows are counted and left out."""
        is_valid_time = 0 <= row.start_ns <= row.end_ns < MAX_TIME_NS
        has_valid_numbers = all(
            0 <= coordinate < MAX_POSITION for coordinate in (*position, row.sequence + 1)
        )
        if not is_valid_time:
            account.skipped["operations with an invalid time"] += 1
        elif not has_valid_numbers or not 0 <= row.step < MAX_STEP or self.count >= MAX_ROWS:
            account.skipped["operations with an invalid step, rank or number"] += 1
        else:
            self.rows[position][operation].append(row)
            self.count += 1
            account.read["operations"] += 1


def sum_stage_work(table: OperationTable, operations: Sequence[str]) -> dict[int, float]:
    """Sum the time of some operations of each stage: the median of its ranks, ns.

    A single slow rank does not make its stage heavy.
    """
    work: dict[int, list[int]] = defaultdict(list)
    for (stage, _), by_name in table.rows.items():
        rows = [row for name in operations for row in by_name.get(name, ())]
        work[stage].append(sum(row.end_ns - row.start_ns for row in rows))
    return {stage: median(ns) for stage, ns in work.items()}


def answer_heavy_stage(work_ns: Mapping[int, float], account: Account) -> None:
    """Answer which stage of a pipeline has much more work than the median one, if any.

    work_ns: stage -> time in which a rank of it computed, ns.
    """
    work = sorted((ns, stage) for stage, ns in work_ns.items())
    (largest, stage), usual = work[-1], work[(len(work) - 1) // 2][0]
    if len(work) > 1 and usual and largest >= _HEAVY_STAGE_RATIO * usual:
        account.notes.append(
            f"stage {stage} does {largest / usual:.1f} times the work of the median stage: give it"
            " fewer layers (the last one also has the output layer and the loss)"
        )
        account.answers.append(account.notes[-1])


def select_joint_waits(
    gaps: Mapping[int, tuple[int, int]], ranks: int
) -> dict[int, tuple[int, int]]:
    """Select the gaps of ranks that ended their work at different times and went on together.

        rank 0  | passes |..........| all-reduce |
        rank 1  | passes     |......| all-reduce |
        rank 2  | passes           || all-reduce |

    gaps: rank -> start and end of its time without work, ns. ranks: how many there are. Empty if
    fewer than four in five of them, or fewer than three, go on at the same instant.
    """
    if not gaps:
        return {}
    resumed = median(end for _, end in gaps.values())
    joint = {r: gap for r, gap in gaps.items() if abs(gap[1] - resumed) <= SAME_INSTANT_NS}
    starts = [start for start, _ in joint.values()]
    if len(joint) < max(_MIN_JOINT_RATIO * ranks, _MIN_JOINT_RANKS):
        return {}
    return joint if max(starts) - min(starts) > _MIN_SPREAD_NS else {}


def find_stage_waits(
    table: OperationTable, passes: Sequence[str], joint: Sequence[str]
) -> dict[PipelinePosition, list[tuple[int, int, int]]]:
    """Find the waits of each rank for the others of its stage that the table does not list.

    They lie between the last pass or message of a step and the first operation of a group; passes
    and joint are the names of these. Returns by position step, start and end (ns, the file's time).
    """
    gaps: dict[tuple[int, int], dict[int, tuple[int, int]]] = defaultdict(dict)
    for (stage, copy), operations in table.rows.items():
        ended: dict[int, int] = {}
        for name in passes:
            for row in operations.get(name, ()):
                ended[row.step] = max(ended.get(row.step, 0), row.end_ns)
        for name in joint:
            for row in operations.get(name, ()):
                start, end = gaps[stage, row.step].get(copy, (ended.get(row.step, 0), MAX_TIME_NS))
                if start <= row.start_ns < end:
                    gaps[stage, row.step][copy] = start, row.start_ns
    waits: dict[PipelinePosition, list[tuple[int, int, int]]] = defaultdict(list)
    copies = Counter(stage for stage, _ in table.rows)
    for (stage, step), by_copy in sorted(gaps.items()):
        for copy, (start, end) in select_joint_waits(by_copy, copies[stage]).items():
            waits[stage, copy].append((step, start, end))
    return waits
