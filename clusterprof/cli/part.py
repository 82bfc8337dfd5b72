"""`--since`, `--until` and `--steps`: the part of a run that is looked at."""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING

from clusterprof.errors import UsageError

if TYPE_CHECKING:
    from clusterprof.engine.part import Instant, PartOfRun

TIME_HELP = "90s, 1h30m, 4:05 after the start of the run, or 2026-01-31T12:00:00."
_UNITS = {"h": 3600.0, "m": 60.0, "min": 60.0, "s": 1.0, "": 1.0, "ms": 1e-3}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(h|min|ms|m|s|)", re.ASCII)
_CLOCK = re.compile(r"(?:([0-9]+):)?([0-9]{1,2}):([0-9]{2}(?:\.[0-9]+)?)", re.ASCII)
_STEPS = re.compile(r"([0-9]*):([0-9]*)", re.ASCII)
_LONGEST_S = 1e9


def part_of(since: str | None, until: str | None, steps: str | None) -> PartOfRun:
    """Return what the options ask for; raises UsageError for what they cannot mean."""
    from clusterprof.engine.part import PartOfRun

    first, end = _steps(steps)
    begin, stop = (_instant(text, name) for text, name in ((since, "since"), (until, "until")))
    if begin and stop and begin.is_wall == stop.is_wall and begin.ns >= stop.ns:
        raise UsageError(f"--since {since} is not before --until {until}")
    asked = (("since", since), ("until", until), ("steps", steps))
    said = ", ".join(f"--{name} {text}" for name, text in asked if text)
    return PartOfRun(begin, stop, first, end, said)


def _instant(text: str | None, name: str) -> Instant | None:
    from clusterprof.engine.part import Instant

    if text is None:
        return None
    seconds = _offset(text.strip())
    if seconds is not None and seconds <= _LONGEST_S:
        return Instant(round(seconds * 1e9))
    try:
        when = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
        return Instant(round(when.timestamp() * 1e6) * 1000, is_wall=True)
    except (ValueError, OverflowError, OSError):
        raise UsageError(f"--{name} {text!r} is no time", f"give {TIME_HELP}") from None


def _offset(text: str) -> float | None:
    """Seconds of 90, 90s, 1.5m, 1h30m, 4:05, 1:02:09; None for anything else."""
    found = _CLOCK.fullmatch(text)
    if found:
        hours, minutes, seconds = found.groups()
        return int(hours or 0) * 3600.0 + int(minutes) * 60.0 + float(seconds)
    parts = [match.groups() for match in _PART.finditer(text)]
    if (
        not parts
        or _PART.sub("", text).strip()
        or (len(parts) > 1 and not all(u for _, u in parts))
    ):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def _steps(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    found = _STEPS.fullmatch(text.strip())
    if found is None or not any(found.groups()):
        raise UsageError(
            f"--steps {text!r} is no range of steps", "give A:B, A: or :B; B is left out"
        )
    first, end = (int(number) if number else None for number in found.groups())
    if first is not None and end is not None and first >= end:
        raise UsageError(f"--steps {text} holds no step", "give A:B with A before B; B is left out")
    return first, end
