"""Lists of a score: what went sideways without a signal, and what was wrong."""

from __future__ import annotations

from clusterprof_lab.score.markdown import Document, cell, table


def ablation(document: Document) -> str:
    """Return what went sideways when a signal was left out."""
    got = document["ablation"]
    found = [one for one in got["sideways"] if not one["bound"]]
    said = (
        f"Each of {got['signals']} signals was left out of {got['runs']} runs: {len(found)} times"
        " more than half a point\nwent sideways;"
        f" {len(got['sideways']) - len(found)} times more in which the loss is an upper bound,"
        " because no device was\nmeasured.\n"
    )
    if not found:
        return said
    counts: dict[tuple[str, str], list[float]] = {}
    for one in found:
        counts.setdefault((one["signal"], one["to"]), []).append(one["points"])
    lines = [
        [signal, to, str(len(points)), f"{max(points):.1f}"]
        for (signal, to), points in sorted(counts.items())
    ]
    return said + "\n" + table(["without", "grew", "times", "most, points"], lines)


def wrongs(document: Document) -> str:
    """Return every run that we were wrong about, in order of mode; of dev only."""
    if document["split"] != "dev":
        return f"{document['wrong_count']} runs and modes, not shown: nobody learns from them.\n"
    lines = [
        [one["trial"], one["mode"], ", ".join(one["what"]), cell(one["said"]), cell(one["true"])]
        for one in sorted(document["wrong"], key=lambda one: one["mode"])
    ]
    return table(["run", "mode", "wrong in", "said", "true"], lines)
