"""Stacks of the thread that launches, from NVTX ranges and Python samples; all by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clusterprof.analysis.importers.nsys.importer import Nsys
from tests.support.import_results import import_folder
from tests.support.nsys_files import (
    CALLS,
    GEMM,
    KERNELS,
    LAUNCH,
    NAMES,
    NVTX,
    SAMPLES,
    STACKS,
    encode_process_id,
    encode_thread_id,
    write_database,
)
from tests.support.stacks import list_samples

MS = 1_000_000
P, T, OTHER = encode_process_id(11), encode_thread_id(11, 11), encode_thread_id(11, 12)
WORK: list[tuple[Any, Any]] = [
    (KERNELS, [(0, MS, 0, 7, 1, P, GEMM), (19 * MS, 20 * MS, 0, 7, 2, P, GEMM)]),
    (CALLS, [(0, 1_000, T, 1, LAUNCH), (18 * MS, 18 * MS + 9, T, 2, LAUNCH)]),
]
RANGES = [
    (0, 20 * MS, 59, T, "step 1", None, 0),
    (2 * MS, 10 * MS, 59, T, "forward", None, 0),
    (4 * MS, 6 * MS, 59, T, "layer 3", None, 0),
    (12 * MS, 16 * MS, 59, T, "load_batch", None, 0),
    (13 * MS, 14 * MS, 59, T, "aten::mm, op_id = 3", None, 0),
    (2 * MS, 18 * MS, 59, OTHER, "elsewhere", None, 0),
]


def test_nvtx_ranges_become_stack_frames(tmp_path: Path) -> None:
    file = write_database(tmp_path / "a.sqlite", *WORK, (NVTX, RANGES))
    (node,), (account,), _ = import_folder(Nsys(), file)
    forward, layer = "<nvtx>:0 forward", "<nvtx>:0 layer #"
    assert list_samples(node, 11) == {
        0: [
            (3.0, 2.0, [forward]),
            (5.0, 2.0, [forward, layer]),
            (8.0, 4.0, [forward]),
            (14.0, 4.0, ["<nvtx>:0 load_batch"]),
        ]
    }
    assert account.read["samples of stacks"] == 4


def test_python_frames_follow_the_nvtx_ranges(tmp_path: Path) -> None:
    names = [
        *NAMES,
        (20, "augment"),
        (21, "/job/data.py"),
        (22, "/job/train.py:30 main"),
        (23, "PyEval_EvalFrame"),
        (24, "/usr/lib/libpython3.so"),
        (25, "resize (PIL/Image.py:2450)"),
    ]
    # Every 2 ms from 1 ms on; the last four have a stack, the third of them a native one only.
    times = [1, 3, 5, 7, 9, 11]
    samples = [(100 + n, at * MS, 0, 1, T, 1) for n, at in enumerate(times)]
    stacks = [
        (102, 25, 24, 0, 0),
        (102, 23, 24, 0, 1),
        (102, 20, 21, 0, 2),
        (102, 22, 24, 0, 3),
        (103, 20, 21, 0, 0),
        (104, 23, 24, 0, 0),
        (105, 22, 24, 0, 0),
    ]
    tables = [*WORK, (NVTX, RANGES), (SAMPLES, samples), (STACKS, stacks)]
    (node,), _, _ = import_folder(
        Nsys(), write_database(tmp_path / "a.sqlite", *tables, names=names)
    )
    forward = "<nvtx>:0 forward"
    augment, main = "/job/data.py:0 augment", "/job/train.py:30 main"
    assert list_samples(node, 11)[0] == [
        (1.0, 2.0, []),
        (3.0, 2.0, [forward]),
        (5.0, 2.0, [forward, "<nvtx>:0 layer #", main, augment, "PIL/Image.py:2450 resize"]),
        (7.0, 2.0, [forward, augment]),
        (9.0, 2.0, [forward]),
        (11.0, 2.0, [main]),
    ]


def test_missing_ranges_and_python_samples_give_no_stacks(tmp_path: Path) -> None:
    (node,), (account,), _ = import_folder(Nsys(), write_database(tmp_path / "a.sqlite", *WORK))
    assert list_samples(node, 11) == {}
    assert "samples of stacks" not in account.read
