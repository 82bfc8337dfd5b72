"""Define what `clusterprof top` shows of a job: its last minute, and the state of its
recorders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from clusterprof.report.model import Report

State = Literal["recording", "silent", "ended", "gone"]
"""State of a recorder: writing; quiet for longer than normal; stopped and said so;
unreadable files.
"""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """Current state of one recorder."""

    name: str
    """Display name of the node."""
    key: str
    """Name of its folder in the recording."""
    state: State
    age_ns: int | None
    """Time since its last record; None when it has none, or it is not known."""
    why: str = ""
    """Why it ended, cannot write or cannot be read; "" while it works."""
    damaged_bytes: int = 0
    """Bytes that could not be read."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Utilization and step time of one rank in the window."""

    node_key: str
    busy_ratio: float | None
    """Share of the window in which its device had work; None when no device was sampled."""
    sm_active_ratio: float | None
    """Mean share of the multiprocessors that were active; None when it is not recorded."""
    step_ns: int | None
    """Median of the steps that ended in the window; None when none did."""
    since_step_ns: int | None
    """Time since its last step ended; None when none was seen."""


@dataclass(frozen=True, slots=True)
class LiveView:
    """The last minute of a job, and the state of its recorders."""

    title: str
    """The recording's path as the user gave it."""
    window_ns: int
    """Length of the window, which ends at the newest record of any node."""
    age_ns: int | None
    """Time since that record; None when there is none."""
    nodes: tuple[NodeStatus, ...]
    report: Report
    """Analysis of the window, with all ranks of the job."""
    ranks: Mapping[tuple[str, int], RankStatus]
    """By node (display name) and process id, as in `report.ranks`."""
    trouble: str = ""
    """Why the window could not be analyzed; "" when it was."""
    reading: str = ""
    """Which nodes' recordings were read although nodes can settle them; "" for none."""

    @property
    def ended(self) -> bool:
        """True when no recorder is left that could write."""
        return bool(self.nodes) and all(node.state in ("ended", "gone") for node in self.nodes)


WAIT_FOR_RANKS = "wait-for-ranks"
"""Cause of time in operations with other ranks while nobody has compared the ranks: a wait."""


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank did in a part of the run; its parts follow each other without a gap."""

    node: str
    """Display name of the node."""
    rank: int | None
    """Global rank; None if unknown."""
    device: str
    """Accelerator id; "" when none was measured."""
    source: str
    """Where lost time was measured (`RankLedger.source`)."""
    is_emulated: bool
    productive_ns: int = 0
    lost_ns: int = 0
    outside_ns: int = 0
    unmeasured_ns: int = 0
    """The four states add up to the time of the rank in the part."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """Cause id -> ns, as victim; sums to `lost_ns`."""
    caused: Mapping[str, int] = field(default_factory=dict)
    """Cause id -> ns, as culprit: own loss, and what other ranks lost waiting for it."""
    steps: int = 0
    status: RankStatus | None = None
    """Busy ratio and step time, up to the newest record; None when it was not seen."""


@dataclass(frozen=True, slots=True)
class NodePart:
    """State of a node and its recorder after a part."""

    name: str
    """Display name of the node."""
    state: State
    settled_at_ns: int | None
    """Up to when it is settled by its wall clock, ns since 1970; None when it is not known."""
    damaged_bytes: int
    skipped_ns: int
    """Time that was never settled, because the settling process was away or too slow."""
    cpu_ns: Mapping[str, int]
    """CPU time of the recorder and its helpers so far, by process."""
    trouble: str = ""
    """Why it was not settled, or its recorder cannot write; "" when all is well."""


@dataclass(frozen=True, slots=True)
class JobPart:
    """A part of a job: what is added to its counters."""

    job: str
    """Name of the job."""
    nodes: tuple[NodePart, ...]
    ranks: tuple[RankPart, ...]
    unblamed: Mapping[str, int]
    """Waits in operations that have no culprit, ns by cause id."""
    trouble: str = ""
    """Why the ranks could not be compared, so that waits stayed waits; "" when they were."""
