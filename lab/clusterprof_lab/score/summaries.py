"""Answers and truths in one line each, for lists of wrong answers."""

from __future__ import annotations

from collections.abc import Sequence

from clusterprof_lab.answer import NamedCause
from clusterprof_lab.score.judge import NOTHING, list_culprits
from clusterprof_lab.truth import OTHER, Truth


def format_causes(causes: Sequence[NamedCause]) -> str:
    """Return causes in words, for lists of what went wrong."""
    phrases = [
        f"{cause.leaf or cause.family} "
        f"{'?' if cause.share_ratio is None else f'{100 * cause.share_ratio:.1f}'}"
        f"{'' if not cause.culprits else f' by {cause.culprits[0]}'}"
        f"{' outside' if cause.outside_steps else ''}"
        for cause in causes[:3]
    ]
    return ", ".join(phrases) or NOTHING


def format_truth(truth: Truth) -> str:
    """Return the truth in the same words."""
    of: dict[tuple[str, bool], int] = {}
    for outside, rows in ((False, truth.lost), (True, truth.outside)):
        for row in rows:
            key = row.cause, outside
            of[key] = of.get(key, 0) + row.ns
    whole = max(truth.in_step_ns, 1)
    lines = sorted(of.items(), key=lambda line: -line[1])[:3]
    phrases = [
        f"{'(nobody injected)' if cause == OTHER else cause} {100 * ns / whole:.1f}"
        f"{' outside' if outside else ''}"
        for (cause, outside), ns in lines
    ]
    who = sorted(list_culprits(truth))
    return (", ".join(phrases) or NOTHING) + (f"; by {who[0]}…{who[-1]}" if who else "")
