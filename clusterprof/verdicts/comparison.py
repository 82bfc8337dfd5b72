"""A comparison of two runs: as text that fits a terminal, as Markdown, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from clusterprof.gate.compare import WORTH_RATIO, Comparison, Row
from clusterprof.renderers.text_safety import fit, markdown_text, safe_text, wrap
from clusterprof.units import human
from clusterprof.verdicts.json_ import SCHEMA_VERSION, number, rules
from clusterprof.verdicts.text import plain as plain_verdict

_MOST_BLAMED = 3
_COLORS = {"more": "\x1b[31m", "less": "\x1b[32m"}
_RESET = "\x1b[0m"
_NAME, _TIME, _RANGE = 21, 8, 18


def terminal(found: Comparison, width: int = 80, color: bool = False) -> str:
    """Return headline, table and what to know of it, in at most `width` columns where it can be."""
    lines: list[str] = []
    for sentence in headline(found):
        lines += wrap(safe_text(sentence, 600), width)
    lines.append("")
    for label, one in (("A, the baseline:   ", found.a), ("B, held against it:", found.b)):
        room = width - len(label) - 3
        lines.append(f"  {label} {fit(safe_text(one.title), room).rstrip()}")
    lines.append("")
    unit, ns = _unit(found)
    head = f"{f'{unit} per step':<{_NAME}}{'A':>{_TIME}}{'B':>{_TIME}}{'B - A':>{_TIME}}"
    lines.append(f"{head}{'95 % sure within':>{_RANGE}}")
    lines += [_line(row, ns, color) for row in (found.step, *found.rows)]
    lines += wrap(legend(found), width)
    changed = _changed(found)
    lines += [""] if changed else []
    for row in changed:
        what = f"{row.name}: {row.title}" if row.title else row.name
        whose = f" ({row.whose})" if row.whose else ""
        first, *rest = wrap(safe_text(what + whose, 400), width - 2) or [""]
        lines += [first, *(f"  {line}" for line in rest)]
    told = [*(("unlike: " if one.refused else "note: ") + one.text for one in found.unlike)]
    for text in (*told, *found.doubts):
        lines += ["", *wrap(safe_text(text, 1000), width)]
    out = "\n".join(lines) + "\n"
    return out if found.verdict is None else f"{out}\n{plain_verdict(found.verdict)}"


def markdown(found: Comparison) -> str:
    """Return the same as Markdown."""
    return "\n".join(_markdown(found)) + "\n"


def comparison_json(found: Comparison) -> str:
    """Return the same as one JSON document; keys are only added."""
    verdict = found.verdict
    document = {
        "format": "clusterprof-compare",
        "schema_version": SCHEMA_VERSION,
        "a": safe_text(found.a.title, 4096),
        "b": safe_text(found.b.title, 4096),
        "says": [safe_text(text, 4096) for text in headline(found)],
        "step": _row(found.step),
        "parts": [_row(row) for row in found.rows],
        "unlike": [
            {"field": one.field, "refused": one.refused, "text": safe_text(one.text, 4096)}
            for one in found.unlike
        ],
        "doubts": [safe_text(text, 4096) for text in found.doubts],
        "outcome": None if verdict is None else verdict.outcome,
        "exit_code": 0 if verdict is None else verdict.exit_code,
        "rules": [] if verdict is None else rules(verdict.results),
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def headline(found: Comparison) -> Iterator[str]:
    """Say what became of the step, and what of that is whose doing."""
    step = found.step
    if step.said in ("more", "less"):
        share = step.difference_ns / step.a_ns if step.a_ns else 0.0
        longer = "longer" if step.difference_ns > 0 else "shorter"
        yield f"A step is {_size(step.difference_ns)} {longer} in B ({100 * share:+.1f} %)."
    elif step.said == "the same":
        yield f"A step takes as long in B as in A ({_signed(step.difference_ns)})."
    else:
        why = "is within chance" if step.said == "within chance" else "cannot be judged: few steps"
        yield f"The difference of a step ({_signed(step.difference_ns)}) {why}."
    changed = _changed(found)
    blamed = changed[:_MOST_BLAMED]
    if blamed:
        parts = [f"{row.name} {_signed(row.difference_ns)}" for row in blamed]
        more = f" and {len(changed) - len(blamed)} more" if len(changed) > len(blamed) else ""
        yield f"What changed: {', '.join(parts)}{more}."
    else:
        yield "No cause changed by more than chance explains."
    refused = [one.field for one in found.unlike if one.refused]
    if refused:
        yield f"Take care: the runs are unlike ({', '.join(refused)}), see below."


def legend(found: Comparison) -> str:
    """Say what the words behind the rows mean, of those that are there."""
    words = {row.said for row in (found.step, *found.rows)}
    told = []
    if words & {"more", "less"}:
        told.append("more, less: beyond what chance explains.")
    if "within chance" in words:
        told.append("within chance: perhaps no difference at all.")
    if "the same" in words:
        told.append(f"the same: for certain less than {200 * WORTH_RATIO:.0f} % of a step apart.")
    if "cannot tell" in words:
        told.append("cannot tell: too few steps to know what chance does.")
    return " ".join(told)


def _changed(found: Comparison) -> list[Row]:
    return [row for row in found.rows if row.said in ("more", "less")]


def _unit(found: Comparison) -> tuple[str, float]:
    """The unit in which the times of a table are easy to compare, and its length."""
    longest = max(found.step.a_ns, found.step.b_ns)
    return ("s", 1e9) if longest >= 1e10 else ("ms", 1e6) if longest >= 1e7 else ("µs", 1e3)


def _line(row: Row, ns: float, color: bool) -> str:
    name = fit(safe_text(row.name), _NAME - 1)
    text = f"{name} {row.a_ns / ns:>{_TIME}.2f}{row.b_ns / ns:>{_TIME}.2f}"
    low, high = row.low_ns, row.high_ns
    known = low is not None and high is not None
    interval = f"{low / ns:+.2f} to {high / ns:+.2f}" if known else ""  # type: ignore[operator]
    text += f"{row.difference_ns / ns:>+{_TIME}.2f}{interval:>{_RANGE}}  "
    start = _COLORS.get(row.said, "") if color else ""
    return f"{text}{start}{row.said}{_RESET if start else ''}"


def _markdown(found: Comparison) -> Iterator[str]:
    md = markdown_text
    yield "<!-- clusterprof:compare -->"
    yield "### clusterprof: what changed"
    for sentence in headline(found):
        yield from ("", md(sentence, 600))
    yield from ("", f"A: {md(found.a.title)}, B: {md(found.b.title)}; times per step of a rank", "")
    yield "| | A | B | B - A | 95 % sure within | | whose |"
    yield "|---|---:|---:|---:|---:|---|---|"
    for row in (found.step, *found.rows):
        bold = "**" if row.said in ("more", "less") else ""
        cells = (f"{bold}{md(row.name)}{bold}", human(row.a_ns, "ns"), human(row.b_ns, "ns"))
        rest = (_signed(row.difference_ns), _interval(row), row.said, md(row.whose))
        yield f"| {' | '.join((*cells, *rest))} |"
    yield from ("", md(legend(found), 600))
    for one in found.unlike:
        yield from ("", f"> {'unlike' if one.refused else 'note'}: {md(one.text, 600)}")
    for text in found.doubts:
        yield from ("", f"> {md(text, 600)}")
    if found.verdict is not None:
        yield ""
        yield from (f"- {md(line.strip(), 1000)}" for line in found.verdict.lines)


def _row(row: Row) -> dict[str, Any]:
    return {
        "name": safe_text(row.name, 4096),
        "title": safe_text(row.title, 4096),
        "a_ns": number(row.a_ns),
        "b_ns": number(row.b_ns),
        "difference_ns": number(row.difference_ns),
        "low_ns": number(row.low_ns),
        "high_ns": number(row.high_ns),
        "says": row.said,
        "whose": safe_text(row.whose, 4096),
    }


def _interval(row: Row) -> str:
    if row.low_ns is None or row.high_ns is None:
        return ""
    return f"{_signed(row.low_ns)} to {_signed(row.high_ns)}"


def _size(ns: float) -> str:
    return human(abs(ns), "ns")


def _signed(ns: float) -> str:
    return f"{'-' if ns < 0 else '+'}{_size(ns)}"
