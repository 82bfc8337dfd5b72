"""What `docs/accuracy.md` says between its tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clusterprof_lab.score import markdown
from clusterprof_lab.score.markdown import Column
from clusterprof_lab.score.ours import TOOL

HEAD = """# Accuracy

How often is the verdict of `clusterprof` right? Jobs with known faults answer that: synthetic ones,
whose truth is exact by construction, and real processes on emulated accelerators, whose truth comes
from stopwatches. Other tools and rules of thumb stand beside it, on the same recordings.
"""
NONE = """
No score has been stored yet: `make score-full SPLIT=test` makes one.
"""
TARGETS = """\
✓ met, ✗ missed; in brackets the 95 % interval (Wilson's for parts, a bootstrap over jobs for
means); a trial is a job, never a step. M0 to M4 are what could be seen, see below. Points are
hundredths of the time inside steps; an error is the difference to the truth in one of 13 groups
of causes, counted where truth or answer has a tenth of a point. A rank as culprit is asked only
where the rule "slowest total compute" does not name it as well.
"""
READ_TOOLS = """\
In brackets the 95 % interval and the runs asked. What a tool does not claim is *not claimed*,
neither right nor wrong; a word that means several groups ("input-bound", "host") is right for
any of them. Everything a tool assumes is given to it, a common clock above all. What each
claims, its version, and how it was run or written again: [other-tools.md](other-tools.md).
"Easy" are the runs in which the rule "slowest total compute" is right.
"""
MODES = """\
The same recordings with signals left out. M0 everything; M1 no spans of collectives, forward and
backward; M2 no spans at all; M3 the accelerators' counters alone; M4 one rank of many, judged by
what it can know.
"""
CONFIDENCE = """\
Each cause is named with a confidence. On the dashed line it is as often right as it says; below,
it is too sure. Bars are 95 % intervals. It is calibrated on the split dev alone.
"""
SCENARIOS = """\
Runs in which the group, the leaf and the culprit were right, and points off in the mean; of
healthy runs, those without a false cause. What each scenario is: its file in
[lab/corpus](../lab/corpus).
"""
NOT_COVERED = """\
* No accelerator of a real cluster: synthetic devices, and emulated ones beside real processes.
* Faults that the corpus has no scenario for, and those of the scenarios that nobody thought of.
* Parameters are drawn from seeds. The analysis is improved on the split dev alone; nobody looks
  at runs of the split test, only at these tables.
* Runs that other load of the machine disturbed by more than 5 % of its CPU time are left out of
  targets.
"""
MISSING = """\
* What was planned and could not be run counts for nothing, neither right nor wrong:
"""
REDO = """## How to redo it

```
make score                     # a slice of the corpus, split dev, all tools: minutes
make score SPLIT=test          # the same on seeds that nobody tunes on
make score-full SPLIT=test     # everything, real processes too (root; hours); then `make docs`
make score-sabotage            # three faults put into the attribution: the score must catch each
```

Another tool on the same runs: [lab/README.md](../lab/README.md), one page.
"""


def headline(beside: Sequence[Column]) -> str:
    """Return the few figures that matter most, ours beside the best of the others."""
    if not beside:
        return ""
    document = beside[0][0]
    whole = "the whole corpus" if document["slice"] == "full" else f"slice {document['slice']}"
    says = "" if document["split"] == "test" else " **Preliminary: these seeds may be tuned on.**"
    out = [
        f"Split **{document['split']}**, {whole}, clusterprof {document['clusterprof']},"
        f" {document['date']}.{says}\n"
    ]
    lines = []
    for figure, words in (
        ("family_top1", "the right group of causes comes first"),
        ("culprit_top1", "the rank at fault is blamed first"),
    ):
        for column in beside:
            ours = _figures(column, TOOL)[figure]
            if ours["value"] is not None:
                lines.append([f"{words} ({column[1]})", _said(figure, ours), _best(column, figure)])
    for figure, words in (
        ("inversions", "a rank that only waited is blamed first"),
        ("false_on_nulls", "a healthy job is said to have a fault"),
    ):
        for column in beside:
            ours = _figures(column, TOOL)[figure]
            if ours["value"] is not None:
                lines.append([f"{words} ({column[1]})", _said(figure, ours), ""])
    return "\n".join([*out, markdown.table(["", TOOL, "best of the others"], lines)])


def _figures(column: Column, tool: str) -> dict[str, Any]:
    [found] = markdown.scores_of(column[0], testbed=column[1], tool=tool, mode="M0")
    figures: dict[str, Any] = found["figures"]
    return figures


def _said(figure: str, one: dict[str, Any]) -> str:
    return markdown.figure(one, markdown.LINES[figure][1])


def _best(column: Column, figure: str) -> str:
    """Return who does best of the others that answer at least half as often as we do."""
    least = _figures(column, TOOL)[figure]["n"] / 2
    others = [
        (one["figures"][figure]["value"], one["tool"], one["figures"][figure])
        for one in markdown.scores_of(column[0], testbed=column[1], mode="M0")
        if one["tool"] != TOOL
        and one["figures"][figure]["value"] is not None
        and one["figures"][figure]["n"] >= least
    ]
    if not others:
        return markdown.NO_TRIAL
    _, tool, best = max(others, key=lambda other: other[:2])
    return f"{_said(figure, best)} {tool}"
