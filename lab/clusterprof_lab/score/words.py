"""Answers and truths in one line each, for lists of what went wrong."""

from __future__ import annotations

from collections.abc import Sequence

from clusterprof_lab.answer import Said
from clusterprof_lab.score.judge import NOTHING, guilty
from clusterprof_lab.truth import OTHER, Truth


def spoken(causes: Sequence[Said]) -> str:
    """Return causes in words, for lists of what went wrong."""
    said = [
        f"{one.leaf or one.family} "
        f"{'?' if one.share_ratio is None else f'{100 * one.share_ratio:.1f}'}"
        f"{'' if not one.culprits else f' by {one.culprits[0]}'}"
        f"{' outside' if one.outside_steps else ''}"
        for one in causes[:3]
    ]
    return ", ".join(said) or NOTHING


def true_words(truth: Truth) -> str:
    """Return the truth in the same words."""
    of: dict[tuple[str, bool], int] = {}
    for outside, rows in ((False, truth.lost), (True, truth.outside)):
        for one in rows:
            key = one.cause, outside
            of[key] = of.get(key, 0) + one.ns
    whole = max(truth.in_step_ns, 1)
    lines = sorted(of.items(), key=lambda line: -line[1])[:3]
    said = [
        f"{'(nobody injected)' if cause == OTHER else cause} {100 * ns / whole:.1f}"
        f"{' outside' if outside else ''}"
        for (cause, outside), ns in lines
    ]
    who = sorted(guilty(truth))
    return (", ".join(said) or NOTHING) + (f"; by {who[0]}…{who[-1]}" if who else "")
