"""Registry of causes, in the order in which they are presented."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from clusterprof.analysis.detectors.base import Detector
from clusterprof.analysis.detectors.cpu.contention import CpuContention
from clusterprof.analysis.detectors.cpu.gc import CpuGc
from clusterprof.analysis.detectors.cpu.gil import CpuGil
from clusterprof.analysis.detectors.cpu.loader_config import CpuLoaderConfig
from clusterprof.analysis.detectors.cpu.memory import CpuMemory
from clusterprof.analysis.detectors.cpu.preprocess import CpuPreprocess
from clusterprof.analysis.detectors.cpu.throttled import CpuThrottled
from clusterprof.analysis.detectors.cross_rank import NETWORK_LIMITS
from clusterprof.analysis.detectors.device.device_throttled import DeviceThrottled
from clusterprof.analysis.detectors.device.h2d_copy import H2dCopy
from clusterprof.analysis.detectors.device.h2d_copy_bound import H2dCopyBound
from clusterprof.analysis.detectors.device.h2d_sync import H2dSync
from clusterprof.analysis.detectors.device.launch_alloc import LaunchAlloc
from clusterprof.analysis.detectors.device.launch_bound import LaunchBound
from clusterprof.analysis.detectors.device.launch_recompile import LaunchRecompile
from clusterprof.analysis.detectors.device.memory_free import MemoryFree
from clusterprof.analysis.detectors.device.warm_up import WarmUp
from clusterprof.analysis.detectors.phases.checkpoint import Checkpoint
from clusterprof.analysis.detectors.phases.eval_host import EvalHost
from clusterprof.analysis.detectors.phases.host_asleep import HostAsleep
from clusterprof.analysis.detectors.phases.input_wait import InputWait
from clusterprof.analysis.detectors.phases.startup import Startup
from clusterprof.analysis.detectors.storage.client_queue import StorageClientQueue
from clusterprof.analysis.detectors.storage.cold_cache import StorageColdCache
from clusterprof.analysis.detectors.storage.contention import StorageContention
from clusterprof.analysis.detectors.storage.local import StorageLocal
from clusterprof.analysis.detectors.storage.metadata import StorageMetadata
from clusterprof.analysis.detectors.storage.object import StorageObject
from clusterprof.analysis.detectors.storage.remote import StorageRemote
from clusterprof.errors import UsageError

DETECTORS: tuple[Detector, ...] = (
    StorageLocal(),
    StorageContention(),
    StorageRemote(),
    StorageClientQueue(),
    StorageMetadata(),
    StorageObject(),
    StorageColdCache(),
    CpuPreprocess(),
    CpuContention(),
    CpuThrottled(),
    CpuLoaderConfig(),
    CpuMemory(),
    CpuGc(),
    CpuGil(),
    InputWait(),
    H2dCopy(),
    H2dSync(),
    H2dCopyBound(),
    LaunchBound(),
    LaunchAlloc(),
    MemoryFree(),
    LaunchRecompile(),
    Checkpoint(),
    EvalHost(),
    HostAsleep(),
    Startup(),
    WarmUp(),
    DeviceThrottled(),
)


def build_limits(limits: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Build one limits object per cause id.

    limits: changed limits by cause id, as in a profile.

    Raises: UsageError for an unknown cause or limit, with the nearest known name.
    """
    known_causes = list_limit_classes()
    for id_ in limits:
        if id_ not in known_causes:
            raise UsageError(
                f"limits: there is no cause {id_!r}{_find_nearest_name(id_, known_causes)}"
            )
    out = {}
    for id_, kind in known_causes.items():
        values = limits.get(id_, {})
        names = {field.name for field in fields(kind)}
        for key in values:
            if key not in names:
                raise UsageError(
                    f"limits.{id_}: there is no limit {key!r}{_find_nearest_name(key, names)}"
                )
        out[id_] = kind(**values)
    return out


def list_limit_classes() -> dict[str, type]:
    """Return the class of limits of every cause that has limits, by cause id."""
    return {**{detector.cause.id: detector.Limits for detector in DETECTORS}, **NETWORK_LIMITS}


def _find_nearest_name(word: str, names: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(word, list(names), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""
