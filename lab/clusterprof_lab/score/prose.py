"""The text of `docs/accuracy.md` between its tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clusterprof_lab.score import markdown
from clusterprof_lab.score.clusterprof_answer import TOOL
from clusterprof_lab.score.markdown import Column

HEAD = """# Accuracy

How often is the verdict of `clusterprof` right? This page answers with jobs whose faults are known:
synthetic jobs, whose truth is exact by construction, and real processes on emulated accelerators,
whose truth comes from stopwatches. Other tools and rules of thumb were scored on the same
recordings. Jobs and traces that the rules were not built on stand beside them.
"""
LEGS = """\
Each line is a leg: jobs of one origin, of which one thing was seen. Legs are never averaged. The
worst comes first; ✓ met, ✗ missed. In brackets: the 95 % interval and the number of jobs. The
synthetic and real jobs are our own corpus, which the rules were built on. *As a driver shows it*:
the same jobs, their accelerators seen in whole percents of periods of 1/6 s to 1 s, late and in
lumps, with or without GPM, and without hooks on the device. *Second job shape*: sharded parameters,
three epochs with new workers, unmarked validation, logging and slow first steps. *ci*: a smaller
slice of the corpus. *Independent lab* and *public traces* are not ours; their numbers come from
`lab/results/legs/`. Without hooks: no span of the job was recorded.
"""
NONE = """
No score has been stored yet: `make score-full SPLIT=test` makes one.
"""
TARGETS = """\
✓ met, ✗ missed. In brackets: the 95 % interval (Wilson's for shares, a bootstrap over jobs for
means). A trial is a job, never a step. M0 to M4 say which signals were available, see below. Points
are percentage points of the time inside steps. An error is the difference from the truth in one of
13 groups of causes. It is counted if the truth or the answer has at least a tenth of a point. The
culprit rank is scored only if the rule "slowest total compute" does not name it, too.
"""
READ_TOOLS = """\
In brackets: the 95 % interval and the number of scored runs. What a tool does not claim is *not
claimed*: neither right nor wrong. A word that means several groups ("input-bound", "host") is right
for any of them. Each tool gets everything that it assumes, above all a common clock. [Other
tools](other-tools.md) describes what each tool claims, its version, and how it was run or
re-implemented. "Easy" runs are those in which the rule "slowest total compute" is right.
"""
MODES = """\
The same recordings with signals left out. M0: everything. M1: no spans of collectives, forward and
backward. M2: no spans at all. M3: only the counters of the accelerators. M4: one rank of many,
scored by what it can know. D0 and D2: accelerators as a vendor's driver shows them, with the spans
of Python and without any.
"""
CONFIDENCE = """\
Each cause has a confidence. On the dashed line, claims are right as often as their confidence
states; below it, the confidence is too high. Bars are 95 % intervals. The confidence was calibrated
on the split dev only, by isotonic regression for each kind of visibility: hooked jobs, devices seen
through their driver, jobs without marks, one rank of many. Where there are enough claims, it was
calibrated on the second job shape, which the rules were not built on; our own corpus is then right
more often than is said. The confidence of imported traces is not calibrated.
"""
SCENARIOS = """\
Runs in which the group, the leaf and the culprit were right, and the mean error in points. For
healthy runs: those without a false cause. The files in [lab/corpus](../lab/corpus) describe the
scenarios.
"""
NOT_COVERED = """\
* Accelerators of a real cluster. The devices are synthetic, or emulated next to real processes.
* Faults without a scenario in the corpus.
* Parameters are drawn from seeds. The analysis is developed on the split dev only. Runs of the
  split test are never examined, except through these tables.
* Runs that other load disturbed by more than 5 % of the CPU time of the machine are left out of the
  targets.
"""
MISSING = """\
* Planned runs that could not be made count as neither right nor wrong:
"""
REDO = """## How to repeat it

```
make score                     # a slice of the corpus, split dev, all tools: minutes
make score SPLIT=test          # the same on seeds that are not used for tuning
make score-full SPLIT=test     # everything, real processes too (root; hours); then `make docs`
make score-sabotage            # the score must notice three faults put into the attribution
```

[lab/README.md](../lab/README.md) shows how to score another tool on the same runs.
"""


def make_headline(shown: Sequence[Column]) -> str:
    """Return the few figures that matter most, ours beside the best of the others."""
    if not shown:
        return ""
    document = shown[0][0]
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
        for column in shown:
            ours = _list_figures(column, TOOL)[figure]
            if ours["value"] is not None:
                lines.append(
                    [
                        f"{words} ({column[1]})",
                        _write_figure(figure, ours),
                        _find_best(column, figure),
                    ]
                )
    for figure, words in (
        ("inversions", "a rank that only waited is blamed first"),
        ("false_on_nulls", "a fault is reported in a healthy job"),
    ):
        for column in shown:
            ours = _list_figures(column, TOOL)[figure]
            if ours["value"] is not None:
                lines.append([f"{words} ({column[1]})", _write_figure(figure, ours), ""])
    return "\n".join([*out, markdown.format_table(["", TOOL, "best of the others"], lines)])


def _list_figures(column: Column, tool: str) -> dict[str, Any]:
    [score] = markdown.list_scores(column[0], testbed=column[1], tool=tool, mode="M0")
    figures: dict[str, Any] = score["figures"]
    return figures


def _write_figure(figure: str, measured: dict[str, Any]) -> str:
    return markdown.format_figure(measured, markdown.LINES[figure][1])


def _find_best(column: Column, figure: str) -> str:
    """Return who does best of the others that answer at least half as often as we do."""
    least = _list_figures(column, TOOL)[figure]["n"] / 2
    others = [
        (score["figures"][figure]["value"], score["tool"], score["figures"][figure])
        for score in markdown.list_scores(column[0], testbed=column[1], mode="M0")
        if score["tool"] != TOOL
        and score["figures"][figure]["value"] is not None
        and score["figures"][figure]["n"] >= least
    ]
    if not others:
        return markdown.NO_TRIAL
    _, tool, best = max(others, key=lambda other: other[:2])
    return f"{_write_figure(figure, best)} {tool}"
