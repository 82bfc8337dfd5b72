"""What runs here compares measured times with the truth, so nothing else may run beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this folder's tests `quiet`."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.quiet)
