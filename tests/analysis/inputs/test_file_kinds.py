"""What a file of no known format is taken for, and the advice."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.analysis.inputs.file_kinds import guess_file_kind

KINDS = {
    "train.py": (b"import torch\n", "a Python script", "clusterprof record python train.py"),
    "train": (b"#!/usr/bin/env python3\n", "a Python script", "clusterprof record python train"),
    "ls": (b"\x7fELF\x02\x01", "a program", "clusterprof record ls"),
    "page": (b"  <!DOCTYPE html>", "a page for a browser", "open it in a browser"),
    "my.yaml": (b"gate:\n", "settings", "--profile my.yaml"),
    "a.json": (b'{"a": 1}', "JSON of another program", "export it again"),
    "a.csv": (b"x,y\n1,2\n3,", "a table of another program", "analyze --help"),
    "gpu.csv": (
        b"2026/04/25 16:06:06.780, 0 %, 2 MiB\n2026/04/25 16:06:11.788, 9 %, 2 MiB\n",
        "a table without a header",
        "nvidia-smi --format=csv, without noheader",
    ),
    "stats.txt": (
        b" Time (%)  Total Time (ns)  Instances  Name\n    100.0  5  1  gemm\n",
        "the sums of nsys stats, which have no times",
        "nsys export --type sqlite",
    ),
    "notes": (b"slow since Monday\n", "plain text", "analyze --help"),
    "w.bin": (b"\x00\x01\x02", "binary data of another program", "analyze --help"),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_kind_comes_from_the_first_bytes_or_the_name(name: str) -> None:
    head, title, advice = KINDS[name]
    kind = guess_file_kind(Path(name), head)
    assert kind.title == title
    assert advice in kind.remedy
