"""Which line of a stack is the user's, what it calls, and where in the loader it is."""

from __future__ import annotations

import pytest

from clusterprof.analysis.timeline.code_locations import (
    LocatedStack,
    is_library_file,
    list_wait_kinds,
    locate_stack,
)
from clusterprof.report.code import CodeLocation
from clusterprof.util.source_calls import SourceReader

SITE = "/venv/lib/python3.11/site-packages/"
MAIN = CodeLocation("/job/train.py", 80, "main")
MODEL = CodeLocation("/job/model.py", 20, "Net.forward")
CALL = CodeLocation(SITE + "torch/nn/modules/module.py", 1779, "Module._wrapped_call_impl")
LINEAR = CodeLocation(SITE + "torch/nn/modules/linear.py", 125, "Linear.forward")
FIT = CodeLocation(SITE + "lightning/pytorch/trainer/trainer.py", 500, "Trainer.fit")
STEP = CodeLocation("/job/train.py", 30, "Model.training_step")
BOOT = CodeLocation("/usr/lib/python3.11/multiprocessing/process.py", 314, "BaseProcess._bootstrap")
LOOP = CodeLocation(SITE + "torch/utils/data/_utils/worker.py", 349, "_worker_loop")
FETCH = CodeLocation(SITE + "torch/utils/data/_utils/fetch.py", 52, "_MapDatasetFetcher.fetch")
STREAM = CodeLocation(
    SITE + "torch/utils/data/_utils/fetch.py", 33, "_IterableDatasetFetcher.fetch"
)
ITEM = CodeLocation("/job/data.py", 10, "Photos.__getitem__")
COMPOSE = CodeLocation(SITE + "torchvision/transforms/transforms.py", 95, "Compose.__call__")
RESIZE = CodeLocation(SITE + "torchvision/transforms/transforms.py", 354, "Resize.forward")
PIL = CodeLocation(SITE + "PIL/Image.py", 2450, "Image.resize")
PROXY = CodeLocation("<string>", 2, "get")
MANAGER = CodeLocation("/usr/lib/python3.11/multiprocessing/managers.py", 820, "_callmethod")
RUNPY = CodeLocation("<frozen runpy>", 198, "_run_module_as_main")
INSTALLED = CodeLocation(SITE + "trainer/__main__.py", 12, "main")
INSTALLED_STEP = CodeLocation(SITE + "trainer/steps.py", 40, "augment")


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ([MAIN], LocatedStack(MAIN, None)),
        ([MAIN, CALL, MODEL, CALL, LINEAR], LocatedStack(MODEL, LINEAR)),
        ([MAIN, FIT, CALL, STEP], LocatedStack(STEP, None)),
        ([MAIN, FIT], LocatedStack(MAIN, FIT)),
        # python -m, from a folder or of an installed package
        ([RUNPY, RUNPY, MAIN, CALL, LINEAR], LocatedStack(MAIN, LINEAR)),
        ([RUNPY, RUNPY, INSTALLED, INSTALLED_STEP, PIL], LocatedStack(INSTALLED_STEP, PIL)),
        ([RUNPY, FIT, CALL], LocatedStack(FIT, CALL)),
        ([MAIN, BOOT, LOOP, FETCH, ITEM, PIL], LocatedStack(ITEM, PIL, "dataset")),
        (
            [MAIN, BOOT, LOOP, FETCH, ITEM, COMPOSE, CALL, RESIZE, PIL],
            LocatedStack(ITEM, RESIZE, "transform", "Resize"),
        ),
        (
            [MAIN, BOOT, LOOP, FETCH, CodeLocation("/job/data.py", 60, "pad_batch")],
            LocatedStack(CodeLocation("/job/data.py", 60, "pad_batch"), None, "collate"),
        ),
        (
            [MAIN, BOOT, LOOP, STREAM, CodeLocation("/job/data.py", 70, "Stream.read_shards")],
            LocatedStack(CodeLocation("/job/data.py", 70, "Stream.read_shards"), None, "dataset"),
        ),
        # Without the user's own code in the worker: the dataset's line, not the training loop's.
        (
            [
                MAIN,
                BOOT,
                LOOP,
                FETCH,
                CodeLocation(
                    SITE + "torchvision/datasets/folder.py", 245, "DatasetFolder.__getitem__"
                ),
                PIL,
            ],
            LocatedStack(
                CodeLocation(
                    SITE + "torchvision/datasets/folder.py", 245, "DatasetFolder.__getitem__"
                ),
                PIL,
                "dataset",
            ),
        ),
        (
            [
                MAIN,
                CodeLocation("/usr/lib/python3.11/threading.py", 1045, "Thread._bootstrap_inner"),
                CodeLocation(
                    SITE + "torch/utils/data/_utils/pin_memory.py", 37, "_pin_memory_loop"
                ),
            ],
            LocatedStack(
                CodeLocation(
                    SITE + "torch/utils/data/_utils/pin_memory.py", 37, "_pin_memory_loop"
                ),
                None,
                "pin",
            ),
        ),
        (
            [
                MAIN,
                CodeLocation(SITE + "torch/nn/modules/container.py", 240, "Sequential.forward"),
                MODEL,
            ],
            LocatedStack(MODEL, None),
        ),
        ([MAIN, BOOT, LOOP], LocatedStack(LOOP, None)),
        (
            [CodeLocation("<string>", 3, "<module>")],
            LocatedStack(CodeLocation("<string>", 3, "<module>"), None),
        ),
        # a proxy of a manager: code that a library has made up
        (
            [MAIN, CodeLocation("<string>", 2, "get"), MANAGER],
            LocatedStack(MAIN, CodeLocation("<string>", 2, "get")),
        ),
    ],
)
def test_the_line_a_user_can_change_is_named(
    stack: list[CodeLocation], expected: LocatedStack
) -> None:
    assert locate_stack(stack) == expected


