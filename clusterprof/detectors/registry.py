"""The causes, in the order in which people should read them. Nothing else happens here."""

from __future__ import annotations

from clusterprof.detectors.base import Detector
from clusterprof.detectors.checkpoint import Checkpoint
from clusterprof.detectors.cpu_contention import CpuContention
from clusterprof.detectors.cpu_gc import CpuGc
from clusterprof.detectors.cpu_gil import CpuGil
from clusterprof.detectors.cpu_loader_config import CpuLoaderConfig
from clusterprof.detectors.cpu_memory import CpuMemory
from clusterprof.detectors.cpu_preprocess import CpuPreprocess
from clusterprof.detectors.cpu_throttled import CpuThrottled
from clusterprof.detectors.device_throttled import DeviceThrottled
from clusterprof.detectors.eval_host import EvalHost
from clusterprof.detectors.h2d_copy import H2dCopy
from clusterprof.detectors.h2d_sync import H2dSync
from clusterprof.detectors.input_wait import InputWait
from clusterprof.detectors.launch_alloc import LaunchAlloc
from clusterprof.detectors.launch_bound import LaunchBound
from clusterprof.detectors.launch_recompile import LaunchRecompile
from clusterprof.detectors.startup import Startup
from clusterprof.detectors.storage_client_queue import StorageClientQueue
from clusterprof.detectors.storage_cold_cache import StorageColdCache
from clusterprof.detectors.storage_contention import StorageContention
from clusterprof.detectors.storage_local import StorageLocal
from clusterprof.detectors.storage_metadata import StorageMetadata
from clusterprof.detectors.storage_object import StorageObject
from clusterprof.detectors.storage_remote import StorageRemote

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
    LaunchBound(),
    LaunchAlloc(),
    LaunchRecompile(),
    Checkpoint(),
    EvalHost(),
    Startup(),
    DeviceThrottled(),
)
