"""A place for the tests of real faults: this machine as the only "node", with little data."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clusterprof_lab.real.faults.base import Options, Place
from clusterprof_lab.real.faults.registry import FAULTS

STEP_NS, SHARE = 300_000_000, 0.3
SLOWED_NS = 428_571_429
NODE = SimpleNamespace(pid=os.getpid(), name="here", cpu=min(os.sched_getaffinity(0)))


def make_place(folder: Path, node: Any = None, clean: bool = False, **options: Any) -> Place:
    few = {"data_mb": 4, **options}
    return Place(node, folder, np.random.default_rng(0), SHARE, STEP_NS, few, (), clean)


def require_fault(name: str) -> str:
    """Skip the test with the reason where the fault cannot be injected."""
    reason = FAULTS[name].why_not_here()
    if reason:
        pytest.skip(reason)
    return name


def read_lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def list_injected(options: Options) -> list[dict[str, Any]]:
    assert options.log is not None
    return [json.loads(line) for line in options.log.read_text().splitlines()]


def find_option(options: Options, name: str) -> str:
    return next(word.split("=", 1)[1] for word in options.script if word.startswith(f"{name}="))
