"""Find in a stack the line that its user can change, and the stage of the data loader.

train.py:80 main              user
torch/nn/modules/module.py    library
model.py:42 forward           user: the innermost such line is the place
PIL/Image.py:2450 resize      library: what it called
PIL/ImageFile.py:300 load     library
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from clusterprof.report.code import CodeLocation, LoaderStage
from clusterprof.util.source_calls import SourceReader

_LIBRARY_PATH = re.compile(r"/(site|dist)-packages/|/lib(64|32)?/python\d|\.egg/")
_INSTALLED_PACKAGE = re.compile(r"/(?:site|dist)-packages/(\w+)/")
_PACKAGE_NAMES = """
torch torchvision torchaudio torchtext torchdata torch_xla torchmetrics triton numpy scipy pandas
pyarrow sklearn skimage PIL cv2 albumentations kornia imageio h5py zarr transformers tokenizers
sentencepiece accelerate peft trl diffusers safetensors huggingface_hub deepspeed lightning
pytorch_lightning lightning_fabric lightning_utilities jax jaxlib flax optax orbax tensorflow keras
timm monai wandb mlflow neptune comet_ml tensorboard tensorboardX tqdm rich requests urllib3 boto3
botocore s3fs gcsfs fsspec aiohttp matplotlib webdataset spdl ray nvidia apex xformers flash_attn
einops mmcv mmengine psutil pydantic absl
"""
_PACKAGES = frozenset(_PACKAGE_NAMES.split())
"""Installed packages whose names nobody gives to a folder of their own."""
_OFTEN_OWN = frozenset({"test", "profile", "trace", "code", "cmd", "this", "statistics"})
"""Modules of the standard library that are as often a file of the user."""
_EMULATOR = "clusterprof/demo/accelerator.py"
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_NO_FILE = ("<frozen ", "<built-in", "<nn.Module", "<__array_function__", "<attrs ")
"""Code of libraries without a file. Ranges and traced calls have none, too: users mark these."""
_JOB_FILES = re.compile(
    r"(?:^|/)(?:multiprocessing|concurrent/futures|asyncio)/|(?:^|/)(?:queue|threading)\.py$"
)
_POOL_FILES = re.compile(r"(?:^|/)(?:multiprocessing/pool|concurrent/futures/process)\.py$")
_RANK_FILES = re.compile(r"(?:^|/)(?:torch/distributed|torch/utils/data|horovod|mpi4py|ray)/")
_OUTPUT_FUNCTIONS = frozenset({"put", "send", "_send", "send_bytes", "_send_bytes", "join"})
"""Functions in which a thread waits for those that take what it hands over."""
_MADE_UP = "<string>"
"""File of code that was made up while the job ran, or of `python -c`."""
_PLUMBING = (
    *("_call_impl", "_wrapped_call_impl", "decorate_context", "_fn"),
    *("inner", "wrap", "wrapped", "wrapper", "wrapped_func"),
)
"""Functions of libraries that only call the function they wrap."""
_STARTS_OF_TASKS = (
    ("torch/utils/data/_utils/worker.py", "_worker_loop"),
    ("multiprocessing/process.py", "_bootstrap"),
    ("/threading.py", "_bootstrap_inner"),
)
"""Where a worker or a thread begins its own work; outer frames are of the code that started it."""
_MODULE_RUNNERS = ("<frozen runpy>", "/runpy.py")
"""Files of `python -m`, whose frames are outside those of the module that it runs."""
_FETCH_FILE = "torch/utils/data/_utils/fetch.py"
_PIN_FILE = "torch/utils/data/_utils/pin_memory.py"
_COLLATE_FILE = "torch/utils/data/_utils/collate.py"
_MODEL_FOLDER = "torch/nn/"  # its Sequential is a part of a model
_PROCESS_FILE = "multiprocessing/process.py"
_LOADER_FOLDER = "torch/utils/data/"
_READS = ("__getitem__", "__getitems__", "__next__", "__iter__")
_COMPOSE = re.compile(r"(^|\.)(Compose|Sequential|SomeOf|OneOf|ReplayCompose)\.(__call__|forward)$")
_TRANSFORM_CALLS = ("__call__", "forward", "apply", "transform", "_transform")


@dataclass(frozen=True, slots=True)
class LocatedStack:
    """A stack with the line that its user can change, and what that line called."""

    user_line: CodeLocation
    library: CodeLocation | None
    stage: LoaderStage = ""
    transform: str = ""


def is_library_file(file: str) -> bool:
    """Return whether a file is of the standard library or an installed package."""
    is_installed = _LIBRARY_PATH.search(file) is not None or file.endswith(_EMULATOR)
    return is_installed or file.startswith(_NO_FILE) or _is_shortened_library_path(file)


def _is_shortened_library_path(file: str) -> bool:
    """Return whether a path is of a library, as profilers write it: `torch/nn/functional.py`.

    They leave out the folder where packages are installed.
    """
    if file.startswith(("/", ".", "<")):
        return False
    first = file.partition("/")[0].removesuffix(".py")
    is_standard = first in sys.stdlib_module_names and first not in _OFTEN_OWN
    return is_standard or first in _PACKAGES


def split_at_own_line(
    locations: Sequence[CodeLocation],
) -> tuple[CodeLocation, Sequence[CodeLocation]] | None:
    """Split a stack, given outermost first, at the line that its user can change.

    Returns it and the lines of libraries that it called, outermost first. An installed package
    that the job was started from is the user's where nothing else is. Otherwise, where no line is
    the user's, it is the outermost known one, and is itself one of a library. None for an empty
    stack.
    """
    if not locations:
        return None
    frames = _drop_start_frames(locations)
    user = [index for index, location in enumerate(frames) if not is_library_file(location.file)]
    # Proxies, named tuples and data classes of libraries run code that they have made up.
    user = [index for index in user if frames[index].file != _MADE_UP] or user
    started = _find_installed_package(frames[0].file)
    if not user and started not in ("", *_PACKAGES):  # `python -m trainer`, installed with pip
        user = [
            i
            for i, location in enumerate(frames)
            if _find_installed_package(location.file) == started
        ]
    if user:
        return _name_by_function(frames, user[-1]), frames[user[-1] + 1 :]
    below_loader = _drop_loader_frames(frames)
    return below_loader[0], below_loader


def _find_installed_package(file: str) -> str:
    """Find the package in whose installed folder a file is; "" if in none."""
    match = _INSTALLED_PACKAGE.search(file)
    return match[1] if match else ""


def locate_stack(locations: Sequence[CodeLocation]) -> LocatedStack | None:
    """Locate a stack, given outermost first, for its user; None for an empty stack."""
    split = split_at_own_line(locations)
    if split is None:
        return None
    user_line, called = split
    callee = _choose_callee(called[1:] if called and called[0] == user_line else called)
    frames = _drop_start_frames(locations)
    return LocatedStack(user_line, callee, _find_stage(frames), _find_transform(frames))


def list_wait_kinds(locations: Sequence[CodeLocation], reader: SourceReader) -> tuple[str, ...]:
    """List what a waiting thread waits for, by what the innermost line of the user called.

    "job": another part of the job, with "output" to hand something over, and "pool" for a pool of
    processes; "poll": its line is in a loop that polls; "sleep": its line is in none. () = not
    known, or for other ranks or the data loader.
    """
    split = split_at_own_line(locations)
    if split is None:
        return ()
    user_line, called = split
    if any(_RANK_FILES.search(location.file) for location in called):
        return ()
    if any(_JOB_FILES.search(location.file) for location in called):
        names = {location.function.rpartition(".")[2] for location in called}
        is_pool = any(_POOL_FILES.search(location.file) for location in called)
        output = ("output",) if names & _OUTPUT_FUNCTIONS else ()
        return ("job", *output, *(("pool",) if is_pool else ()))
    polls = reader.is_in_poll(user_line.file, user_line.line, user_line.function)
    if polls:
        return ("poll",)
    return ("sleep",) if polls is False and not called else ()


def _drop_loader_frames(locations: Sequence[CodeLocation]) -> list[CodeLocation]:
    """Drop the frames of a worker's loop; the innermost one stays if there are no others."""
    inner = [
        location
        for location in locations
        if _LOADER_FOLDER not in location.file and not location.file.endswith(_PROCESS_FILE)
    ]
    return inner or list(locations[-1:])


