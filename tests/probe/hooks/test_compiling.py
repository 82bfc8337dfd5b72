"""Compilations of the real torch.compile."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.job_python import require_torch
from tests.support.probe_jobs import install_probe, record_code

require_torch("2.3", "its TorchDynamo tells nobody when it compiles")
pytestmark = pytest.mark.torch

COMPILE = 13
# Two shapes compile twice (the second time with a dynamic dimension), a third one no more. A reset
# forgets the callbacks of TorchDynamo, and what it had compiled.
CODE = """
import torch
import clusterprof

@torch.compile(backend="eager")
def double(x):
    return x * 2

for length in (3, 4, 5, 3):
    double(torch.ones(length))
torch._dynamo.reset()
double(torch.ones(3))
"""


def test_each_compilation_records_the_number_of_earlier_compilations(tmp_path: Path) -> None:
    (ring,) = record_code(CODE, install_probe(tmp_path / "run"))
    assert ring.switched_off == 0
    compilations = ring.of(COMPILE)
    assert [compilation.a for compilation in compilations] == [0, 1, 0]
    assert all(compilation.end_ns > compilation.start_ns for compilation in compilations)
    assert all(b.start_ns >= a.end_ns for a, b in pairwise(compilations))