def test_an_empty_stack_has_no_place() -> None:
    assert locate_stack([]) is None


def test_libraries_are_recognized_by_install_path() -> None:
    assert is_library_file(SITE + "torch/serialization.py")
    assert is_library_file("/opt/conda/lib/python3.10/json/decoder.py")
    assert is_library_file("/usr/lib/python3/dist-packages/numpy/core.py")
    assert is_library_file("<frozen importlib._bootstrap>")
    assert is_library_file("torch/utils/data/dataloader.py")  # as the profiler shortens it
    assert is_library_file("threading.py") and is_library_file("<nn.Module>")
    assert not is_library_file("<nvtx>") and not is_library_file("<dftracer>")  # user's marks
    assert not is_library_file("train.py") and not is_library_file("src/torch/nn.py")
    assert not is_library_file("/torch/nn.py") and not is_library_file("test.py")
    assert not is_library_file("/data/pythonlib/train.py")
    assert not is_library_file("/lib/train.py")
    assert not is_library_file("<string>")
    assert not is_library_file("")


QUEUE_GET = CodeLocation("/usr/lib/python3.11/multiprocessing/queues.py", 103, "Queue.get")
QUEUE_PUT = CodeLocation("/usr/lib/python3.11/queue.py", 140, "Queue.put")
POOL_NEXT = CodeLocation("/usr/lib/python3.11/multiprocessing/pool.py", 861, "IMapIterator.next")
LOCK_WAIT = CodeLocation("/usr/lib/python3.11/threading.py", 320, "Condition.wait")
REDUCE = CodeLocation(SITE + "torch/distributed/distributed_c10d.py", 1, "all_reduce")


@pytest.mark.parametrize(
    ("stack", "kinds"),
    [
        ([MAIN, QUEUE_GET], ("job",)),
        ([MAIN, QUEUE_PUT, LOCK_WAIT], ("job", "output")),
        ([MAIN, POOL_NEXT, LOCK_WAIT], ("job", "pool")),
        ([MAIN, REDUCE, LOCK_WAIT], ()),
        ([MAIN], ()),  # its file is not there
        ([], ()),
    ],
)
def test_wait_kinds_are_read_from_the_stack(
    stack: list[CodeLocation], kinds: tuple[str, ...]
) -> None:
    assert list_wait_kinds(stack, SourceReader(0)) == kinds
