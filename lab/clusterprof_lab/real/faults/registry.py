"""All real faults by name: one import and one entry each."""

from __future__ import annotations

from collections.abc import Mapping

from clusterprof_lab.real.faults import disk_cap, disk_neighbour, object_store, remote_files
from clusterprof_lab.real.faults.base import Fault

FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        disk_cap.FAULT,
        disk_neighbour.FAULT,
        *remote_files.WAYS,
        object_store.FAULT,
    )
}
