"""Advice for lines of code: calls that are known to cost time, and what their users do about them.

    data.py:42 augment                  the user's line
    torchvision/transforms/…            library
    PIL/Image.py:2450 resize            library: a known call

A call is known by the path and function of a frame of a library below the user's line, so a
function of the user called `resize` is none. Built-in functions have no frame while a job runs:
they are known in imported traces, and from the source line where the file can be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from clusterprof.analysis.advice.base import (
    Effort,
    describe_check,
    describe_location,
    describe_loss_share,
    format_line_in_function,
    format_share,
    mark_command,
    strip_command_marks,
)
from clusterprof.analysis.advice.context import AdviceContext, CodePath
from clusterprof.report.code import CodeLocation
from clusterprof.report.model import Advice
from clusterprof.units import format_quantity

MIN_FIRST_SHARE = 0.25
"""Part of a finding from which the advice for a line comes before general advice."""
MIN_SHARE = 0.1
"""Part of a finding from which there is advice for a line at all."""
MIN_DOMINANT_SHARE = 0.5
"""Part of a finding from which one line is named in general advice."""
MIN_SAMPLES = 8
"""Number of samples in a known call from which its share is trusted."""
MAX_LINE_ADVICE = 2
_LOADING = (
    *("cpu-preprocess", "cpu-loader-config", "cpu-gil", "cpu-contention", "cpu-throttled"),
    *("cpu", "input-wait", "input", "eval-host", "sync-imbalance"),
)
_READING = (
    *_LOADING,
    *("storage", "storage-local", "storage-remote", "storage-client-queue", "storage-metadata"),
    *("storage-object", "storage-cold-cache", "host-asleep"),
)
_STEP = (
    *("launch", "launch-bound", "launch-alloc", "memory-free", "h2d-copy", "h2d-sync"),
    *("eval", "eval-host", "host-asleep", "checkpoint", "cpu-gil", "cpu-gc", "sync-imbalance"),
)
_ANY = tuple(dict.fromkeys((*_READING, *_STEP)))
_NOT_THE_CODE = frozenset({"cpu-contention", "cpu-throttled", "storage-client-queue"})
"""Causes outside the code: their own advice stays first."""
_BUILT_IN = "<built-in>"
_COMMAND = re.compile(r"`([^`]+)`")
_STANDARD = r"(?:^|python\d[\d.]*/)"
"""Folder of the standard library."""


@dataclass(frozen=True, slots=True)
class KnownCall:
    """A call that is known to cost time, and what its users do about it."""

    id: str
    title: str
    """What it is called in a sentence: "PIL resize"."""
    causes: tuple[str, ...]
    what: str
    """An instruction, one sentence without a full stop, in lower case."""
    change: str
    """Commands to paste are in backticks."""
    worse: str
    files: str = ""
    """Regular expression for the path from the folder of packages on; "" = no file."""
    functions: tuple[str, ...] = ()
    """Last parts of the names of the functions of these files; () = any."""
    built_in: str = ""
    """Regular expression for the whole name of built-in functions ("Tensor.item")."""
    source: str = ""
    """Regular expression for the whole name of a call in the source ("loss.item")."""
    published: str = ""
    expected_change: str = ""
    effort: Effort = "code"
    replaces: tuple[str, ...] = ()
    """General recommendations that say less."""

    def matches_frame(self, location: CodeLocation) -> bool:
        """Return whether a frame of a library is this call."""
        if location.file == _BUILT_IN:
            function = location.function
            return bool(self.built_in) and re.fullmatch(self.built_in, function) is not None
        if not self.files or re.search(rf"(?:^|/)(?:{self.files})", location.file) is None:
            return False
        return not self.functions or location.function.rpartition(".")[2] in self.functions

    def matches_source(self, calls: Iterable[str]) -> bool:
        """Return whether one of the calls on a source line is this call."""
        return bool(self.source) and any(re.fullmatch(self.source, call) for call in calls)


_OFFLINE = "3x to 13x against an untuned pipeline (Isenko et al., SIGMOD 2022)"
_SYNCHRONIZES = (
    "item(), cpu(), tolist() and print of a tensor make the host wait for the GPU (PyTorch"
    " Performance Tuning Guide)"
)
_LOG_WORSE = "the curves have fewer points, and the last ones before a crash may be missing"

KNOWN_CALLS: tuple[KnownCall, ...] = (
    # Images.
    KnownCall(
        "resize-images-once",
        "resize of images",
        _LOADING,
        "store the images at the size that training needs",
        "resize once and offline (to a short side of 256 for crops of 224), or let the decoder do"
        ' it: `image.draft("RGB", size)` before the first access decodes a JPEG at'
        " 1/2, 1/4 or 1/8 of its size",
        "crops have less detail than those of the originals; storage for the copies",
        files=r"PIL/Image\.py|torchvision/transforms/(?:.+/)?_?functional\w*\.py"
        r"|torchvision/transforms/(?:v2/)?(?:functional/)?_?\w*\.py",
        functions=("resize", "thumbnail", "reduce", "resize_image", "resized_crop"),
        published=_OFFLINE,
        effort="data",
        replaces=("prepare-ahead",),
    ),
    KnownCall(
        "decode-images-cheaper",
        "decoding of images",
        _LOADING,
        "decode smaller images, or on the accelerator",
        "store the images at training size; or decode with torchvision.io.decode_jpeg on CUDA,"
        " nvImageCodec or DALI; or store decoded uint8 arrays where storage has room and speed",
        "decoding on the accelerator needs its time and memory; decoded images are about ten times"
        " as large",
        files=r"PIL/\w+ImagePlugin\.py|PIL/ImageFile\.py|torchvision/io/image\.py",
        functions=(
            *("load", "load_prepare", "load_read", "load_seek", "load_end", "_open", "draft"),
            *("decode_image", "decode_jpeg", "decode_png", "decode_webp", "read_image"),
        ),
        published=_OFFLINE,
        replaces=("prepare-ahead",),
    ),
    KnownCall(
        "use-opencv-lean",
        "OpenCV",
        _LOADING,
        "let OpenCV read smaller images, with one thread per worker",
        "`cv2.setNumThreads(0)` in worker_init_fn, and"
        " `cv2.imread(path, cv2.IMREAD_REDUCED_COLOR_2)` (half the size; _4 and"
        " _8 for less) where the image is made smaller anyway",
        "a reduced image differs slightly from one that was resized",
        files=r"cv2/",
        built_in=r"(?:\w+\.)*(?:imread|imdecode|warpAffine|warpPerspective|cvtColor|GaussianBlur)",
    ),
    KnownCall(
        "crop-before-augmenting",
        "albumentations",
        _LOADING,
        "crop before all other transforms",
        "put RandomCrop or RandomResizedCrop first in A.Compose, keep uint8 until A.Normalize, and"
        " call `cv2.setNumThreads(0)` in worker_init_fn",
        "augmentations no longer see what is outside of the crop",
        files=r"albumentations/|albucore/",
    ),
    KnownCall(
        "use-transforms-v2",
        "torchvision transforms of PIL images",
        _LOADING,
        "use torchvision.transforms.v2 on uint8 tensors",
        "`from torchvision.transforms import v2`: v2.PILToTensor() first, then"
        " v2 transforms on uint8 tensors, v2.ToDtype(torch.float32, scale=True) and v2.Normalize"
        " last; or transforms of whole batches on the accelerator",
        "results differ slightly from those on PIL images",
        files=r"torchvision/transforms/(?!v2/)\w+\.py",
        published="v2 with uint8 tensors is the faster way (torchvision documentation, Performance"
        " considerations)",
        replaces=("prepare-ahead",),
    ),
    # Samples from files.
    KnownCall(
        "save-snapshot-then-write",
        "saving of checkpoints",
        _ANY,
        "copy the state to host memory, and write it in the background",
        "`torch.distributed.checkpoint.async_save(state, checkpoint_id=path)`"
        " instead of torch.save in the step; and saves less often",
        "host memory for a copy of the state; a crash may lose the save in progress",
        files=r"torch/serialization\.py",
        functions=("save", "_save", "_legacy_save"),
        published="async_save copies to host memory and writes in a thread (PyTorch documentation)",
        expected_change="checkpoint.mean_ns falls to the time of the snapshot",
        replaces=("save-in-background",),
    ),
    KnownCall(
        "load-samples-mapped",
        "torch.load",
        _READING,
        "store samples as plain arrays instead of pickled tensors",
        '`numpy.load(path, mmap_mode="r")` of one array with many samples, or'
        " safetensors; of large files `torch.load(path, mmap=True)` reads only"
        " what is used",
        "the data set has to be rewritten once",
        files=r"torch/serialization\.py|torch/_weights_only_unpickler\.py",
        functions=("load", "_load", "_legacy_load", "load_tensor", "persistent_load"),
        published="mmap=True leaves the storages on disk until they are used (torch.load, PyTorch"
        " documentation)",
        effort="data",
    ),
    KnownCall(
        "map-arrays",
        "numpy.load",
        _LOADING,
        "map arrays of which a part is used instead of reading them whole",
        '`numpy.load(path, mmap_mode="r")` once per worker, and a copy of the rows that an item'
        " needs; where it needs the whole array, store it smaller (float16, uint8)",
        "pages are read when they are used: rows in random order on a slow disk cost more",
        files=r"numpy/lib/_?npyio(?:_impl)?\.py",
        functions=("load",),
        replaces=("prepare-ahead",),
    ),
    KnownCall(
        "read-whole-chunks",
        "h5py",
        _READING,
        "read whole chunks, from a file that each worker opens once",
        'open with `h5py.File(path, "r", rdcc_nbytes=64 << 20)` at the first'
        " __getitem__ of a worker, and store with chunks of one sample or one batch",
        "memory for the cache of chunks in each worker",
        files=r"h5py/",
        published="the cache holds 1 MiB per data set in HDF5 1 unless set; chunks that do not fit"
        " are read and unpacked again (h5py documentation, Chunk cache)",
        effort="data",
    ),
    KnownCall(
        "fetch-larger-objects",
        "reading from an object store",
        _READING,
        "read larger objects ahead, or keep them on a local disk",
        "pack samples into shards of 100 MB or more (WebDataset, MosaicML Streaming), or cache"
        ' them: `fsspec.open("filecache::s3://…")` on local NVMe',
        "space on local disks; shards are shuffled less finely",
        files=r"s3fs/|gcsfs/|adlfs/|fsspec/(?!implementations/local)|boto3/|botocore/|smart_open/|s3transfer/|aiobotocore/",
        effort="data",
    ),
    KnownCall(
        "read-tables-once",
        "reading of tables with pandas",
        _READING,
        "read tables once, in a binary format",
        "convert once with `frame.to_parquet(path)`; read the columns that are"
        " used, in __init__ or once per worker, not per sample",
        "the data set has to be rewritten once",
        files=r"pandas/io/|pyarrow/csv|pandas/_libs/parsers",
        effort="data",
    ),
    KnownCall(
        "rows-as-arrays",
        "single rows of a pandas table",
        _LOADING,
        "take rows from arrays instead of a table",
        "`self.rows = frame.to_numpy()` (or one array per column) in __init__, and"
        " index that in __getitem__; no iterrows",
        "the columns that are used must fit into one type",
        files=r"pandas/core/(?:indexing|frame|series|generic|internals/\w+)\.py",
        functions=("iterrows", "_ixs", "xs", "fast_xs", "_getitem_axis", "_getitem_lowerdim"),
        published="iterrows makes a Series of every row; vectorized code or itertuples is faster"
        " (pandas documentation)",
    ),
    KnownCall(
        "send-arrays",
        "receiving objects from another process",
        ("cpu-preprocess", "cpu"),
        "send arrays in shared memory instead of Python objects",
        "pack a batch into a few tensors (`torch.multiprocessing.Queue` passes them in shared"
        " memory), or let DataLoader workers build it; nested lists and dicts are unpickled one"
        " by one",
        "the batch has to fit into arrays",
        files=r"multiprocessing/(?:queues|connection)\.py",
        functions=("get", "recv"),
    ),
    KnownCall(
        "tokenize-ahead",
        "tokenizing",
        _LOADING,
        "tokenize once and offline",
        "`dataset.map(tokenize, batched=True, num_proc=N)`, save_to_disk, and load"
        " token ids; where it must be done while training: a fast tokenizer (use_fast=True) on"
        " whole batches in workers",
        "storage for the token ids; another tokenizer means to do it again",
        files=r"transformers/tokenization_\w+\.py|transformers/models/\w+/tokenization_\w+\.py"
        r"|tokenizers/|sentencepiece/|tiktoken/|nltk/tokenize/",
        built_in=r"(?:Tokenizer|TokenizersBackend)\.encode\w*",
        published="less than 20 s per GB of text with a fast tokenizer (Hugging Face Tokenizers)",
        effort="data",
        replaces=("prepare-ahead",),
    ),
    KnownCall(
        "parse-json-once",
        "parsing of JSON",
        _LOADING,  # a thread that is blocked in json.load reads the file
        "parse JSON once, not per sample",
        "convert the data set to Arrow, Parquet or arrays; a drop-in that is faster is"
        " `orjson.loads(line)`",
        "the data set has to be rewritten once",
        files=_STANDARD + r"json/(?:__init__|decoder|scanner)\.py",
        functions=("load", "loads", "decode", "raw_decode", "scan_once", "_scan_once"),
        effort="data",
    ),
    KnownCall(
        "draw-random-in-batches",
        "numpy.random",
        _LOADING,
        "draw random numbers for whole batches, with the newer generator",
        "`rng = numpy.random.default_rng(seed)` once per worker, dtype=float32;"
        " or noise on the accelerator: torch.randn(shape, device=…)",
        "the random numbers change, so runs are not comparable bit by bit",
        files=r"numpy/random/",
        built_in=r"(?:\w+\.)*(?:RandomState|Generator)\.\w+",
        published="normal and exponential numbers 2 to 10 times as fast with Generator as with"
        " RandomState (NumPy documentation)",
    ),
    # Logging and metrics.
    KnownCall(
        "log-metrics-rarely",
        "logging of metrics to a server",
        _STEP,
        "log less often, from one rank",
        "`if step % 50 == 0: wandb.log(…)` on rank 0, with numbers that are on the"
        " host already; no images, tables or gradients in steps",
        _LOG_WORSE,
        files=r"wandb/|mlflow/(?!utils/autologging_utils)|neptune/|comet_ml/|clearml/",
        replaces=("log-in-background", "metrics-on-gpu"),
    ),
    KnownCall(
        "write-summaries-rarely",
        "TensorBoard's SummaryWriter",
        _STEP,
        "write summaries less often",
        "add_scalar every 50 steps; histograms and images only with evaluations;"
        " `SummaryWriter(max_queue=1000, flush_secs=120)`",
        _LOG_WORSE,
        files=r"torch/utils/tensorboard/|tensorboardX/|tensorboard/",
        replaces=("log-in-background",),
    ),
    KnownCall(
        "log-by-queue",
        "logging",
        _STEP,
        "hand log records to a thread, and write fewer",
        "logging.handlers.QueueHandler with a QueueListener around the slow handler; fewer records"
        " in steps, and only on rank 0",
        "the last lines before a crash may be missing",
        files=_STANDARD + r"logging/(?:__init__|handlers)\.py",
        published="a QueueHandler lets the thread go on while a listener writes (Python Logging"
        " Cookbook)",
        replaces=("log-in-background",),
    ),
    KnownCall(
        "plot-elsewhere",
        "matplotlib",
        _STEP,
        "draw figures outside of the step",
        "save the numbers, and draw in a process of its own or after the run;"
        ' `matplotlib.use("Agg")` and plt.close(figure)',
        "figures appear later",
        files=r"matplotlib/|mpl_toolkits/|seaborn/|plotly/",
    ),
    KnownCall(
        "optimize-on-the-gpu",
        "the optimizer's step",
        ("launch", "launch-bound", "h2d-sync"),
        "let the optimizer work on the GPU, in few kernels",
        "`fused=True` for the optimizer; if it is offloaded to the CPU: offload a smaller part of"
        " it, and use one that is made for that (DeepSpeedCPUAdam)",
        "optimizer states take memory of the GPU",
        files=r"torch/optim/(?!lr_scheduler|swa_utils)|deepspeed/ops/adam/",
        replaces=("fetch-metrics-rarely", "look-a-step-later"),
    ),
    KnownCall(
        "read-back-rarely",
        "reading values back from the GPU",
        _STEP,
        "keep values on the GPU, and read them back less often",
        "`total += loss.detach()` in the step, and .item() only every 50 steps;"
        " copies with non_blocking=True to pinned memory where the value is needed later",
        "values are known some steps later",
        files=r"torch/_tensor(?:_str)?\.py",
        functions=("__format__", "__repr__", "__array__", "_str", "_str_intern", "_tensor_str"),
        built_in=r"(?:\w+\.)*Tensor(?:Base)?\.(?:item|cpu|tolist|numpy|nonzero|__bool__|__float__)",
        source=r".+\.(?:item|cpu|tolist)",
        published=_SYNCHRONIZES,
        expected_change="h2d-sync and launch-bound fall",
        replaces=("metrics-on-gpu",),
    ),
    KnownCall(
        "print-rarely",
        "printing",
        _STEP,
        "print less often, on one rank",
        "`if rank == 0 and step % 50 == 0: print(…)`; a progress bar with"
        " mininterval=10; output to a local file",
        "the console shows less",
        files=r"tqdm/|rich/",
        functions=("refresh", "display", "fp_write", "print", "write", "update", "set_postfix"),
        built_in=r"print|TextIOWrapper\.(?:write|flush)",
        source=r"print",
        replaces=("log-in-background",),
    ),
    # Waits.
    KnownCall(
        "ask-servers-elsewhere",
        "requests over the network",
        ("host-asleep", *_STEP, *_LOADING),
        "ask servers in a thread, not in the step",
        "concurrent.futures.ThreadPoolExecutor(1).submit(…) and no wait for its result in the step;"
        " one requests.Session for all; with a timeout",
        "answers come some steps later",
        files=r"requests/|urllib3/|httpx/|httpcore/|aiohttp/|grpc/|paramiko/|slack_sdk/|"
        + _STANDARD
        + r"(?:urllib/request|http/client|smtplib)\.py",
        built_in=r"(?:\w+\.)*_?SSLSocket\.read",
        replaces=("find-the-sleeping-line",),
    ),
    KnownCall(
        "no-sleep-in-steps",
        "a sleep",
        ("host-asleep", *_STEP, *_LOADING),
        "take the sleep out of the step",
        "wait for an event instead of a time (threading.Event.wait with a timeout in a thread of"
        " its own); rate limits and retries belong in a thread",
        "what the sleep waited for may not be done yet",
        built_in=r"(?:time\.)?sleep",
        source=r"(?:time\.)?sleep",
        expected_change="thread.in_timer_ratio falls",
        replaces=("find-the-sleeping-line",),
    ),
    KnownCall(
        "sync-files-rarely",
        "fsync",
        (*_STEP, *_READING),
        "leave out fsync in steps",
        "sync once, when a file is complete; for whole files write, rename, and sync in a thread",
        "the last lines before a power failure may be missing",
        built_in=r"(?:\w+\.)*f(?:data)?sync",
        source=r"(?:os\.)?f(?:data)?sync",
        replaces=("log-in-background",),
    ),
    # What the interpreter does.
    KnownCall(
        "collect-rarely",
        "garbage collection",
        (*_STEP, *_LOADING),
        "collect garbage less often, on all ranks at once",
        "`gc.disable(); gc.freeze()` after the first step, and"
        " `if step % 500 == 0: gc.collect()` on all ranks; gc.collect does not"
        " give memory of the GPU back",
        "objects in cycles keep their memory longer",
        built_in=r"(?:gc\.)?collect",
        source=r"gc\.collect",
        expected_change="cpu-gc falls",
    ),
    KnownCall(
        "copy-tensors-only",
        "copy.deepcopy",
        _ANY,
        "copy tensors instead of objects",
        "`{name: value.detach().clone() for name, value in state.items()}`; for"
        " averaged weights torch.optim.swa_utils.AveragedModel; immutable samples need no copy",
        "parts that are shared must not be changed in place",
        files=_STANDARD + r"copy\.py",
        functions=(
            "deepcopy",
            "_deepcopy_dict",
            "_deepcopy_list",
            "_deepcopy_tuple",
            "_reconstruct",
        ),
    ),
    KnownCall(
        "start-no-processes",
        "starting of processes",
        _ANY,
        "start no process in the step",
        "call a library instead of a program; read /proc or NVML instead of nvidia-smi; or keep a"
        " process and send it its work through a pipe",
        "a helper that lives as long as the job has to be stopped with it",
        files=_STANDARD + r"(?:subprocess|multiprocessing/popen_\w+)\.py",
        built_in=r"(?:\w+\.)*(?:fork_exec|fork|posix_spawn)",
        source=r"os\.system|os\.popen|subprocess\.\w+",
    ),
)
"""The first that matches a stack counts: what is special stands before what it calls."""


@dataclass(frozen=True, slots=True)
class LineAdvice:
    """Advice for a known call, and how much of the finding is spent in it."""

    advice: Advice
    share_ratio: float
    is_first: bool
    """True if it comes before general advice."""
    replaces: tuple[str, ...]


def list_known_calls(cause: str) -> tuple[KnownCall, ...]:
    """List the known calls that can be behind a cause."""
    return tuple(call for call in KNOWN_CALLS if cause in call.causes)


def is_code_the_reason(cause: str) -> bool:
    """Return whether a cause lies in the code, so that advice for its lines comes first."""
    return cause not in _NOT_THE_CODE


def find_known_call(path: CodePath, cause: str) -> KnownCall | None:
    """Find the known call that a stack is in; None if it is in none that fits the cause."""
    candidates = list_known_calls(cause)
    for call in candidates:
        if any(call.matches_frame(location) for location in path.called):
            return call
    if path.called:
        return None
    on_line = [call for call in candidates if call.matches_source(path.source_calls)]
    return on_line[0] if len(on_line) == 1 else None


def select_line_advice(context: AdviceContext) -> tuple[LineAdvice, ...]:
    """Select the advice for the lines of a finding, largest share first, at most two."""
    paths: dict[str, list[CodePath]] = {}
    calls: dict[str, KnownCall] = {}
    for path in context.code:
        call = find_known_call(path, context.cause)
        if call is not None:
            calls[call.id] = call
            paths.setdefault(call.id, []).append(path)
    selected = []
    for id_, call_paths in paths.items():
        share = sum(path.share_ratio for path in call_paths)
        if share >= MIN_SHARE and sum(path.samples for path in call_paths) >= MIN_SAMPLES:
            is_first = share >= MIN_FIRST_SHARE and is_code_the_reason(context.cause)
            advice = _build_advice(calls[id_], call_paths, share, context)
            selected.append(LineAdvice(advice, share, is_first, calls[id_].replaces))
    selected.sort(key=lambda item: (-item.share_ratio, item.advice.id))
    return tuple(selected[:MAX_LINE_ADVICE])


def _build_advice(
    call: KnownCall, paths: list[CodePath], share: float, context: AdviceContext
) -> Advice:
    shares: dict[CodeLocation, float] = {}
    for path in paths:
        shares[path.location] = shares.get(path.location, 0.0) + path.share_ratio
    line = max(shares, key=lambda location: (shares[location], str(location)))
    text, commands = strip_command_marks(_COMMAND.sub(_mark_match, call.change))
    where = describe_location(context)
    prefix = f"{where[:1].upper()}{where[1:]}: " if where else ""
    verb = f"and {len(shares) - 1} more spend" if len(shares) > 1 else "spends"
    spent = format_share(share)
    return Advice(
        what=f"{prefix}{format_line_in_function(line)} {verb} {spent} in {call.title}: {call.what}",
        because=f"{describe_loss_share(context)}; {spent} of it passed through {call.title}"
        f" ({sum(path.samples for path in paths):,} samples)",
        change=text,
        gain=_describe_gain(call, share, context),
        verify=describe_check(context, call.expected_change)
        + f"; {format_line_in_function(line)} has less of it in clusterprof analyze RUN --by line",
        worse=call.worse,
        id=call.id,
        effort=call.effort,
        commands=commands,
    )


def _mark_match(match: re.Match[str]) -> str:
    return mark_command(match[1])


def _describe_gain(call: KnownCall, share: float, context: AdviceContext) -> str:
    recoverable_ns = context.finding.recoverable_ns
    if recoverable_ns is None:
        text = "what it saves in this run is not known"
    else:
        saved_ns = round(min(share, 1.0) * recoverable_ns)
        text = f"at most {format_quantity(saved_ns, 'ns')} of GPU time here"
    return f"{text}; published: {call.published}" if call.published else text


def find_dominant_line(context: AdviceContext) -> CodePath | None:
    """Find the line through which half of the time or more passes; None if there is none."""
    shares: dict[str, float] = {}
    for path in context.code:
        shares[str(path.location)] = shares.get(str(path.location), 0.0) + path.share_ratio
    paths = [path for path in context.code if shares[str(path.location)] >= MIN_DOMINANT_SHARE]
    return paths[0] if paths else None