def _name_by_function(locations: Sequence[CodeLocation], index: int) -> CodeLocation:
    """Return a place with the function around it, where it is in a comprehension."""
    location = locations[index]
    if not location.function.endswith(_COMPREHENSIONS):
        return location
    for outer in reversed(locations[:index]):
        if outer.file == location.file and not outer.function.endswith(_COMPREHENSIONS):
            return CodeLocation(location.file, location.line, outer.function)
    return location


def _drop_start_frames(locations: Sequence[CodeLocation]) -> Sequence[CodeLocation]:
    """Drop the frames of the code that started a worker or a thread."""
    for index in range(len(locations) - 2, -1, -1):
        location = locations[index]
        name = location.function.rpartition(".")[2]
        if any(location.file.endswith(file) and name == start for file, start in _STARTS_OF_TASKS):
            return locations[index + 1 :]
    first = next(
        (
            index
            for index, location in enumerate(locations)
            if not location.file.endswith(_MODULE_RUNNERS)
        ),
        0,
    )
    return locations[first:]


def _choose_callee(inner: Sequence[CodeLocation]) -> CodeLocation | None:
    """Choose the first function called that does more than call another one."""
    for location in inner:
        if not (_is_plumbing(location) or _COMPOSE.search(location.function)):
            return location
    return inner[0] if inner else None


def _is_plumbing(location: CodeLocation) -> bool:
    return location.function.rpartition(".")[2] in _PLUMBING


def _find_stage(locations: Sequence[CodeLocation]) -> LoaderStage:
    files = [location.file for location in locations]
    if any(file.endswith(_PIN_FILE) for file in files):
        return "pin"
    fetch = [index for index, file in enumerate(files) if file.endswith(_FETCH_FILE)]
    if not fetch:
        return ""
    inner = locations[fetch[-1] + 1 :]
    if not inner:
        return "dataset"
    if inner[0].file.endswith(_COLLATE_FILE):
        return "collate"
    name = inner[0].function.rpartition(".")[2]
    is_read = name in _READS or "__getitem__" in inner[0].function
    if not is_read and "collate" not in name:  # an iterable dataset may read in any generator
        is_read = "Iterable" in locations[fetch[-1]].function
    if not is_read:
        return "collate"
    return "transform" if _find_transform(inner) else "dataset"


def _find_transform(locations: Sequence[CodeLocation]) -> str:
    """Find which transform of a composed pipeline a stack is in; "" for none."""
    for index, location in enumerate(locations):
        if _COMPOSE.search(location.function) and _MODEL_FOLDER not in location.file:
            inner = (called for called in locations[index + 1 :] if not _is_plumbing(called))
            called = next(inner, None)
            owner, _, name = called.function.rpartition(".") if called is not None else ("", "", "")
            return owner.rpartition(".")[2] if owner and name in _TRANSFORM_CALLS else name
    return ""
