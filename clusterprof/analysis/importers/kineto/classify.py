"""Classify trace events by category and name; each pair is examined once.

    kinds = Kinds()
    kinds["kernel"]["ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)"]   # COMM
    kinds["Runtime"]["cudaDeviceSynchronize"]                        # SYNC

The table of a category is emptied when it holds `MAX_NAMES` names: a trace with a new name for
every event costs time but not memory. A trace that refills the tables too often is refused.
"""

from __future__ import annotations

import re
from collections import Counter

from clusterprof.analysis.importers.core.base import CannotImportError
from clusterprof.analysis.importers.core.host_activity import ALLOC as ALLOC
from clusterprof.analysis.importers.core.host_activity import CALL as CALL
from clusterprof.analysis.importers.core.host_activity import COPY_CALL as COPY_CALL
from clusterprof.analysis.importers.core.host_activity import FREE as FREE
from clusterprof.analysis.importers.core.host_activity import LAUNCH as LAUNCH
from clusterprof.analysis.importers.core.host_activity import LOAD as LOAD
from clusterprof.analysis.importers.core.host_activity import PIN as PIN
from clusterprof.analysis.importers.core.host_activity import SYNC as SYNC
from clusterprof.analysis.importers.core.host_activity import label_runtime_call
from clusterprof.probe import layout

# Work on the device.
KERNEL, COMM, COPY, COPY_IN, COPY_OUT = 1, 2, 3, 4, 5
# Other host activity.
OPERATOR = 19
STEP, LOADER_WITHOUT_WORKERS, LOADER_WITH_WORKERS, OPTIMIZER, GC, COMPILE = 20, 21, 22, 23, 24, 25
HOST_COMM = 26
# Python functions: of PyTorch, of other files, and by what they do.
TORCH_FUNCTION, FUNCTION, LOADING_FUNCTION, DATA_FUNCTION = 32, 33, 34, 35
READ_FUNCTION, SLEEP_FUNCTION, LOCK_FUNCTION, LOG_FUNCTION = 36, 37, 38, 39
LIBRARY_FUNCTION, BLOCKED_FUNCTION = 40, 41  # of the training code or a library; JAX's wait
BUILT_IN_FUNCTION = 42  # of no known purpose: only its name in a stack is of use
ANNOTATED_RANGE = 43  # a range that the program marked itself (`record_function`)
IGNORED = 0

# Categories of most events, as they are written; `CommonEventDecoder` has a type for each.
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset")
RUNTIME_CATEGORIES = ("cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime", "Runtime")
HOST_CATEGORIES = ("cpu_op", "user_annotation", "Operator", "python_function")
USED_CATEGORIES = (*DEVICE_CATEGORIES, *RUNTIME_CATEGORIES, *HOST_CATEGORIES)
UNUSED_CATEGORIES = (
    "ac2g",
    "async",
    "fwdbwd",
    "cpu_instant_event",
    "overhead",
    "gpu_user_annotation",
    "cuda_sync",
    "cuda_event",
    "Trace",
    "async_gpu",
    "async_cpu_to_gpu",
    "forward_backward",
)

MAX_NAMES = 1 << 16
MAX_CHARACTERS = 32 << 20
MAX_CATEGORIES = 1 << 10
_PREFIX_CHARACTERS = 4096  # characters of a name that are examined
_MAX_REFILLS = 24

_COMM = re.compile(
    r"nccl|rccl|oneccl|msccl|hccl|cncl|multimem_all_|cross_device_reduce"
    r"|(?:one|two)_shot_all_reduce|(?:deep_?ep|dpsk::ep)::int(?:ra|er)node",
    re.IGNORECASE,
)
_NON_WORD = re.compile(r"[_\W]+")
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
    ("crossdevicereduce", layout.ALL_REDUCE),
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


def find_operation(name: str) -> int:
    """Find the collective operation (`layout.ALL_REDUCE`, …) in the name of a kernel or call."""
    if _COMM.match(name):
        name = name.replace("(anonymous namespace)::", "").partition("(")[0]
        name = name.partition("ernel_")[2] or name
    letters = _NON_WORD.sub("", name).lower()
    return next((code for word, code in _OPERATIONS if word in letters), layout.OTHER_OPERATION)


