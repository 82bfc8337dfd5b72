"""Fixtures of collectors: closed RDMA ports, and what third-party trees must print."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator

import pytest

from tests.support.node_exporter import SHARED
from tests.support.rdma_ports import close_rigs


@pytest.fixture(scope="module")
def theirs() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What they must print: (metric, labels) -> number."""
    collected = {}
    text = gzip.decompress((SHARED / "expected-e2e-output.txt.gz").read_bytes()).decode()
    for line in text.splitlines():
        match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
        if match:
            labels = tuple(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            collected[match[1], labels] = float(match[3])
    return collected


@pytest.fixture
def closed_rdma_ports() -> Iterator[None]:
    """Close the RDMA collectors that the test opened."""
    yield
    close_rigs()
