"""Instants as foreign files write them, in ns."""

from __future__ import annotations

import math
from datetime import datetime, timezone

LATEST_NS = 1 << 62
_UNITS = ((1e17, 1), (1e14, 1_000), (1e11, 1_000_000))


def epoch_ns(value: float) -> int | None:
    """Return the ns of a Unix time in s, ms, µs or ns, told by its size; None for none at all.

    Seconds reach 1e11 in the year 5138, and ms were that many in 1973: no reading is mistaken.
    """
    if not math.isfinite(value) or value < 0:
        return None
    scale = next((scale for least, scale in _UNITS if value >= least), 1_000_000_000)
    whole = int(value)
    ns = whole * scale + round((value - whole) * scale)
    return ns if ns < LATEST_NS else None


def time_ns(text: str) -> tuple[int, bool] | None:
    """Return the ns of a time in digits or by the calendar, and whether its zone is known.

    `2026/01/06 15:13:03.389`, `2026-01-06T15:13:03Z`, `1767712383.4`; None for anything else.
    """
    text = text.strip()
    try:
        ns = epoch_ns(float(text))
    except ValueError:
        pass
    else:
        return None if ns is None else (ns, True)
    if len(text) > 64 or not text[:4].isdigit():
        return None
    try:
        when = datetime.fromisoformat(_iso(text))
    except ValueError:
        return None
    known = when.tzinfo is not None
    since = when.replace(tzinfo=when.tzinfo or timezone.utc) - _EPOCH
    ns = (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1_000
    return (ns, known) if 0 <= ns < LATEST_NS else None


_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def _iso(text: str) -> str:
    """What Python 3.10 reads as well: `-` in the date, six digits of a second, a zone in digits."""
    text = text.replace("/", "-", 2).replace("Z", "+00:00")
    head, dot, tail = text.partition(".")
    digits = len(tail) - len(tail.lstrip("0123456789"))
    return head + (f".{tail[:digits][:6]:0<6}{tail[digits:]}" if dot else "")
