"""Analyse a recording on this machine: one node at a time, one chunk at a time.

    report = analyze(Path("clusterprof-20260101-120000"))
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from clusterprof.findings import Report

_NONE: Mapping[str, Any] = MappingProxyType({})


def analyze(
    path: Path,
    *,
    jobs: int = 1,
    limits: Mapping[str, Mapping[str, Any]] = _NONE,
    facts: Mapping[str, Any] = _NONE,
) -> Report:
    """Say where the device time of a recording went, and why what was lost was lost.

    `jobs` processes share the nodes. `limits` holds the limits of causes by cause id, as a
    profile gives them; an unknown id or key raises `UsageError`. `facts` are those of the site.
    Raises `NoRecording` when there is nothing to read.
    """
    raise NotImplementedError
