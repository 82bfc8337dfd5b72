"""`docs/accuracy.md` and its picture, from the scores stored under `lab/results/`.

python -m clusterprof_lab.score.page --store score-test/score.json     # then `make docs`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterprof_lab.score import legs, lists, markdown
from clusterprof_lab.score.clusterprof_answer import TOOL
from clusterprof_lab.score.document import FORMAT, SCHEMA
from clusterprof_lab.score.markdown import OF_CAUSES, OF_CULPRITS, Document
from clusterprof_lab.score.picture import draw_reliability
from clusterprof_lab.score.prose import (
    CONFIDENCE,
    HEAD,
    LEGS,
    MISSING,
    MODES,
    NONE,
    NOT_COVERED,
    READ_TOOLS,
    REDO,
    SCENARIOS,
    TARGETS,
    make_headline,
)

LAB = Path(__file__).resolve().parents[2]
RESULTS = LAB / "results"
PAGE, PICTURE = "docs/accuracy.md", "docs/accuracy-reliability.svg"
MOST_WRONG = 10
_IN_MODES = (
    "family_top1",
    "leaf_top1",
    "leaf_precision_all",
    "culprit_top1",
    "both_found",
    "inversions",
    "false_on_nulls",
    "bucket_error_active_mean",
    "bucket_error_active_p95",
    "unattributed",
    "wrong_first_sure",
    "ece",
    "conserved",
)


def load_results(folder: Path = RESULTS) -> list[Mapping[str, Any]]:
    """Return the stored scores, those that count first; ValueError for one of another format."""
    out = []
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("format") != FORMAT or document.get("schema") != SCHEMA:
            raise ValueError(f"{path}: not a score of schema {SCHEMA}")
        out.append(document)
    # the split that was not looked at counts
    return sorted(out, key=lambda score: (score["split"] != "test", score["slice"] != "full"))


def make_pages(folder: Path = RESULTS) -> dict[str, str]:
    """Return path -> text of the page and of its picture."""
    documents = load_results(folder)
    given = legs.load_given(folder / "legs")
    text = "\n".join(_make_page(documents, given)) if documents else HEAD + NONE
    return {PAGE: text, PICTURE: draw_reliability(_list_curves(documents))}


_CURVES = {"M0": "", "M2": ", no spans", "M4": ", one rank", "D0": ", driver's view"}
"""Mode with a curve -> its caption; one for each kind of visibility."""


def _list_curves(documents: Sequence[Document]) -> list[tuple[str, Sequence[Any]]]:
    columns = markdown.list_columns(documents)
    return [
        (markdown.format_column_name(column) + words, score["reliability"])
        for column in columns
        for mode, words in _CURVES.items()
        if mode == "M0" or column is columns[0]
        for score in markdown.list_scores(column[0], tool=TOOL, mode=mode, testbed=column[1])
        if score["reliability"]
    ]


def _make_page(documents: Sequence[Document], given: Sequence[legs.Leg]) -> Iterator[str]:
    """The stored score that counts most in full; the others in extra columns."""
    shown = markdown.list_columns(documents)
    first = shown[0][0] if shown else documents[0]
    at_length = [column for column in shown if column[0] is first]
    yield HEAD
    yield "## Legs\n"
    yield LEGS
    same_split = [column for column in shown if column[0]["split"] == first["split"]]
    yield legs.format_legs(legs.list_legs(same_split, given))
    yield "## The corpus\n"
    yield make_headline(at_length)
    yield markdown.format_runs(documents)
    yield "## Targets\n"
    yield TARGETS
    yield markdown.format_targets(documents)
    yield "## All tools side by side\n"
    yield READ_TOOLS
    for column in at_length:
        yield f"**Causes: {markdown.format_column_name(column)}**\n"
        yield markdown.format_tools(*column, OF_CAUSES)
        yield f"**Culprits: {markdown.format_column_name(column)}**\n"
        yield markdown.format_tools(*column, OF_CULPRITS)
    yield markdown.format_versions(first)
    yield "## With fewer signals\n"
    yield MODES
    for column in at_length:
        yield f"**{markdown.format_column_name(column)}**\n"
        yield markdown.format_modes(*column, _IN_MODES)
    yield "## Confusion between groups\n"
    for column in at_length:
        yield f"**{markdown.format_column_name(column)}** (runs; M0)\n"
        for score in markdown.list_scores(column[0], tool=TOOL, mode="M0", testbed=column[1]):
            yield markdown.format_confusion(score)
    yield "## Confidence\n"
    yield CONFIDENCE
    yield f"![Reliability curve: confidence said against part right]({Path(PICTURE).name})\n"
    yield from _make_details(documents, first, shown)


def _make_details(
    documents: Sequence[Document], first: Document, shown: Sequence[markdown.Column]
) -> Iterator[str]:
    yield "## Errors by group\n"
    yield markdown.format_by_cause(shown)
    yield "## Every scenario\n"
    yield SCENARIOS
    yield markdown.format_scenarios(shown)
    yield "## One signal less\n"
    yield lists.format_ablation(first)
    if first["split"] == "dev":  # the other split is not looked at
        yield "## Where it is wrong\n"
        full = [run for run in first["wrong"] if run["mode"] == "M0"]
        first_wrong = {**first, "wrong": full[:MOST_WRONG]}
        yield f"Of {first['wrong_count']} runs and modes the first with everything seen.\n"
        yield lists.format_wrong_answers(first_wrong)
    yield "## Not covered\n"
    missing = markdown.format_not_run(documents)
    yield NOT_COVERED + (MISSING if missing else "")
    if missing:
        yield missing
    yield REDO


def store_score(score: Path, folder: Path = RESULTS) -> Path:
    """Store a score for the page, named after split and slice, without the lists for debugging."""
    document = json.loads(score.read_text(encoding="utf-8"))
    document["claims"] = []
    full = [run for run in document["wrong"] if run["mode"] == "M0"]
    document["wrong"] = [{**run, "folder": ""} for run in full[:MOST_WRONG]]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{document['split']}-{document['slice']}.json"
    path.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
    return path


def main(argv: Sequence[str]) -> int:
    """Store the scores that are given."""
    if len(argv) < 2 or argv[0] != "--store":
        print("usage: python -m clusterprof_lab.score.page --store SCORE.json…", file=sys.stderr)
        return 2
    for name in argv[1:]:
        print(f"stored {store_score(Path(name)).name}; now `make docs`")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
