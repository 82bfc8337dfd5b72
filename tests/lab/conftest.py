"""The faults of the lab change the machine for everybody, so these tests run alone."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
HARMLESS = {
    "test_account.py",
    "test_judge.py",
    "test_two_jobs.py",
    "test_restarts.py",
    "test_hangs.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this folder's tests `alone`."""
    for item in items:
        if HERE in item.path.parents and item.path.name not in HARMLESS:
            item.add_marker(pytest.mark.alone)
