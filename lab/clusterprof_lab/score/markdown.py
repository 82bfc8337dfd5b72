"""The tables of a score, in Markdown, from a `score.json`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clusterprof_lab.families import FAMILIES
from clusterprof_lab.score.clusterprof_answer import TOOL
from clusterprof_lab.score.judge import NOTHING
from clusterprof_lab.score.metrics import TARGETS

Document = Mapping[str, Any]
Column = tuple[Document, str]
"""A stored score and one of its testbeds."""

# figure -> (name, how it is written)
LINES: Mapping[str, tuple[str, str]] = {
    "bucket_error_active_mean": ("off by, mean, points", "points"),
    "bucket_error_active_p95": ("off by, p95, points", "points"),
    "bucket_error_mean": ("the same over all 13 groups, mean", "points"),
    "bucket_error_p95": ("the same over all 13 groups, p95", "points"),
    "family_top1": ("group of causes first", "part"),
    "leaf_top1": ("leaf first", "part"),
    "leaf_top2": ("leaf among the first two", "part"),
    "leaf_abstained": ("stops at the group", "part"),
    "leaf_precision": ("the first leaf is right when named", "part"),
    "leaf_precision_all": ("any leaf is right when named", "part"),
    "culprit_top1": ("culprit rank first", "part"),
    "culprit_top1_easy": ("the same where it computes slowest", "part"),
    "nobody_blamed": ("nobody blamed where nobody is at fault", "part"),
    "both_found": ("two culprits, both found", "part"),
    "inversions": ("a victim blamed first", "part"),
    "false_on_nulls": ("false cause in a healthy run", "part"),
    "false_anywhere": ("false cause in other runs", "part"),
    "unattributed": ("unattributed, of the lost time", "part"),
    "ece": ("calibration error (ECE)", "number"),
    "wrong_first_sure": ("first cause wrong, said with 80 % or more", "part"),
    "conserved": ("runs with a residual of 0 ns", "part"),
    "residual_ns": ("largest residual, ns", "points"),
    "gain_error": ("gain said, off by, points", "points"),
}
OF_CAUSES: Mapping[str, str] = {
    "family_top1": "group first",
    "leaf_top1": "leaf first",
    "leaf_precision_all": "right if a leaf is named",
    "false_on_nulls": "false cause, healthy",
    "bucket_error_active_mean": "off by, points",
}
"""Figure -> head of a column in which tools are compared."""
OF_CULPRITS: Mapping[str, str] = {
    "culprit_top1": "rank first",
    "culprit_top1_easy": "the same, easy",
    "nobody_blamed": "nobody, rightly",
    "both_found": "two, both found",
    "inversions": "victim first",
}
NOT_CLAIMED = "not claimed"
NO_TRIAL = "-"


def format_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def format_percent(ratio: float, digits: int | None = None) -> str:
    """Return a part without its sign; near 0 and 1 with a decimal: 0.034 is "3", 0.996 "99.6"."""
    if digits is None:
        digits = 1 if 0 < ratio < 0.01 or 0.99 < ratio < 1 else 0
    return f"{100 * ratio:.{digits}f}"


def format_figure(
    measured: Mapping[str, Any] | None,
    how: str,
    none: str = NOT_CLAIMED,
    digits: int | None = None,
    trials: bool = True,
) -> str:
    """Return a figure with its interval and its trials: "93 % (88–96; 121)"."""
    if measured is None or measured["value"] is None:
        return none
    value, low, high = measured["value"], measured["low"], measured["high"]
    places = digits if how == "part" else 3 if how == "number" else 0 if value > 99 else 1

    def written(number: float) -> str:
        return format_percent(number, places) if how == "part" else f"{number:.{places}f}"

    around = [] if low is None else [f"{written(low)}–{written(high)}"]
    around += [str(measured["n"])] if trials else []
    sign = " %" if how == "part" else ""
    return written(value) + sign + (f" ({'; '.join(around)})" if around else "")


def list_scores(document: Document, **wanted: str) -> list[Mapping[str, Any]]:
    """Return the scores that have these values of testbed, tool, mode."""
    return [
        score
        for score in document["scores"]
        if all(score[k] == value for k, value in wanted.items())
    ]


def list_columns(documents: Sequence[Document]) -> list[Column]:
    """List what is shown side by side: every undisturbed testbed of every document."""
    return [
        (document, testbed)
        for document in documents
        for testbed in dict.fromkeys(score["testbed"] for score in document["scores"])
        if "disturbed" not in testbed
    ]


def format_column_name(column: Column) -> str:
    """Return what a column is called."""
    document, testbed = column
    size = "" if document["slice"] == "full" else f", {document['slice']}"
    return f"{testbed}, {document['split']}{size}"


def format_runs(documents: Sequence[Document]) -> str:
    """Return what was measured, one line per score and testbed."""
    lines = []
    for document in documents:
        missing = document["coverage"]["not_run"]
        for score in list_scores(document, tool=TOOL, mode="M0"):
            testbed, figures = score["testbed"], score["figures"]
            lines.append(
                [
                    testbed,
                    document["split"],
                    document["slice"],
                    document["date"],
                    document["clusterprof"],
                    str(figures["conserved"]["n"]),
                    str(figures["false_on_nulls"]["n"]),
                    str(sum(gap["trials"] for gap in missing if gap["testbed"] == testbed)),
                ]
            )
    head = ["jobs", "split", "slice", "when", "version", "runs", "healthy", "not run"]
    return format_table(head, lines)


def format_not_run(documents: Sequence[Document]) -> str:
    """Return why runs were not made, reason by reason; "" when all were."""
    why: dict[tuple[str, str], list[str]] = {}
    for document in documents:
        for entry in document["coverage"]["not_run"]:
            scenarios = why.setdefault((escape_cell(entry["reason"]), entry["testbed"] or "-"), [])
            if entry["scenario"] not in scenarios:
                scenarios.append(entry["scenario"])
    if not why:
        return ""
    lines = [[", ".join(names), testbed, reason] for (reason, testbed), names in why.items()]
    return format_table(["not run", "jobs", "reason"], lines)


def format_targets(documents: Sequence[Document]) -> str:
    """Return every target with what was measured, side by side."""
    shown = list_columns(documents)
    lines = []
    for target in TARGETS:
        for mode in target.modes:
            cells = []
            for document, testbed in shown:
                got = list_scores(document, tool=TOOL, mode=mode, testbed=testbed)
                asked = got and target.testbed in ("", testbed)
                measured = got[0]["figures"][target.figure] if asked else None
                text = format_figure(
                    measured, LINES[target.figure][1], NO_TRIAL, digits=1, trials=False
                )
                met = (
                    measured is not None
                    and measured["value"] is not None
                    and target.meets(measured["value"])
                )
                cells.append(text if text == NO_TRIAL else f"{'✓' if met else '✗'} {text}")
            if any(cell != NO_TRIAL for cell in cells) or not target.testbed:
                lines.append([target.name, mode, target.words, *cells])
    return format_table(["target", "mode", "wanted", *map(format_column_name, shown)], lines)


def format_tools(document: Document, testbed: str, names: Mapping[str, str]) -> str:
    """Return all tools below each other, with everything seen (M0), by some figures.

    Tools that claim none of these are listed below the table.
    """
    scores = list_scores(document, testbed=testbed, mode="M0")
    scores.sort(key=lambda score: score["tool"] != TOOL)
    lines, mute = [], []
    for score in scores:
        if all(score["figures"][name]["value"] is None for name in names):
            mute.append(score["tool"])
            continue
        cells = []
        for name in names:
            # where no tool has a figure, no run asked
            asked = any(each["figures"][name]["value"] is not None for each in scores)
            none = NOT_CLAIMED if asked else NO_TRIAL
            cells.append(format_figure(score["figures"][name], LINES[name][1], none))
        tool = f"**{score['tool']}**" if score["tool"] == TOOL else escape_cell(score["tool"])
        lines.append([tool, *cells])
    text = format_table(["", *names.values()], lines)
    if mute:
        text += "\n" + _is_filled("These tools claim none of this: " + "; ".join(mute) + ".")
    return text


def _is_filled(text: str) -> str:
    return textwrap.fill(text, 98, break_long_words=False, break_on_hyphens=False) + "\n"


def format_versions(document: Document) -> str:
    """Return what the other tools of a table call themselves, where that says more."""
    labels = [
        label
        for name, label in document["tools"].items()
        if name != TOOL and not label.endswith("(rule of thumb)")
    ]
    if not labels:
        return ""
    return _is_filled("Scored versions: " + "; ".join(labels) + ".")


def format_modes(document: Document, testbed: str, names: Iterable[str] = tuple(LINES)) -> str:
    """Return our figures in every mode."""
    scores = list_scores(document, testbed=testbed, tool=TOOL)
    lines = [
        [
            LINES[name][0],
            *(
                format_figure(score["figures"].get(name), LINES[name][1], NO_TRIAL, trials=False)
                for score in scores
            ),
        ]
        for name in names
    ]
    return format_table(["", *(score["mode"] for score in scores)], lines)


def format_confusion(score: Mapping[str, Any]) -> str:
    """Return wanted by said, families that occur only."""
    matrix = score["confusion"]
    order = (*FAMILIES, NOTHING)
    claimed = [name for name in order if any(name in line for line in matrix.values())]
    lines = []
    for name in order:
        if name in matrix:
            cells = [str(matrix[name].get(family, "")) for family in claimed]
            cells = [
                f"**{cell}**" if family == name and cell else cell
                for family, cell in zip(claimed, cells)
            ]
            lines.append([f"**{name}**", *cells])
    return format_table(["true \\ said", *(_shorten(name) for name in claimed)], lines)


def _shorten(family: str) -> str:
    return {"synchronization": "sync", "checkpoint": "ckpt", "unattributed": "none"}.get(
        family, family
    )


def format_by_cause(shown: Sequence[Column]) -> str:
    """Return the bucket error of each group, where it is active."""
    groups_by_column = {
        format_column_name(column): list_scores(column[0], testbed=column[1], tool=TOOL, mode="M0")[
            0
        ]["by_cause"]
        for column in shown
    }
    lines = [
        [
            name,
            *(
                format_figure(groups.get(name), "points", NO_TRIAL)
                for groups in groups_by_column.values()
            ),
        ]
        for name in FAMILIES
        if any(name in groups for groups in groups_by_column.values())
    ]
    return format_table(["group", *groups_by_column], lines)


def format_scenarios(shown: Sequence[Column]) -> str:
    """Format a line per scenario: group right, leaf right, culprit right, error in points."""
    rows: dict[str, dict[int, str]] = {}
    for place, (document, testbed) in enumerate(shown):
        for scenario in document["scenarios"]:
            if scenario["testbed"] != testbed:
                continue
            culprit = scenario["culprit_top1"]
            if culprit["value"] is None:
                culprit = scenario["culprit_top1_easy"]
            asked = (scenario["family_top1"], scenario["leaf_top1"], culprit)
            if scenario["group"] == "null":
                asked = (scenario["no_false_cause"],)
            off = format_figure(scenario["bucket_error_active_mean"], "points", NO_TRIAL).split(
                " ("
            )[0]
            cell = " · ".join([*map(_format_hits, asked), off])
            rows.setdefault(scenario["scenario"], {})[place] = cell
    lines = [
        [name, *(cells.get(place, "") for place in range(len(shown)))]
        for name, cells in rows.items()
    ]
    return format_table(["scenario", *map(format_column_name, shown)], lines)


def _format_hits(measured: Mapping[str, Any]) -> str:
    return NO_TRIAL if measured["hits"] is None else f"{measured['hits']}/{measured['n']}"


def escape_cell(text: str) -> str:
    """Return a text as a cell of a table can hold it."""
    return " ".join(text.split()).replace("|", "\\|")
