"""The page of a cause in full: how it is decided, its remedies, how to verify it by hand."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from clusterprof.advice import EFFORTS
from clusterprof.attribution.confidence import NAMED_FROM
from clusterprof.detectors.pages import page as detector_page
from clusterprof.detectors.peers import PEER_CAUSES
from clusterprof.detectors.registry import DETECTORS
from clusterprof.findings import Cause
from clusterprof.remedies.base import Rule
from clusterprof.remedies.by_hand import BY_HAND
from clusterprof.remedies.diagnose import DIAGNOSES
from clusterprof.remedies.registry import NOTHING_LOST, WITHOUT, remedies_of

LEAVES: tuple[Cause, ...] = (*(one.cause for one in DETECTORS), *PEER_CAUSES)
"""Every cause with a page."""


def page(cause_id: str) -> str:
    """Return the page of one cause as Markdown; raises KeyError for an id that is none."""
    text = detector_page(cause_id).rstrip("\n")
    body, mark, limits = text.partition("\n\nA profile changes limits under ")
    parts = [body, _remedies(cause_id), _by_hand(cause_id)]
    return "\n\n".join(parts) + mark + limits + "\n"


def family_page(family: str) -> str:
    """Return what is said where only the family of a cause could be told; KeyError for none."""
    members = [cause for cause in LEAVES if cause.family == family]
    if not members:
        raise KeyError(family)
    lines = [
        f"# {family}: a family of causes, said when the cause itself cannot be told",
        "",
        *(f"{cause.id:<21} {cause.title}" for cause in members),
        "",
        "## What to record to learn the cause",
        "",
    ]
    for one in DIAGNOSES:
        lines += [_wrapped(f"* **{one.id}**: {one.what}: {one.how}."), *_left_out(one.unless)]
    return "\n".join(lines) + "\n"


def listing() -> str:
    """Return all causes by family, a line each."""
    families: dict[str, list[Cause]] = {}
    for cause in LEAVES:
        families.setdefault(cause.family, []).append(cause)
    lines = []
    for family, causes in families.items():
        lines += [f"{family}:", *(f"  {cause.id:<21} {cause.title}" for cause in causes)]
    return "\n".join(lines) + "\n"


def _remedies(cause_id: str) -> str:
    found = remedies_of(cause_id)
    lines = ["## Remedies, the first to try first", ""]
    if not found:
        return "\n".join([*lines, _wrapped(WITHOUT[cause_id])])
    lines += [
        _wrapped(
            f"A report fills in the values of its run. Nothing is advised when"
            f" {NOTHING_LOST.words}. Below {NAMED_FROM:.0%} certainty a report says what to record"
            " instead. What asks least of a person comes first, and of equal efforts what a number"
            " of the run speaks for."
        ),
        "",
    ]
    for one in found:
        lines.append(_wrapped(f"* **{one.id}**: {one.what}: {one.how}."))
        told = (
            ("effort", EFFORTS[one.effort]),
            ("published gain", one.published),
            ("makes worse", one.worse),
            ("it worked when", one.moves),
        )
        lines += [_wrapped(f"  * {what}: {said}", "    ") for what, said in told if said]
        lines += _left_out(one.unless)
    return "\n".join(lines)


def _left_out(rules: Sequence[Rule]) -> list[str]:
    return [_wrapped(f"  * left out when {rule.words}", "    ") for rule in rules]


def _by_hand(cause_id: str) -> str:
    return f"## How to verify it by hand\n\n{_wrapped(BY_HAND[cause_id])}"


def _wrapped(text: str, hanging: str = "") -> str:
    """Lines of 100 characters, with words and commands whole."""
    hanging = hanging or ("  " if text.startswith("* ") else "")
    return "\n".join(
        wrap(text, 100, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
    )
