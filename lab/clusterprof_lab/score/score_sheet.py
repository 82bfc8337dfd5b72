"""`score.md`, all of one score, and the part of it that is printed."""

from __future__ import annotations

from clusterprof_lab.score import legs, lists, markdown
from clusterprof_lab.score.clusterprof_answer import TOOL
from clusterprof_lab.score.markdown import OF_CAUSES, OF_CULPRITS, Document


def format_summary(document: Document) -> str:
    """Return what is printed: runs, targets, all tools."""
    missing = markdown.format_not_run([document])
    out = [
        markdown.format_runs([document]),
        *([missing] if missing else []),
        "## Legs, worst first\n",
        legs.format_legs(legs.list_legs(markdown.list_columns([document]), [])),
        "## Targets\n",
        markdown.format_targets([document]),
    ]
    for testbed in dict.fromkeys(score["testbed"] for score in document["scores"]):
        out += [f"## All tools, {testbed}: 95 % interval; runs\n"]
        out += [
            markdown.format_tools(document, testbed, names) for names in (OF_CAUSES, OF_CULPRITS)
        ]
    return "\n".join(out)


def format_score_page(document: Document) -> str:
    """Return the whole of `score.md`."""
    out = [
        f"# Score of clusterprof {document['clusterprof']}, {document['date']}\n",
        f"Split {document['split']}, {document['slice']}, {document['seconds']} s.\n",
        format_summary(document),
        markdown.format_versions(document),
    ]
    shown = markdown.list_columns([document])
    for testbed in dict.fromkeys(score["testbed"] for score in document["scores"]):
        out += [f"## Modes, {testbed}\n", markdown.format_modes(document, testbed)]
        for score in markdown.list_scores(document, testbed=testbed, tool=TOOL, mode="M0"):
            out += [f"## Confusion, {testbed}\n", markdown.format_confusion(score)]
    out += ["## Off by, points, by group\n", markdown.format_by_cause(shown)]
    out += ["## Scenarios: group · leaf · culprit · points off\n", markdown.format_scenarios(shown)]
    out += ["## A signal less\n", lists.format_ablation(document)]
    out += ["## Wrong\n", lists.format_wrong_answers(document)]
    return "\n".join(out)
