"""What an event of a trace is, told by its category and name; each pair is looked at once.

    kinds = Kinds()
    kinds["kernel"]["ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)"]   # COMM
    kinds["Runtime"]["cudaDeviceSynchronize"]                        # SYNC

The table of a category is emptied when it holds `NAMES_AT_MOST` names: a trace with a name per
event costs time, never memory; one that does nothing else is refused.
"""

from __future__ import annotations

import re
from collections import Counter

from clusterprof.importers.base import CannotImportError
from clusterprof.probe import layout

# On the device.
KERNEL, COMM, COPY, COPY_IN, COPY_OUT = 1, 2, 3, 4, 5
# Calls of the host into the device's runtime: a call that can launch work, one that waits for the
# device, that takes or gives back memory, that copies, and one that does none of these.
LAUNCH, SYNC, ALLOC, FREE, COPY_CALL, CALL = 8, 9, 10, 11, 12, 13
# What else the host does.
OPERATOR = 16
STEP, LOADER_ALONE, LOADER_WORKERS, OPTIMIZER, GC, COMPILE = 20, 21, 22, 23, 24, 25
HOST_COMM = 26
IGNORED = 0

NAMES_AT_MOST = 1 << 16
CHARACTERS_AT_MOST = 32 << 20
CATEGORIES_AT_MOST = 1 << 10
_LOOKED_AT = 4096  # characters of a name
_REFILLS = 24

_COMM = re.compile(r"nccl|rccl|oneccl|msccl|hccl|cncl", re.IGNORECASE)
_PARTS = re.compile(r"[_\W]+")
_SYNC = re.compile(r"Synchronize|\bsynchronize|zeEventHostSync|urQueueFinish|urEventWait$")
_ALLOC = re.compile(r"(?:Malloc|MemAlloc|MemCreate|HostAlloc|USM\w*Alloc)", re.IGNORECASE)
_FREE = re.compile(r"(?:cuda|hip|cu)Free|MemFree|HostFree|MemRelease|USMFree", re.IGNORECASE)
_COPY = re.compile(r"Memcpy|MemCopy", re.IGNORECASE)
_NO_LAUNCH = re.compile(
    r"Get|Set[A-Z]|Query|Occupancy|Captur|Record|WaitEvent|Create|Destroy|Register|Attribute|Info"
)
_STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)\s*$")
_LOADER = re.compile(r"enumerate\(DataLoader\)#(\w*)\.__next__")
_COMPILE = re.compile(
    r"\(dynamo_timed\)|torch/_dynamo/convert_frame\.py[^:]{0,32}: _compile|"
    r"torch/_inductor/compile_fx\.py[^:]{0,32}: compile_fx"
)
_GC_NAMES = frozenset({"gc", "python gc", "garbage collection", "gc.collect"})
_HOST_COMM = re.compile(r"(?:gloo|mpi|ucc):")

_OPERATIONS = (
    ("allreduce", layout.ALL_REDUCE),
    ("allgather", layout.ALL_GATHER),
    ("reducescatter", layout.REDUCE_SCATTER),
    ("alltoall", layout.ALL_TO_ALL),
    ("broadcast", layout.BROADCAST),
    ("barrier", layout.BARRIER),
    ("sendrecv", layout.ALL_TO_ALL),
    ("gather", layout.GATHER),
    ("scatter", layout.SCATTER),
    ("reduce", layout.REDUCE),
    ("send", layout.SEND),
    ("recv", layout.RECV),
)


def operation_of(name: str) -> int:
    """Return the operation (`layout.ALL_REDUCE` and its like) that a kernel or a call names."""
    if _COMM.match(name):
        name = name.partition("(")[0]
        name = name.partition("ernel_")[2] or name
    plain = _PARTS.sub("", name).lower()
    return next((code for word, code in _OPERATIONS if word in plain), layout.OTHER_OPERATION)


def step_number(name: str) -> int:
    """Return the number of a profiler's step; -1 when it has none."""
    found = _STEP.search(name)
    return int(found[1]) if found and len(found[1]) < 18 else -1


def _device_kernel(name: str) -> int:
    return COMM if _COMM.search(name.partition("(")[0]) else KERNEL


def _device_copy(name: str) -> int:
    if "HtoD" in name or "HostToDevice" in name:
        return COPY_IN
    return COPY_OUT if "DtoH" in name or "DeviceToHost" in name else COPY


