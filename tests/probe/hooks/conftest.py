"""A device of PyTorch that runs on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.accelerators.torch_device import build_library
from tests.support.probe_jobs import install_probe
from tests.support.warm_jobs import WarmJobs


@pytest.fixture(scope="session")
def torch_device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library of the device, compiled by the first test of the session that needs it."""
    folder = tmp_path_factory.getbasetemp()
    shared = "PYTEST_XDIST_WORKER" in os.environ
    return build_library(folder.parent if shared else folder)


@pytest.fixture(scope="session")
def warm_jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmJobs]:
    """Jobs under the probe."""
    folder = tmp_path_factory.mktemp("warm")
    with WarmJobs(folder, install_probe(folder / "run")) as jobs:
        yield jobs


@pytest.fixture(scope="session")
def bare_jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmJobs]:
    """Jobs without the probe."""
    with WarmJobs(tmp_path_factory.mktemp("bare"), None) as jobs:
        yield jobs
