"""What to do about a finding, in as few or as many words as an output has room for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from clusterprof.advice import EFFORTS, Advice
from clusterprof.findings import Finding, Report
from clusterprof.renderers.text_safety import markdown_text as md
from clusterprof.renderers.text_safety import safe_text

_LONG = 1000  # characters of a change, which may be a command


def first(finding: Finding) -> str:
    """Say in one sentence what to do first about a finding; where nothing is advised, that."""
    if finding.advice:
        return safe_text(finding.advice[0].what, 600)
    id_ = safe_text(finding.cause.id, 60)
    return f"nothing: no remedy fits what was measured (clusterprof explain {id_})"


def change(finding: Finding) -> str:
    """Return the edit or command of the first advice; "" where nothing is advised."""
    return safe_text(finding.advice[0].change, _LONG) if finding.advice else ""


def effort(finding: Finding) -> str:
    """Say what the first advice asks of a person; "" where nothing is advised."""
    return EFFORTS.get(finding.advice[0].effort, "") if finding.advice else ""


def more(finding: Finding) -> str:
    """Name what else is advised; "" for nothing."""
    return "; ".join(safe_text(one.what, 300) for one in finding.advice[1:])


def withheld(finding: Finding) -> list[str]:
    """Say what a reader may expect to be advised and why it is not; no full stops."""
    return [safe_text(one, 300) for one in finding.withheld]


def full(finding: Finding) -> Iterator[tuple[str, str, str]]:
    """Yield (what, label, text) of all advice, the labels in the order in which one reads them."""
    for one in finding.advice:
        what = safe_text(one.what, 600)
        for label, text in _parts(one):
            if text:
                yield what, label, safe_text(text, _LONG)


def _parts(one: Advice) -> tuple[tuple[str, str], ...]:
    return (
        ("change", one.change),
        ("effort", EFFORTS.get(one.effort, "")),
        ("because", one.because),
        ("gain", one.gain),
        ("verify", one.verify),
        ("makes worse", one.worse),
    )


def document(one: Advice, text: Callable[[str], str]) -> dict[str, Any]:
    """Return one remedy for JSON; `text` makes foreign strings safe."""
    return {
        "id": text(one.id),
        "what": text(one.what),
        "because": text(one.because),
        "change": text(one.change),
        "gain": text(one.gain),
        "verify": text(one.verify),
        "worse": text(one.worse),
        "diagnose": one.diagnose,
        "effort": text(one.effort),
        "commands": [text(command) for command in one.commands],
    }


def markdown(report: Report) -> Iterator[str]:
    """Yield all advice as a list that folds away; nothing where there is none."""
    if not any(finding.advice for finding in report.findings):
        return
    yield from ("", "<details><summary>What to do, in full</summary>", "")
    for finding in report.findings:
        last = ""
        for what, label, text in full(finding):
            if what != last:
                yield f"- **{md(finding.cause.id)}**: {md(what, 600)}"
                last = what
            yield f"  - {label}: {md(text, _LONG)}"
    yield from ("", "</details>")