def _runtime(name: str) -> int:
    if _SYNC.search(name):
        return SYNC
    if _COPY.search(name):
        return COPY_CALL
    if _ALLOC.search(name):
        return ALLOC
    if _FREE.search(name):
        return FREE
    return CALL if _NO_LAUNCH.search(name) else LAUNCH


def _host(name: str) -> int:
    if name.startswith("aten::"):
        return OPERATOR
    if name.startswith("ProfilerStep"):
        return STEP if _STEP.search(name) else IGNORED
    loader = _LOADER.search(name)
    if loader:
        return LOADER_ALONE if "SingleProcess" in loader[1] else LOADER_WORKERS
    if name.startswith("Optimizer.step"):
        return OPTIMIZER
    if _COMPILE.search(name):
        return COMPILE
    if name.lower() in _GC_NAMES:
        return GC
    return OPERATOR


def _annotation(name: str) -> int:
    kind = _host(name)
    if kind == OPERATOR:  # what a user marks is no work by itself
        return HOST_COMM if _HOST_COMM.match(name) else IGNORED
    return kind


def _python(name: str) -> int:
    return COMPILE if "torch/_" in name and _COMPILE.search(name) else IGNORED


def _ignored(_name: str) -> int:
    return IGNORED


def _collected(_name: str) -> int:
    return GC


def _device_work(_name: str) -> int:
    return KERNEL


_KNOWN = {
    "cpu_op": _host, "operator": _host,
    "user_annotation": _annotation,
    "python_function": _python, "python_gc": _collected,
    "kernel": _device_kernel, "concurrent_kernel": _device_kernel,
    "hpu_op": _device_work, "mtia_ccp_events": _device_work,
    "": _ignored,
}  # fmt: skip
_QUIET = frozenset({
    "cpu_instant_event", "ac2g", "async", "fwdbwd", "trace", "cuda_sync", "xpu_sync", "cuda_event",
    "gpu_user_annotation", "mlu_user_annotation", "gcu_user_annotation", "overhead",
    "async_cpu_to_gpu", "async_gpu", "forward_backward", "external_correlation", "collective_comm",
    "gpu_pm_counter", "cuda_profiler_range", "xpu_scope_profiler", "mtia_insight", "mtia_counters",
})  # fmt: skip


class _Names(dict[str, int]):
    """Name -> kind, of one category."""

    def __init__(self, category: str, kinds: Kinds) -> None:
        super().__init__()
        low = category.lower()
        self._tell = _KNOWN.get(low)
        self.known = True
        if self._tell is None and (low in _QUIET or low.endswith("_annotation")):
            self._tell = _ignored
        elif self._tell is None and ("memcpy" in low or "memset" in low):
            self._tell = _device_copy
        elif self._tell is None and low.endswith(("runtime", "driver")):
            self._tell = _runtime
        elif self._tell is None:
            self._tell, self.known = _ignored, False
        self._kinds = kinds
        self._characters = 0

    def __missing__(self, name: str) -> int:
        if len(self) >= NAMES_AT_MOST or self._characters > CHARACTERS_AT_MOST:
            self.clear()
            self._characters = 0
            self._kinds.refilled()
        assert self._tell is not None
        self._characters += len(name)
        kind = self[name] = self._tell(name[:_LOOKED_AT])
        return kind


class Kinds(dict[str, _Names]):
    """Category -> name -> kind."""

    def __init__(self) -> None:
        super().__init__()
        self._refills = 0
        self.unknown: Counter[str] = Counter()

    def __missing__(self, category: str) -> _Names:
        if len(self) >= CATEGORIES_AT_MOST:
            raise CannotImportError(
                f"more than {CATEGORIES_AT_MOST:,} categories of events: no profiler writes that"
            )
        names = self[category] = _Names(category, self)
        return names

    def refilled(self) -> None:
        """Count a table of names that was full. Raises CannotImportError when it is too often."""
        self._refills += 1
        self.checked()

    def checked(self) -> None:
        """Raise CannotImportError when tables were full too often: who reads names for a decoder
        may not hear it at once."""
        if self._refills > _REFILLS:
            raise CannotImportError(
                f"more than {_REFILLS * NAMES_AT_MOST:,} different names of events",
                "name ranges after what they do, not after when",
            )
