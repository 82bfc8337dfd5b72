"""The tables of a score, in Markdown, from a `score.json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clusterprof_lab.families import FAMILIES
from clusterprof_lab.score.judge import NOTHING
from clusterprof_lab.score.metrics import TARGETS
from clusterprof_lab.score.ours import TOOL

Document = Mapping[str, Any]

# figure -> (name, how it is written)
LINES: Mapping[str, tuple[str, str]] = {
    "bucket_error_mean": ("bucket error, mean of 13 groups, points", "points"),
    "bucket_error_p95": ("bucket error, p95 of 13 groups, points", "points"),
    "bucket_error_active_mean": ("bucket error, mean of active groups, points", "points"),
    "bucket_error_active_p95": ("bucket error, p95 of active groups, points", "points"),
    "family_top1": ("dominant cause (group) first", "part"),
    "leaf_top1": ("leaf first", "part"),
    "leaf_top2": ("leaf among the first two", "part"),
    "leaf_abstained": ("stops at the group", "part"),
    "leaf_precision": ("precision of the first leaf when one is named", "part"),
    "leaf_precision_all": ("precision of all leaves of 1 point or more", "part"),
    "culprit_top1": ("culprit rank first", "part"),
    "culprit_top1_easy": ("culprit rank first, where slowest total compute is right too", "part"),
    "nobody_blamed": ("no rank blamed where none is at fault", "part"),
    "both_found": ("two culprits, both found", "part"),
    "inversions": ("inversions: a victim blamed first", "part"),
    "false_on_nulls": ("false cause of 3 points or more, nulls", "part"),
    "false_anywhere": ("false cause of 3 points or more, other runs", "part"),
    "unattributed": ("unattributed, of the lost time", "ratio"),
    "ece": ("calibration error (ECE)", "number"),
    "conserved": ("runs with a residual of 0 ns", "part"),
    "residual_ns": ("largest residual, ns", "points"),
    "gain_error": ("gain said, off by, points of the step time", "points"),
}
NOT_CLAIMED = "not claimed"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def figure(one: Mapping[str, Any] | None, how: str, none: str = NOT_CLAIMED) -> str:
    """Return a figure with its interval and its trials."""
    if one is None or one["value"] is None:
        return none
    value, low, high, n = one["value"], one["low"], one["high"], one["n"]
    if how == "part":
        if n and one["hits"] is not None:
            return f"{value:.1%} ({low:.1%} to {high:.1%}; {one['hits']} of {n})"
        return f"{value:.1%}"
    if how == "ratio":
        around = "" if low is None else f" ({low:.1%} to {high:.1%}; {n})"
        return f"{value:.1%}{around}"
    digits = 3 if how == "number" else 2
    around = f" ({n})" if low is None else f" ({low:.{digits}f} to {high:.{digits}f}; {n})"
    return f"{value:.{digits}f}{around}"


def scores_of(document: Document, **wanted: str) -> list[Mapping[str, Any]]:
    """Return the scores that have these values of testbed, tool, mode."""
    return [
        one for one in document["scores"] if all(one[k] == value for k, value in wanted.items())
    ]


def targets(documents: Sequence[Document]) -> str:
    """Return every target with what was measured, by testbed and mode."""
    lines = []
    for target in TARGETS:
        for mode in target.modes:
            for document in documents:
                for one in scores_of(document, tool=TOOL, mode=mode):
                    if target.testbed and one["testbed"] != target.testbed:
                        continue
                    got = one["figures"][target.figure]
                    how = LINES[target.figure][1]
                    met = "no trial"
                    if got["value"] is not None:
                        met = "met" if target.meets(got["value"]) else "**missed**"
                    where = f"{one['testbed']}, {document['split']}"
                    lines.append(
                        [target.name, mode, where, target.words, figure(got, how, "-"), met]
                    )
    return table(["target", "mode", "runs", "wanted", "measured", ""], lines)


def tools(document: Document, testbed: str) -> str:
    """Return all tools beside each other, with everything seen (M0)."""
    scores = scores_of(document, testbed=testbed, mode="M0")
    scores.sort(key=lambda one: one["tool"] != TOOL)
    lines = []
    for name, (words, how) in LINES.items():
        # where nobody has a figure, no run asked
        asked = any(one["figures"][name]["value"] is not None for one in scores)
        none = NOT_CLAIMED if asked else "no trial"
        lines.append([words, *(figure(one["figures"].get(name), how, none) for one in scores)])
    return table(["", *(one["tool"] for one in scores)], lines)


def modes(document: Document, testbed: str) -> str:
    """Return our figures in every mode."""
    scores = scores_of(document, testbed=testbed, tool=TOOL)
    lines = [
        [words, *(figure(one["figures"].get(name), how, "-") for one in scores)]
        for name, (words, how) in LINES.items()
    ]
    return table(["", *(one["mode"] for one in scores)], lines)


def confusion(score: Mapping[str, Any]) -> str:
    """Return wanted by said, families that occur only."""
    matrix = score["confusion"]
    order = (*FAMILIES, NOTHING)
    said = [name for name in order if any(name in line for line in matrix.values())]
    lines = []
    for name in order:
        if name in matrix:
            cells = [str(matrix[name].get(one, "")) for one in said]
            cells = [
                f"**{cell}**" if one == name and cell else cell for one, cell in zip(said, cells)
            ]
            lines.append([f"**{name}**", *cells])
    return table(["true \\ said", *said], lines)


def by_cause(score: Mapping[str, Any]) -> str:
    """Return the bucket error of each group, where it is active."""
    lines = [[name, figure(one, "points")] for name, one in score["by_cause"].items()]
    return table(["group", "off by, points (95 %; runs)"], lines)


def scenarios(document: Document) -> str:
    """Return every scenario with how often each question was answered rightly."""
    lines = []
    for one in document["scenarios"]:
        culprit = one["culprit_top1"]
        if culprit["value"] is None:
            culprit = one["culprit_top1_easy"]
        lines.append([
            one["scenario"], str(one["trials"]), f"{one['right']} of {one['trials']}",
            *(_hits(each) for each in (one["family_top1"], one["leaf_top1"], culprit)),
            figure(one["bucket_error_active_mean"], "points", "-").split(" (")[0],
        ])  # fmt: skip
    head = ["scenario", "runs", "nothing wrong", "group", "leaf", "culprit", "off by, points"]
    return table(head, lines)


def _hits(one: Mapping[str, Any]) -> str:
    return "-" if one["hits"] is None else f"{one['hits']} of {one['n']}"


def coverage(document: Document) -> str:
    """Return what was run, and what was not and why."""
    got = document["coverage"]
    said = f"{got['scored']} of {got['planned']} planned runs were scored.\n"
    if not got["not_run"]:
        return said
    lines = [
        [one["scenario"], one["testbed"] or "-", str(one["trials"]), _cell(one["reason"])]
        for one in got["not_run"]
    ]
    return said + "\n" + table(["not run", "testbed", "runs", "reason"], lines)


def ablation(document: Document) -> str:
    """Return what went sideways when a signal was left out."""
    got = document["ablation"]
    found = [one for one in got["sideways"] if not one["bound"]]
    bounded = len(got["sideways"]) - len(found)
    said = (
        f"Each signal was left out of {got['runs']} runs: {len(found)} times more than half a point"
        f" went sideways; {bounded} times more in which the loss is an upper bound, because no"
        " device was measured.\n"
    )
    if not got["sideways"]:
        return said
    counts: dict[tuple[str, str, str], list[float]] = {}
    for one in got["sideways"]:
        key = one["signal"], one["to"], "yes" if one["bound"] else ""
        counts.setdefault(key, []).append(one["points"])
    lines = [
        [signal, to, str(len(points)), f"{max(points):.1f}", bound]
        for (signal, to, bound), points in sorted(counts.items())
    ]
    return said + "\n" + table(["without", "grew", "runs", "most, points", "bound"], lines)


def wrongs(document: Document) -> str:
    """Return every run that we were wrong about, in order of mode; of dev only."""
    if document["split"] != "dev":
        return f"{document['wrong_count']} runs and modes, not shown: nobody learns from them.\n"
    lines = [
        [one["trial"], one["mode"], ", ".join(one["what"]), _cell(one["said"]), _cell(one["true"])]
        for one in sorted(document["wrong"], key=lambda one: one["mode"])
    ]
    return table(["run", "mode", "wrong in", "said", "true"], lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def score_page(document: Document) -> str:
    """Return the whole of `score.md`."""
    out = [
        f"# Score of clusterprof {document['clusterprof']}\n",
        f"Split {document['split']}, {document['slice']}, {document['seconds']} s.\n",
        coverage(document),
        "## Targets\n",
        targets([document]),
    ]
    for testbed in dict.fromkeys(one["testbed"] for one in document["scores"]):
        out += [f"## All tools, {testbed}\n", tools(document, testbed)]
        out += [f"## Modes, {testbed}\n", modes(document, testbed)]
        for one in scores_of(document, testbed=testbed, tool=TOOL, mode="M0"):
            out += [f"## Confusion, {testbed}\n", confusion(one), by_cause(one)]
    out += ["## Scenarios\n", scenarios(document), "## A signal less\n", ablation(document)]
    out += ["## Wrong\n", wrongs(document)]
    return "\n".join(out)
