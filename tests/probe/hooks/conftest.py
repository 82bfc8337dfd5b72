"""A device of PyTorch that runs on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.accelerators.torch_device import build_library


@pytest.fixture(scope="session")
def torch_device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library of the device, compiled by the first test of the session that needs it."""
    folder = tmp_path_factory.getbasetemp()
    shared = "PYTEST_XDIST_WORKER" in os.environ
    return build_library(folder.parent if shared else folder)