def parse_step_number(name: str) -> int:
    """Parse the step number from the name of a profiler step; -1 if it has none."""
    match = _STEP.search(name)
    return int(match[1]) if match and len(match[1]) < 18 else -1


def _label_device_kernel(name: str) -> int:
    name = name.replace("(anonymous namespace)::", "")
    return COMM if _COMM.search(name.partition("(")[0]) else KERNEL


def _label_device_copy(name: str) -> int:
    if "HtoD" in name or "HostToDevice" in name:
        return COPY_IN
    return COPY_OUT if "DtoH" in name or "DeviceToHost" in name else COPY


def _label_host_event(name: str) -> int:
    if name.startswith("aten::"):
        return OPERATOR
    if name.startswith("ProfilerStep"):
        return STEP if _STEP.search(name) else IGNORED
    loader = _LOADER.search(name)
    if loader:
        return LOADER_WITHOUT_WORKERS if "SingleProcess" in loader[1] else LOADER_WITH_WORKERS
    if name.startswith("Optimizer.step"):
        return OPTIMIZER
    if _COMPILE.search(name):
        return COMPILE
    if name.lower() in _GC_NAMES:
        return GC
    return OPERATOR


def _label_annotation(name: str) -> int:
    kind = _label_host_event(name)
    if kind == OPERATOR:  # a user annotation is not work by itself
        return HOST_COMM if _HOST_COMM.match(name) else ANNOTATED_RANGE
    return kind


_FUNCTIONS = (
    (re.compile(r"<built-in function sleep>"), SLEEP_FUNCTION),
    (
        re.compile(
            r"<method '(?:acquire|wait)' of|<built-in (?:function|method) (?:select|poll|wait)"
            r"|<method '(?:recv|recv_into|accept|connect|poll)' of"
        ),
        LOCK_FUNCTION,
    ),
    (
        re.compile(r"<method 'read(?:into|line)?' of|<built-in function (?:open|read)>"),
        READ_FUNCTION,
    ),
    (
        re.compile(
            r"torch/cuda/__init__\.py\(\d+\): _lazy_init|torch/utils/cpp_extension\.py|"
            r"triton/(?:compiler|backends|runtime/(?:autotuner|build)\.py)"
        ),
        LOADING_FUNCTION,
    ),
    (
        re.compile(
            r"torch/utils/data/|torchvision/(?:transforms|datasets|io)/|torchaudio/|albumentations/"
            r"|transformers/(?:tokenization|image_processing|feature_extraction)|webdataset/"
            r"|(?:^|/)(?:PIL|cv2|datasets)/|__getitem__"
        ),
        DATA_FUNCTION,
    ),
    (re.compile(r"torch/utils/tensorboard/|torch/serialization\.py\(\d+\): save"), LOG_FUNCTION),
    (re.compile(r"^(?:\S*/)?torch/|^nn\.Module: "), TORCH_FUNCTION),
    (
        re.compile(
            r"(?i): \w*(?:pre_?process|augment|tokeni[sz]|collate|transform(?!er)"
            r"|decode_(?:jpe?g|png|image|audio|video)"
            r"|(?:load|get|next|fetch|read|prepare)_?(?:data|batch|image|sample|video|audio))"
        ),
        DATA_FUNCTION,
    ),
    (
        re.compile(
            r"(?i)(?:^|/)(?:logging|wandb|mlflow|tensorboardX?|tqdm|sklearn|matplotlib)/"
            r"|<built-in function print>|: \w*(?:(?:^|_)log(?:$|_|ger|ging)|print|evaluat|validat"
            r"|metric|accuracy|checkpoint|save|plot|upload)"
        ),
        LOG_FUNCTION,
    ),
)
"""What a Python function does, by its file and name; the first that matches."""


