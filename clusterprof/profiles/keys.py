"""The keys a profile may have, what each may hold, and the value when nobody sets it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from clusterprof.errors import UsageError
from clusterprof.units import parse_quantity, unit_of


@dataclass(frozen=True, slots=True)
class Key:
    """What one key of a profile may hold; `read` returns the value or raises ValueError."""

    default: Any
    read: Callable[[Any], Any]


def nearest(word: str, known: Iterable[str]) -> str:
    """Return '; did you mean "x"?' for a word that is close to a known one, else the choices."""
    choices = [str(choice) for choice in known]
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(sorted(choices)[:12])}" if choices else ""


def _number(at_least: float, at_most: float = math.inf) -> Callable[[Any], float]:
    def read(raw: Any) -> float:
        if isinstance(raw, bool) or not isinstance(raw, (int, float)) or not math.isfinite(raw):
            raise ValueError("must be a number")
        if not at_least <= raw <= at_most:
            limit = f"from {at_least:g} to {at_most:g}" if math.isfinite(at_most) else "0 or more"
            raise ValueError(f"must be {limit}")
        return float(raw)

    return read


def _optional_number(raw: Any) -> float | None:
    return None if raw is None else _number(0)(raw)


def _count(raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or raw < 0:
        raise ValueError("must be a whole number, 0 or more")
    return raw


def _size(raw: Any) -> int:
    if not isinstance(raw, str):
        return _count(raw)
    value, unit = parse_quantity(raw)
    if unit not in ("bytes", "") or value < 0 or value != int(value):
        raise ValueError("must be a size such as 64 MiB")
    return int(value)


def _ratio(raw: Any) -> float:
    if isinstance(raw, str):
        raw, unit = parse_quantity(raw)
        if unit not in ("ratio", ""):
            raise ValueError("must be a ratio such as 0.9 or 90%")
    return _number(0, 1)(raw)


def _boolean(raw: Any) -> bool:
    if not isinstance(raw, bool):
        raise ValueError("must be true or false")
    return raw


def _text(raw: Any) -> str:
    if not isinstance(raw, str):
        raise ValueError("must be text")
    return raw


def _texts(raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(item, str) for item in raw):
        raise ValueError("must be a list of texts, each in quotes")
    return tuple(raw)


def _choice(*words: str) -> Callable[[Any], str]:
    def read(raw: Any) -> str:
        if raw not in words:
            raise ValueError(f"must be one of {', '.join(words)}{nearest(str(raw), words)}")
        return str(raw)

    return read


def _limit(raw: Any) -> Any:
    if not isinstance(raw, (bool, int, float, str)):
        raise ValueError("must be a number, or a number with its unit")
    return raw


KEYS: dict[str, Key] = {
    "extends": Key("", _text),
    "sampling.hz": Key(10.0, _number(0.01, 1000)),
    "sampling.gpm": Key(False, _boolean),
    "sampling.collectors.*.enabled": Key(True, _boolean),
    "sampling.collectors.*.hz": Key(None, _number(0.001, 1000)),
    "recording.segment_bytes": Key(64 << 20, _size),
    "recording.max_bytes": Key(2 << 30, _size),
    "recording.keep_free_bytes": Key(256 << 20, _size),
    "facts.gpu_price_per_hour": Key(None, _optional_number),
    "facts.currency": Key("USD", _text),
    "limits.*.*": Key(None, _limit),
    "gate.assertions": Key((), _texts),
    "gate.regressions": Key((), _texts),
    "gate.min_steps": Key(20, _count),
    "gate.min_coverage_ratio": Key(0.9, _ratio),
    "gate.max_damaged_bytes": Key(64 << 10, _size),
    "gate.max_dropped_spans": Key(100, _count),
    "gate.min_ranks_ratio": Key(1.0, _ratio),
    "gate.between_runs_ratio": Key(0.005, _ratio),
    "gate.aggregate": Key("median", _choice("median", "pessimistic", "optimistic")),
    "gate.allow_unlike": Key((), _texts),
    "gate.on_inconclusive": Key("fail", _choice("fail", "warn", "pass")),
}


def read_limit(name: str, raw: Any, default: Any, where: str) -> Any:
    """Return a limit in the type of its default; raise UsageError that names its origin."""
    try:
        if isinstance(raw, str) and not isinstance(default, str):
            raw, unit = parse_quantity(raw)
            if unit and unit != unit_of(name):
                raise ValueError(f"is written in {unit}, and {name} is in {unit_of(name)}")
            raw = int(raw) if isinstance(default, int) and raw == int(raw) else raw
        if isinstance(default, float):
            return _number(0)(raw)
        if isinstance(raw, bool) is not isinstance(default, bool) or not isinstance(
            raw, type(default)
        ):
            raise ValueError(f"must be of the kind of its default, {default!r}")
    except ValueError as error:
        raise UsageError(f"{where}: the limit {name} {error}") from None
    return raw
