"""Whether two runs may be compared at all; if not, the field in which they differ is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clusterprof.errors import UsageError
from clusterprof.findings import Report
from clusterprof.likeness import Likeness

FIELDS = {
    "facts": "what is known of the runs at all",
    "order": "a baseline is older than what is held against it",
    "emulated": "emulated or real accelerators",
    "gpu-model": "models of the accelerators, and how many of each",
    "nodes": "machines",
    "world-size": "ranks of the job",
    "batch-size": "samples of a rank and step",
    "tokens": "tokens of a rank and step",
    "measured-by": "where lost time was measured",
    "length": "steps of the run: neither is twice as long as the other",
}
"""What may be given to `--allow-unlike`. That a run is its own baseline is never allowed."""
_SAME_SIZE = 0.01
_SAME_TOKENS = 0.1  # padding moves it
_LONGER = 2


@dataclass(frozen=True, slots=True)
class Unlike:
    """One field in which two runs differ."""

    field: str
    """A key of `FIELDS`, "recording", or the name of what only a warning is about."""
    text: str
    """How, for people."""
    refused: bool
    """False for what is only said."""


def allowed(fields: Sequence[str]) -> tuple[str, ...]:
    """Return the fields if all are known; UsageError for one that is not."""
    for field in fields:
        if field not in FIELDS:
            raise UsageError(
                f"--allow-unlike {field!r} is no field that is compared",
                f"fields are {', '.join(FIELDS)}",
            )
    return tuple(fields)


def unlike(ours: Report, theirs: Report, allow: Sequence[str] = ()) -> tuple[Unlike, ...]:
    """Return in what a run differs from its baseline; what is refused first.

    A field in `allow` is only told, not refused.
    """
    a, b = ours.likeness, theirs.likeness
    if a is None or b is None:
        found = [Unlike("facts", "the report does not say what kind of run it was", True)]
    else:
        found = [*_same(a, b), *_order(a, b), *_facts(a, b), *_told(a, b)]
    found += _different("emulated", _kind(ours), _kind(theirs))
    found += _lengths(ours, theirs)
    out = [Unlike(one.field, one.text, one.refused and one.field not in allow) for one in found]
    return tuple(sorted(out, key=lambda one: not one.refused))


def _same(a: Likeness, b: Likeness) -> list[Unlike]:
    if a.recordings and set(a.recordings) & set(b.recordings):
        return [Unlike("recording", "candidate and baseline are the same recording", True)]
    return []


def _order(a: Likeness, b: Likeness) -> list[Unlike]:
    if a.started_at_ns is None or b.started_at_ns is None:
        return []
    ahead_s = (b.started_at_ns - a.started_at_ns) / 1e9
    if ahead_s <= 0:
        return []
    text = f"the baseline was recorded {_long(ahead_s)} after this run: are the two swapped?"
    return [Unlike("order", text, True)]


def _facts(a: Likeness, b: Likeness) -> list[Unlike]:
    return [
        *_different("gpu-model", _models(a), _models(b)),
        *_different("nodes", a.nodes, b.nodes),
        *_different("world-size", a.world_size, b.world_size),
        *_sizes("batch-size", a.batch_size, b.batch_size, _SAME_SIZE),
        *_sizes("tokens", a.tokens, b.tokens, _SAME_TOKENS),
        *_different("measured-by", " ".join(a.measured_by), " ".join(b.measured_by)),
    ]


def _told(a: Likeness, b: Likeness) -> list[Unlike]:
    """Only a warning: a new version is what many a gate is there to test."""
    versions = (
        ("frameworks", _pairs(a.frameworks), _pairs(b.frameworks)),
        ("driver", " ".join(a.drivers), " ".join(b.drivers)),
        ("recorder", " ".join(a.recorder), " ".join(b.recorder)),
        ("restarts", a.restarts, b.restarts),
    )
    found = [one for name, ours, theirs in versions for one in _different(name, ours, theirs)]
    return [Unlike(one.field, one.text, False) for one in found]


def _different(field: str, ours: object, theirs: object) -> list[Unlike]:
    if ours == theirs:
        return []
    return [Unlike(field, f"{field}: {_said(theirs)} in the baseline, {_said(ours)} now", True)]


def _said(value: object) -> str:
    return "not known" if value is None or value == "" else f"{value}"


def _sizes(field: str, ours: float | None, theirs: float | None, same: float) -> list[Unlike]:
    if ours is not None and theirs is not None and abs(ours - theirs) <= same * theirs:
        return []
    shown = [None if one is None else f"{one:,.4g}" for one in (ours, theirs)]
    return _different(field, *shown)


def _lengths(ours: Report, theirs: Report) -> list[Unlike]:
    a, b = (min((rank.steps for rank in one.ranks), default=0) for one in (ours, theirs))
    if max(a, b) <= _LONGER * min(a, b):
        return []
    return [Unlike("length", f"length: {b:,} steps in the baseline, {a:,} now", True)]


def _kind(report: Report) -> str:
    return "emulated accelerators" if report.emulated else "real ones"


def _models(one: Likeness) -> str:
    return ", ".join(f"{count} × {model}" for model, count in one.gpu_models)


def _pairs(versions: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions)


def _long(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
