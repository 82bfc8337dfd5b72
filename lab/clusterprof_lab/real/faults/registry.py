"""All real faults by name: one import and one entry each."""

from __future__ import annotations

from collections.abc import Mapping

from clusterprof_lab.real.faults import (
    cache_evicted,
    cold,
    cpu_hogs,
    cpu_quota,
    disk_cap,
    disk_neighbour,
    free_neighbour,
    links,
    memory_short,
    nfs,
    object_store,
    pinned,
    remote_files,
    slow_fsync,
)
from clusterprof_lab.real.faults.base import Fault

_ALL: tuple[Fault, ...] = (
    disk_cap.FAULT,
    disk_neighbour.FAULT,
    *remote_files.WAYS,
    nfs.FAULT,
    object_store.FAULT,
    cache_evicted.FAULT,
    cold.FAULT,
    slow_fsync.FAULT,
    cpu_quota.FAULT,
    cpu_hogs.FAULT,
    pinned.FAULT,
    memory_short.FAULT,
    free_neighbour.FAULT,
    *links.LINKS,
)
FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in _ALL}
