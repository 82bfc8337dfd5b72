"""All real faults by name: one import and one entry each."""

from __future__ import annotations

from collections.abc import Mapping

from clusterprof_lab.real.faults import (
    cpu_hogs,
    cpu_quota,
    disk_cap,
    disk_neighbour,
    free_neighbour,
    object_store,
    pinned,
    remote_files,
)
from clusterprof_lab.real.faults.base import Fault

FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        disk_cap.FAULT,
        disk_neighbour.FAULT,
        *remote_files.WAYS,
        object_store.FAULT,
        cpu_quota.FAULT,
        cpu_hogs.FAULT,
        pinned.FAULT,
        free_neighbour.FAULT,
    )
}
