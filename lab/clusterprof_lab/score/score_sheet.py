"""`score.md`, all of one score, and the part of it that is printed."""

from __future__ import annotations

from clusterprof_lab.score import legs, lists, markdown
from clusterprof_lab.score.markdown import OF_CAUSES, OF_CULPRITS, Document
from clusterprof_lab.score.ours import TOOL


def summary(document: Document) -> str:
    """Return what is printed: runs, targets, all tools."""
    missing = markdown.not_run([document])
    out = [
        markdown.runs([document]),
        *([missing] if missing else []),
        "## Legs, worst first\n",
        legs.write_legs(legs.list_legs(markdown.columns([document]), [])),
        "## Targets\n",
        markdown.targets([document]),
    ]
    for testbed in dict.fromkeys(score["testbed"] for score in document["scores"]):
        out += [f"## All tools, {testbed}: 95 % interval; runs\n"]
        out += [markdown.tools(document, testbed, names) for names in (OF_CAUSES, OF_CULPRITS)]
    return "\n".join(out)


def score_page(document: Document) -> str:
    """Return the whole of `score.md`."""
    out = [
        f"# Score of clusterprof {document['clusterprof']}, {document['date']}\n",
        f"Split {document['split']}, {document['slice']}, {document['seconds']} s.\n",
        summary(document),
        markdown.versions(document),
    ]
    shown = markdown.columns([document])
    for testbed in dict.fromkeys(score["testbed"] for score in document["scores"]):
        out += [f"## Modes, {testbed}\n", markdown.modes(document, testbed)]
        for score in markdown.scores_of(document, testbed=testbed, tool=TOOL, mode="M0"):
            out += [f"## Confusion, {testbed}\n", markdown.confusion(score)]
    out += ["## Off by, points, by group\n", markdown.by_cause(shown)]
    out += ["## Scenarios: group · leaf · culprit · points off\n", markdown.scenarios(shown)]
    out += ["## A signal less\n", lists.ablation(document)]
    out += ["## Wrong\n", lists.wrongs(document)]
    return "\n".join(out)