def _label_python_event(name: str) -> int:
    if "torch/_" in name and _COMPILE.search(name):
        return COMPILE
    for pattern, kind in _FUNCTIONS:
        if pattern.search(name):
            return kind
    return BUILT_IN_FUNCTION if name.startswith("<") else FUNCTION


def _label_track_function(name: str) -> int:
    """Label a function whose file is named without its folder: any may be of a library."""
    if name.endswith(": block_until_ready"):
        return BLOCKED_FUNCTION
    kind = _label_python_event(name)
    return LIBRARY_FUNCTION if kind == FUNCTION else kind


def _label_ignored(_name: str) -> int:
    return IGNORED


def _label_gc(_name: str) -> int:
    return GC


def _label_device_work(_name: str) -> int:
    return KERNEL


def _label_device_comm(_name: str) -> int:
    return COMM


_LABELERS = {
    "cpu_op": _label_host_event,
    "operator": _label_host_event,
    "user_annotation": _label_annotation,
    "python_function": _label_python_event,
    "python_gc": _label_gc,
    "track_function": _label_track_function,
    "kernel": _label_device_kernel,
    "concurrent_kernel": _label_device_kernel,
    "hpu_op": _label_device_work,
    "mtia_ccp_events": _label_device_work,
    "device_comm": _label_device_comm,  # of tracks
    "": _label_ignored,
}
_IGNORED_CATEGORIES = frozenset(
    {
        "cpu_instant_event",
        "ac2g",
        "async",
        "fwdbwd",
        "trace",
        "cuda_sync",
        "xpu_sync",
        "cuda_event",
        "gpu_user_annotation",
        "mlu_user_annotation",
        "gcu_user_annotation",
        "overhead",
        "async_cpu_to_gpu",
        "async_gpu",
        "forward_backward",
        "external_correlation",
        "collective_comm",
        "gpu_pm_counter",
        "cuda_profiler_range",
        "xpu_scope_profiler",
        "mtia_insight",
        "mtia_counters",
    }
)


class _NameTable(dict[str, int]):
    """Kinds of the names of one category."""

    def __init__(self, category: str, kinds: Kinds) -> None:
        super().__init__()
        low = category.lower()
        self._label = _LABELERS.get(low)
        self.known = True
        if self._label is None and (low in _IGNORED_CATEGORIES or low.endswith("_annotation")):
            self._label = _label_ignored
        elif self._label is None and ("memcpy" in low or "memset" in low):
            self._label = _label_device_copy
        elif self._label is None and low.endswith(("runtime", "driver")):
            self._label = label_runtime_call
        elif self._label is None:
            self._label, self.known = _label_ignored, False
        self._kinds = kinds
        self._characters = 0

    def __missing__(self, name: str) -> int:
        if len(self) >= MAX_NAMES or self._characters > MAX_CHARACTERS:
            self.clear()
            self._characters = 0
            self._kinds.count_refill()
        assert self._label is not None
        self._characters += len(name)
        kind = self[name] = self._label(name[:_PREFIX_CHARACTERS])
        return kind


class Kinds(dict[str, _NameTable]):
    """Category -> name -> kind."""

    def __init__(self) -> None:
        super().__init__()
        self._refills = 0
        self.unknown: Counter[str] = Counter()

    def __missing__(self, category: str) -> _NameTable:
        if len(self) >= MAX_CATEGORIES:
            raise CannotImportError(
                f"more than {MAX_CATEGORIES:,} event categories, more than any profiler writes"
            )
        names = self[category] = _NameTable(category, self)
        return names

    def count_refill(self) -> None:
        """Count a table of names that was full.

        Raises: CannotImportError when that happened too often.
        """
        self._refills += 1
        self.check_refills()

    def check_refills(self) -> None:
        """Check how often tables were full; a decoder may have swallowed the first error.

        Raises: CannotImportError when that happened too often.
        """
        if self._refills > _MAX_REFILLS:
            raise CannotImportError(
                f"more than {_MAX_REFILLS * MAX_NAMES:,} different event names",
                "use range names that do not contain a counter or a time",
            )
