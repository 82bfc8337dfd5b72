"""Lists of a score: time that changed its cause when a signal was removed, and wrong answers."""

from __future__ import annotations

from clusterprof_lab.score.markdown import Document, escape_cell, format_table


def format_ablation(document: Document) -> str:
    """Return the time that moved to another cause when a signal was left out."""
    got = document["ablation"]
    moves = [sideway for sideway in got["sideways"] if not sideway["bound"]]
    bound_count = len(got["sideways"]) - len(moves)
    text = (
        f"Each of {got['signals']} signals was left out of {got['runs']} runs."
        f" In {len(moves)} cases more than half a point moved to another cause.\n"
        f"In {bound_count} more cases the loss is an upper bound, because no device was measured.\n"
    )
    if not moves:
        return text
    counts: dict[tuple[str, str], list[float]] = {}
    for move in moves:
        counts.setdefault((move["signal"], move["to"]), []).append(move["points"])
    lines = [
        [signal, to, str(len(points)), f"{max(points):.1f}"]
        for (signal, to), points in sorted(counts.items())
    ]
    return (
        text
        + "\n"
        + format_table(["without", "cause that grew", "cases", "largest, points"], lines)
    )


def format_wrong_answers(document: Document) -> str:
    """Return every run that we were wrong about, in order of mode; of dev only."""
    if document["split"] != "dev":
        return f"{document['wrong_count']} runs and modes, not shown: the split stays unseen.\n"
    lines = [
        [
            run["trial"],
            run["mode"],
            ", ".join(run["what"]),
            escape_cell(run["said"]),
            escape_cell(run["true"]),
        ]
        for run in sorted(document["wrong"], key=lambda run: run["mode"])
    ]
    return format_table(["run", "mode", "wrong in", "said", "true"], lines)
