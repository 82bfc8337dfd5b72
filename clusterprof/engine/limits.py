"""The limits of causes, bound: defaults of each detector, changed by what a profile says."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from clusterprof.detectors.network import LIMITS as NETWORK_LIMITS
from clusterprof.detectors.registry import DETECTORS
from clusterprof.errors import UsageError


def bound(limits: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return one limits object per cause id; raises UsageError with the nearest known name."""
    known_causes = known_limits()
    for id_ in limits:
        if id_ not in known_causes:
            raise UsageError(f"limits: there is no cause {id_!r}{_nearest(id_, known_causes)}")
    out = {}
    for id_, kind in known_causes.items():
        values = limits.get(id_, {})
        known = {field.name for field in fields(kind)}
        for key in values:
            if key not in known:
                raise UsageError(f"limits.{id_}: there is no limit {key!r}{_nearest(key, known)}")
        out[id_] = kind(**values)
    return out


def known_limits() -> dict[str, type]:
    """Return the class of limits of every cause that has one, by cause id."""
    return {**{one.cause.id: one.Limits for one in DETECTORS}, **NETWORK_LIMITS}


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
