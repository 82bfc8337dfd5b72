"""Values as JSON has them: safe strings, numbers that are numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from clusterprof.renderers.text_safety import safe_text

_LONG = 4096  # characters of one foreign string


def text(foreign: str) -> str:
    """Return a foreign string without what controls, hides or reorders."""
    return safe_text(foreign, _LONG)


def number(value: float | None) -> float | None:
    """JSON has no NaN and no infinity; a number that is none is not known."""
    return value if value is not None and math.isfinite(value) else None


def reasons(some: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return (reason, ns) as objects."""
    return [{"reason": text(reason), "ns": ns} for reason, ns in some]
