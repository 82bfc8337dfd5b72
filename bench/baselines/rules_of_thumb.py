"""Rules of thumb as answers: a rank at fault, or "storage" by one counter.

| rule | claims | does not claim |
|---|---|---|
| the six of `rules.py` (StageFrontier is one) | a rank at fault, always | cause, amount, nobody |
| iowait > 5 % of a node's CPU time | storage, ranks of the worst node | leaf, amount |
| AU < 90 % (MLPerf Storage, unet3d and resnet50) | storage, ranks least used | leaf, amount |

They get more than they require: matched operations on a common clock. For a job of one rank, or
without operations, see `met`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from baselines import rules
from baselines.operations import make_job
from baselines.recorded import AU_PASSES_RATIO, IOWAIT_ABOVE_RATIO
from baselines.recording_tables import read_recording
from baselines.tables import Node, Rank, RecordingTables
from clusterprof.probe import layout
from clusterprof.signals import CPU_IDLE, CPU_IOWAIT, CPU_STEAL, CPU_SYSTEM, CPU_USER
from clusterprof_lab.answer import Answer, NamedCause
from clusterprof_lab.truth import Truth

_CPU = (CPU_USER.name, CPU_SYSTEM.name, CPU_IDLE.name, CPU_IOWAIT.name, CPU_STEAL.name)


def make_rank_rule(name: str) -> Callable[[Path, Truth], Answer]:
    """Return one of `rules.RULES` as a function from a recording to an answer."""
    label = "StageFrontier (re-implemented from its abstract)"
    tool = label if name == "stage frontier" else f"{name} (rule of thumb)"

    def rule(recording: Path, truth: Truth) -> Answer:
        seen = read_recording(recording, truth.clocks)
        job = make_job(seen)
        blamed = None if job is None else (sorted(seen.ranks)[rules.RULES[name](job)],)
        return Answer(tool, None, culprits=blamed)

    return rule


def apply_iowait_rule(recording: Path, truth: Truth) -> Answer:
    """Say storage, on the node whose CPUs waited most for I/O, above 5 % of their time."""
    tool = "iowait > 5 % (rule of thumb)"
    seen = read_recording(recording, truth.clocks)
    by_node = [
        (ratio, node) for node in seen.nodes if (ratio := _compute_iowait_ratio(node)) is not None
    ]
    if not by_node:
        return Answer(tool, None)
    ratio, node = max(by_node, key=lambda entry: entry[0])
    return _make_storage_answer(
        tool, seen.list_node_ranks(node) if ratio > IOWAIT_ABOVE_RATIO else ()
    )


def apply_au_rule(recording: Path, truth: Truth) -> Answer:
    """Say storage when an accelerator is used less than 90 % of its time in steps."""
    tool = "AU < 90 % (MLPerf Storage's pass mark)"
    used = compute_au_ratios(read_recording(recording, truth.clocks))
    if not used:
        return Answer(tool, None)
    least = sorted(used, key=lambda rank: (used[rank], rank))
    return _make_storage_answer(tool, tuple(rank for rank in least if used[rank] < AU_PASSES_RATIO))


def compute_au_ratios(seen: RecordingTables) -> dict[int, float]:
    """By rank: time it neither waited for data nor was in operations, of its time in steps."""
    out = {}
    for number, rank in seen.ranks.items():
        if rank.in_step_ns and len(rank.of(layout.DATA_WAIT)):
            lost = (
                rank.sum_by_step(rank.of(layout.DATA_WAIT)).sum() + sum_operation_time(rank).sum()
            )
            out[number] = 1 - float(lost) / rank.in_step_ns
    return out


def sum_operation_time(rank: Rank) -> np.ndarray:
    """Ns of each step in which its host was in operations with other ranks."""
    table = rank.of(layout.COLLECTIVE)
    form = table[:, 6] >> layout.FORM_SHIFT & layout.FORM_MASK
    return rank.sum_by_step(table[form != layout.ISSUE])


def _compute_iowait_ratio(node: Node) -> float | None:
    have = [name for name in _CPU if (name, "all") in node.series]
    grown = {name: node.series[name, "all"].get_growth() for name in have}
    if CPU_IOWAIT.name not in grown or sum(grown.values()) <= 0:
        return None
    return grown[CPU_IOWAIT.name] / sum(grown.values())


def _make_storage_answer(tool: str, culprits: tuple[int, ...]) -> Answer:
    causes = (NamedCause("storage", None, None, culprits=culprits),) if culprits else ()
    return Answer(tool, causes, culprits=culprits, leaves=False)


RULES: Mapping[str, Callable[[Path, Truth], Answer]] = {
    **{name: make_rank_rule(name) for name in rules.RULES},
    "iowait > 5 %": apply_iowait_rule,
    "AU < 90 %": apply_au_rule,
}
