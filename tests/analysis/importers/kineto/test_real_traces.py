"""Traces that other people recorded, against plain interval arithmetic and other tools' figures.

They are no part of the repository: looked for beside it, and skipped where they are not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.probe import layout
from tests.support.kineto_traces import (
    import_trace,
    list_busy_ns,
    list_ranks,
    list_spans,
    measure_idle_ns,
)

FOLDERS = ("kineto-dlrm-8rank", "kineto-dataloader", "kineto-hta", "kineto-tracelens")
ROOT = Path(__file__).resolve().parents[5] / "shared" / "data"
QUICK_BYTES = 500_000
"""Larger ones are read in the long tests."""


def traces() -> Iterator[Any]:
    """Every trace there, each with what is known of it."""
    for folder in FOLDERS:
        known_of = ROOT / folder / "known.json"
        known = json.loads(known_of.read_text()) if known_of.exists() else {}
        of_ranks = known.get("independent_interval_reference", {}).items()
        each: dict[str, Any] = {
            f"{name}.pt.trace.json.gz": {"independent_interval_reference": value}
            for name, value in of_ranks
        }
        each |= known.get("traces", {})
        for path in sorted((ROOT / folder).glob("*.gz")):
            reference = each.get(path.name, {}).get("independent_interval_reference")
            marks = [pytest.mark.long] if path.stat().st_size > QUICK_BYTES else []
            yield pytest.param(path, reference, id=path.name[:40], marks=marks)


FOUND = list(traces())
NONE = pytest.param(None, None, marks=pytest.mark.skip("no ../shared/data beside the repository"))


def main_pid(node: NodeTables) -> int:
    """The process of the busiest device."""
    return int(list_ranks(node)[0]["pid"])


@pytest.mark.parametrize(("path", "reference"), FOUND or [NONE])
def test_idle_and_exposed_time_match_interval_arithmetic(
    path: Path, reference: dict[str, Any] | None
) -> None:
    (node,), account = import_trace(path)
    pid = main_pid(node)
    steps = list_spans(node, layout.STEP, pid)
    assert steps and not account.cut
    if reference is None:
        return
    from_ns, until_ns = steps[0][0], max(row[1] for row in steps)
    assert (until_ns - from_ns) / 1000 == pytest.approx(reference["window_us"], rel=1e-4)
    if reference["steps"]:
        assert len(steps) == reference["steps"]
    device = list_ranks(node)[0]["device"]
    if not list_busy_ns(node, device):
        return
    idle_us = measure_idle_ns(node, from_ns, until_ns, device) / 1000
    assert idle_us == pytest.approx(reference["gpu_idle_us"], rel=1e-3, abs=0.1)
    exposed_us = sum(row[3] for row in list_spans(node, layout.EXPOSED_COLLECTIVE, pid)) / 1000
    assert exposed_us == pytest.approx(reference["exposed_comm_us"], rel=1e-3, abs=0.1)
    together = list_spans(node, layout.COLLECTIVE, pid)
    hidden_us = covered(together) / 1000 - exposed_us
    assert hidden_us == pytest.approx(reference["comm_compute_overlap_us"], rel=1e-3, abs=0.1)
    waits = list_spans(node, layout.DATA_WAIT, pid)
    assert len(waits) == reference["dataloader_events"]
    waited_us = sum(row[1] - row[0] for row in waits) / 1000
    assert waited_us == pytest.approx(reference["dataloader_us"], rel=1e-3, abs=0.1)


def covered(rows: list[tuple[int, ...]]) -> int:
    """How much time some spans cover together."""
    total, reach = 0, 0
    for start, end in sorted((row[0], row[1]) for row in rows):
        total += max(end - max(start, reach), 0)
        reach = max(reach, end)
    return total


@pytest.mark.skipif(not FOUND, reason="no ../shared/data beside the repository")
def test_operations_of_eight_ranks_are_matched() -> None:
    collected = []
    for number in range(8):
        (node,), _ = import_trace(ROOT / FOLDERS[0] / f"rank{number}.pt.trace.json.gz")
        assert [rank["rank"] for rank in list_ranks(node)] == [number]
        wall_ns = node.wall_minus_own_ns
        assert wall_ns is not None
        rows = sorted(list_spans(node, layout.COLLECTIVE, main_pid(node)))
        collected.append(
            ([row[2:4] for row in rows], np.array([row[:2] for row in rows]) + wall_ns)
        )
    assert all(keys == collected[0][0] for keys, _ in collected) and len(collected[0][0]) == 8
    start_ns, end_ns = np.stack([times for _, times in collected], axis=2).transpose(1, 0, 2)
    last = np.bincount(start_ns.argmax(axis=1), minlength=8)
    assert last.tolist() == [0, 0, 0, 0, 1, 2, 0, 5]  # rank 7 came last five times
    assert (end_ns - start_ns).min(axis=1).sum() == 217_000  # what the transfers took
