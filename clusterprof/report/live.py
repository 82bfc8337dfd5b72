"""What `clusterprof top` shows of a job: its last minute, and how it is being recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from clusterprof.findings import Report

State = Literal["recording", "silent", "ended", "gone"]
"""Writing; quiet for longer than a recorder is; stopped, and said so; its files cannot be read."""


@dataclass(frozen=True, slots=True)
class NodeLive:
    """One recorder as it is now."""

    name: str
    """Display name of the node."""
    key: str
    """Name of its folder in the recording."""
    state: State
    age_ns: int | None
    """Time since its last record; None when it has none, or nobody knows."""
    why: str = ""
    """Why it ended, cannot write, or cannot be read; "" while all is well."""
    damaged_bytes: int = 0
    """Bytes that could not be read."""


@dataclass(frozen=True, slots=True)
class RankLive:
    """One rank in the window."""

    node_key: str
    busy_ratio: float | None
    """Share of the window in which its device had work; None when no device was sampled."""
    sm_active_ratio: float | None
    """Mean share of the multiprocessors with work; None when it is not recorded."""
    step_ns: int | None
    """Median of the steps that ended in the window; None when none did."""
    since_step_ns: int | None
    """Time since its last step ended; None when none was seen."""


@dataclass(frozen=True, slots=True)
class Live:
    """The last minute of a job, and how it is being recorded."""

    title: str
    """The recording's path as the user gave it."""
    window_ns: int
    """What is looked at: the time before the newest record of any node."""
    age_ns: int | None
    """Time since that record; None when there is none."""
    nodes: tuple[NodeLive, ...]
    report: Report
    """The window analysed as a recording is, all its ranks laid side by side."""
    ranks: Mapping[tuple[str, int], RankLive]
    """By node (display name) and process id, as in `report.ranks`."""
    trouble: str = ""
    """Why the window could not be analysed; "" when it was."""

    @property
    def ended(self) -> bool:
        """True when no recorder is left that could write."""
        return bool(self.nodes) and all(one.state in ("ended", "gone") for one in self.nodes)
