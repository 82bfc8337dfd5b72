"""All faults, in the order in which they are injected."""

from __future__ import annotations

from tests.scenarios.faults import (
    clocks,
    damage,
    devices,
    disks,
    endurance,
    kills,
    limits,
    users,
    versions,
)
from tests.scenarios.faults.model import Fault

FAULTS: tuple[Fault, ...] = (
    *damage.FAULTS,
    *kills.FAULTS,
    *disks.FAULTS,
    *clocks.FAULTS,
    *devices.FAULTS,
    *limits.FAULTS,
    *users.FAULTS,
    *versions.FAULTS,
    *endurance.FAULTS,
)
"""damage first: its processes are forks, of a process without threads."""
