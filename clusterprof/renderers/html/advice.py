"""What to do about a finding: the remedies its evidence speaks for, or that none fits."""

from __future__ import annotations

from clusterprof.advice import EFFORTS, Advice
from clusterprof.findings import Finding
from clusterprof.renderers import changes
from clusterprof.renderers.html.tags import Markup, tag
from clusterprof.renderers.text_safety import safe_text

_FIELDS = (
    ("because", "Because"),
    ("gain", "What it wins"),
    ("verify", "How to see that it worked"),
    ("worse", "What it may make worse"),
)


def advice_of(finding: Finding) -> tuple[Advice, ...]:
    """Return the advice of a finding, or where to read on when none fits."""
    if finding.advice:
        return finding.advice
    look = f"clusterprof explain {safe_text(finding.cause.id, 60)}"
    return (Advice("No remedy fits what was measured.", "", look, "", "", ""),)


def remedies(finding: Finding) -> Markup:
    """Return everything to do about a finding, the best first."""
    return tag("ol", *(tag("li", *_remedy(one)) for one in advice_of(finding)), class_="advice")


def _remedy(one: Advice) -> list[Markup | None]:
    told: list[Markup | None] = [tag("p", one.what, class_="do")]
    told += changed(one)
    rows = []
    asks = EFFORTS.get(one.effort, "")
    if asks:
        rows.append(tag("div", tag("dt", "Effort"), tag("dd", asks)))
    for field, label in _FIELDS:
        said = getattr(one, field)
        if said:
            rows.append(tag("div", tag("dt", label), tag("dd", said)))
    return [*told, tag("dl", *rows, class_="facts")] if rows else told


def changed(one: Advice) -> list[Markup | None]:
    """Return what to change in a sentence, and below it what is pasted as it is."""
    if not one.commands:
        return [change(one.change)]
    told = [tag("code", text) if is_command else text for is_command, text in changes.pieces(one)]
    alone = list(one.commands) == [one.change]
    return [None if alone else tag("p", *told), change("\n".join(one.commands))]


def change(command: str) -> Markup | None:
    """Return a command or an edit in a block that can be copied, line by line as it was given."""
    if not command:
        return None
    # `safe_text` would spell the ends of lines out; each line passes it by itself
    lines = [safe_text(line, 400) for line in command.splitlines()[:40]]
    code: list[Markup | str] = []
    for at, line in enumerate(lines):
        code += [Markup("\n"), line] if at else [line]
    return tag("pre", tag("code", *code), class_="copy")
