"""`docs/accuracy.md` and its picture, from the scores stored under `lab/results/`.

python -m clusterprof_lab.score.page --store score-test/score.json     # then `make docs`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterprof_lab.score import markdown
from clusterprof_lab.score.document import FORMAT, SCHEMA
from clusterprof_lab.score.ours import TOOL
from clusterprof_lab.score.picture import reliability_picture

LAB = Path(__file__).resolve().parents[2]
RESULTS = LAB / "results"
PAGE, PICTURE = "docs/accuracy.md", "docs/accuracy-reliability.svg"
MOST_WRONG = 25
_HEAD = """# Accuracy

How often the verdict of `clusterprof` is right, measured on the open corpus of `lab/`: jobs with
known faults, synthetic (exact truth by construction) and real processes on emulated accelerators
(truth by stopwatches). Nobody else's data and nobody else's figures are in these tables: rules of
others ran on the same recordings, and what a tool does not claim is marked so. How another tool
can be scored on the corpus: [lab/README.md](../lab/README.md).

A trial is a job with its fault, never a step. Parts stand with Wilson's 95 % interval, means with a
bootstrap over jobs. The analysis is improved on the split "dev" alone; "test" has other seeds. Runs
that other load of the machine disturbed by more than 5 % of its CPU time stand apart. The culprit
figure leaves out the runs in which the rule "slowest total compute" names who is at fault as well.
Bucket errors are differences to the truth in points, hundredths of the time inside steps, over 13
groups of causes; targets are judged on the "active" groups, those in which truth or answer has a
tenth of a point, which is the stricter way.
"""
_NONE = """
No score has been stored yet: `make score-full SPLIT=test` makes one.
"""


def results(folder: Path = RESULTS) -> list[Mapping[str, Any]]:
    """Return the stored scores by name of file; ValueError for one of another format."""
    out = []
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("format") != FORMAT or document.get("schema") != SCHEMA:
            raise ValueError(f"{path}: not a score of schema {SCHEMA}")
        out.append(document)
    # what counts is the split that nobody looked at
    return sorted(out, key=lambda one: (one["split"] != "test", one["slice"] != "full"))


def pages(folder: Path = RESULTS) -> dict[str, str]:
    """Return path -> text of the page and of its picture."""
    documents = results(folder)
    return {PAGE: _page(documents), PICTURE: reliability_picture(_curves(documents))}


def _curves(documents: Sequence[Mapping[str, Any]]) -> list[tuple[str, Sequence[Any]]]:
    return [
        (f"{one['testbed']}, {document['split']}", one["reliability"])
        for document in documents
        for one in markdown.scores_of(document, tool=TOOL, mode="M0")
        if one["reliability"]
    ]


def _page(documents: Sequence[Mapping[str, Any]]) -> str:
    if not documents:
        return _HEAD + _NONE
    out = [_HEAD, "## Targets\n", markdown.targets(documents)]
    for document in documents:
        out += _chapter(document)
    out += [
        "## Confidence\n",
        "What was said with some confidence, and how often it was right: on the line is calibrated,"
        " below it is too sure. Bars are 95 % intervals.\n",
        f"![Reliability curve: confidence said against part right]({Path(PICTURE).name})\n",
        _curve_table(documents),
        _not_covered(),
    ]
    return "\n".join(out)


def _chapter(document: Mapping[str, Any]) -> list[str]:
    split = document["split"]
    slice_ = "the whole corpus" if document["slice"] == "full" else f"slice {document['slice']}"
    out = [
        f'## Split "{split}": {slice_}, clusterprof {document["clusterprof"]}\n',
        markdown.coverage(document),
    ]
    for testbed in dict.fromkeys(one["testbed"] for one in document["scores"]):
        out += [f"### All tools, {testbed}, {split}\n", markdown.tools(document, testbed)]
        out += [
            f"### With less to see, {testbed}, {split}\n",
            "M0 everything; M1 no spans of collectives, forward and backward; M2 no spans at all;"
            " M3 the accelerators' counters alone; M4 one rank of many, judged by what it can"
            " know.\n",
            markdown.modes(document, testbed),
        ]
        for one in markdown.scores_of(document, testbed=testbed, tool=TOOL, mode="M0"):
            out += [f"### Which group for which, {testbed}, {split}\n", markdown.confusion(one)]
            out += [f"### Bucket error by group, {testbed}, {split}\n", markdown.by_cause(one)]
    out += [f"### Every scenario, {split}\n", markdown.scenarios(document)]
    out += [f"### A signal less, {split}\n", markdown.ablation(document)]
    if split == "dev":  # the other split is not looked at
        shown = {**document, "wrong": document["wrong"][:MOST_WRONG]}
        out += ["### Wrong, dev\n", f"The first {MOST_WRONG} at most.\n", markdown.wrongs(shown)]
    return out


def _curve_table(documents: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        [name, f"{one['low']:.1f} to {one['high']:.1f}", f"{one['said']:.3f}",
         f"{one['right']:.3f}", str(one["n"])]
        for name, bins in _curves(documents) for one in bins
    ]  # fmt: skip
    return markdown.table(["runs", "confidence", "said", "right", "claims"], lines)


def _not_covered() -> str:
    return (
        "## Not covered\n\n"
        "* No accelerator of a real cluster: synthetic devices, and emulated ones beside real"
        " processes.\n"
        "* What was planned and not run stands above with its reason; it counts for nothing,"
        " neither as right nor as wrong.\n"
        "* Faults that the corpus has no scenario for.\n"
    )


def store(score: Path, folder: Path = RESULTS) -> Path:
    """Keep a score for the page, named after split and slice, without what is for going to look."""
    document = json.loads(score.read_text(encoding="utf-8"))
    document["claims"] = []
    for one in document["wrong"]:
        one["folder"] = ""
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
        print(f"stored {store(Path(name)).name}; now `make docs`")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
