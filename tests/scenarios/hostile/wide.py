"""Reports in which every string that a machine may have chosen is hostile."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import count, cycle, islice
from typing import Any, Literal, get_args, get_origin, get_type_hints

from clusterprof.report.model import (
    Cause,
    CoverageGap,
    Culprit,
    Evidence,
    Finding,
    Metric,
    RankLedger,
    Report,
)
from tests.scenarios.hostile.strings import HOSTILE
from tests.support.reports import ALL, S, make_node, make_storage_report

AT_ONCE = 40
"""Strings that one wide report holds, each in every role."""
OURS = frozenset({"unit", "grade", "source", "bound", "kind", "currency"})
"""Fields whose values are our own words."""


def batches() -> list[list[str]]:
    """Return all strings, so many at a time; the last are filled up with the first."""
    endless = cycle(HOSTILE)
    return [list(islice(endless, AT_ONCE)) for _ in range(-(-len(HOSTILE) // AT_ONCE))]


def wide(strings: Sequence[str]) -> Report:
    """Every string as host, device, process, mount, file, metric, variable and cause at once."""
    ranks = tuple(
        RankLedger(
            text,
            at,
            100 + at,
            text,
            "device-samples",
            101 * S,
            0,
            S,
            100 * S,
            90 * S,
            10 * S,
            ((text, 8 * S), ("unattributed", 2 * S)),
            ((text, S),),
            40,
            1.0,
            ((text, 8 * S), ("unattributed", 2 * S)),
        )
        for at, text in enumerate(strings)
    )
    n = len(strings)
    findings = tuple(
        Finding(
            Cause(text, text, text, text),
            8 * S,
            0.08 / n,
            4 * S,
            0.9,
            "A",
            False,
            False,
            tuple(Culprit(who, at, who, who, S, S, 3, S) for who in strings[at : at + 4]),
            tuple(Evidence(name, 0.5, "ratio", name) for name in strings[at : at + 4]),
        )
        for at, text in enumerate(strings)
        if at % 4 == 0
    )
    return dataclasses.replace(
        make_storage_report(),
        title=strings[0],
        ranks=ranks,
        findings=findings,
        nodes=tuple(dataclasses.replace(make_node(text), key=text) for text in strings),
        window_ns=101 * S * n,
        outside_ns=S * n,
        in_step_ns=100 * S * n,
        unmeasured_ns=0,
        productive_ns=90 * S * n,
        lost_ns=10 * S * n,
        unattributed_ns=2 * S * n,
        unattributed_reasons=tuple((text, 2 * S) for text in strings),
        outside_buckets=tuple((text, S) for text in strings),
        metrics=tuple(
            Metric(text, 0.5 if at % 2 else None, "ratio", "" if at % 2 else text)
            for at, text in enumerate(strings)
        ),
        coverage_gaps=tuple(
            CoverageGap(text, "denied", f"{text}: {text}", text) for text in strings
        ),
        notes=tuple(f"LAUNCHER={text}" for text in strings) + tuple(strings),
    )


def reports() -> Iterator[Report]:
    """Yield wide reports of all strings, and every small report made by hand, poisoned."""
    yield from map(wide, batches())
    for at, (name, made) in enumerate(ALL.items()):
        if name != "cluster":  # 128 ranks: "two-nodes" has one of everything that they have
            yield poisoned(made(), islice(cycle(HOSTILE), 53 * at, None))


def poisoned(value: Any, strings: Iterator[str], ours: bool = False) -> Any:
    """Put the next string into every string of a report that is not one of our own words."""
    if isinstance(value, tuple):
        return tuple(poisoned(item, strings, ours) for item in value)
    if isinstance(value, str):
        return value if ours else next(strings)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = get_type_hints(type(value))
        changed = {
            field.name: poisoned(
                getattr(value, field.name),
                strings,
                field.name in OURS or _literal(hints[field.name]),
            )
            for field in dataclasses.fields(value)
            if field.init
        }
        return dataclasses.replace(value, **changed)
    return value


def _literal(hint: Any) -> bool:
    """True for a type of which only our own words are values."""
    return get_origin(hint) is Literal or any(get_origin(arg) is Literal for arg in get_args(hint))


def clean_like(report: Report) -> Report:
    """Return the same report with harmless strings, no two alike."""
    return poisoned(report, (f"word{number}" for number in count()))
