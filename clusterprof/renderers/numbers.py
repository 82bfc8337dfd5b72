"""The numbers behind a claim, as every output writes them."""

from __future__ import annotations

import math

from clusterprof.findings import Evidence
from clusterprof.renderers.text_safety import safe_text
from clusterprof.units import human

_SMALLEST_RATIO = 0.0005  # less would read "0.0 %"


def evidence(item: Evidence, with_note: bool = True) -> str:
    """Write one number a reader can check, and what it says."""
    note = f" ({safe_text(item.note)})" if item.note and with_note else ""
    return f"{safe_text(item.name, 60)} {number(item)}{note}"


def number(item: Evidence) -> str:
    """Write the number of a piece of evidence: little is not nothing, and what is none says so."""
    if not math.isfinite(item.value):
        return "not measured"
    if item.unit == "ratio" and 0 < item.value < _SMALLEST_RATIO:
        return f"below {human(2 * _SMALLEST_RATIO, 'ratio')}"
    return human(item.value, item.unit)
