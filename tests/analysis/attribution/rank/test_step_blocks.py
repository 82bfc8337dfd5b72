"""A run in blocks of its steps: worked out by hand, the same however it is read, sums exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clusterprof.analysis.attribution.rank.step_blocks import (
    MAX_BLOCKS,
    StepBlockTable,
    compute_length_bins,
    merge_keys,
    unpack_keys,
)
from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.findings.metrics import (
    _allocate_causes,
    _build_length_histograms,
    allocate_by_profile,
)
from clusterprof.analysis.findings.report import _parse_frameworks
from clusterprof.analysis.node.analyze import analyze_node
from clusterprof.analysis.pipeline import analyze
from clusterprof.analysis.timeline.collectives.int_table import keep_packed
from clusterprof.report.model import Report

RECORDING = Path(__file__).parents[3] / "recordings" / "v1"
S = 1_000_000_000


def test_allocation_by_profile_keeps_the_total() -> None:
    assert allocate_by_profile(7, np.array([1, 1, 2])).tolist() == [2, 2, 3]
    assert allocate_by_profile(-7, np.array([1, 1, 2])).tolist() == [-2, -2, -3]
    assert allocate_by_profile(10, np.array([0, 0])).tolist() == [5, 5]
    random = np.random.default_rng(1)
    for total in (1, 10**15 + 7, 12345):
        assert allocate_by_profile(total, random.integers(0, 10**9, 100)).sum() == total


def test_length_bins_have_the_documented_width() -> None:
    lengths = np.array([1, 2, 100_000_000, 100_600_000, 200_000_000])
    # log2: 0, 1, 26.575, 26.584, 27.575
    assert compute_length_bins(lengths).tolist() == [0, 128, 3401, 3402, 3529]


def test_widened_blocks_keep_their_sums() -> None:
    sums = np.arange(9 * 5).reshape(9, 5)
    keys = merge_keys(
        np.array([[0 << 16 | 7, 1 << 16 | 7, 4 << 16 | 9, 4 << 16 | 9], [1, 2, 3, 4]])
    )
    lost = {"startup": np.array([5, 4, 3, 2, 1])}
    blocks = StepBlockTable(2, keep_packed(sums), lost, keys).widen(4)
    assert blocks.width == 4
    assert blocks.sums[0].tolist() == [0 + 1, 2 + 3, 4]
    assert blocks.lost["startup"].tolist() == [9, 5, 1]
    assert [key.tolist() for key in unpack_keys(blocks.keys)] == [[0, 2], [7, 9]]
    assert blocks.keys[1].tolist() == [3, 7]
    assert _build_length_histograms([blocks], 3) == (((7, 3),), (), ((9, 7),))


def test_wait_causes_are_spread_over_blocks_like_the_waits() -> None:
    lost = np.array([10, 20, 30])
    claims = {"storage-local": np.array([10, 0, 0]), "cpu-gc": np.array([0, 0, 10])}
    buckets = {"storage-local": 25, "cpu": 10, "net-transfer": 20, "unattributed": 5}
    # not claimed: 0, 20, 20; of what storage cost 15 were felt by waiting; gc is reported by family
    by_key = {cause: ns.tolist() for cause, ns in _allocate_causes(buckets, claims, lost)}
    assert {cause: sum(ns) for cause, ns in by_key.items()} == buckets
    assert by_key["storage-local"] == [10, 8, 7]
    assert by_key["cpu"] == [0, 0, 10]
    assert by_key["net-transfer"] == [0, 10, 10]


@pytest.fixture(scope="module")
def stored() -> Report:
    return analyze(RECORDING)


def test_chunk_length_does_not_change_step_blocks() -> None:
    (folder,) = (path for path in RECORDING.iterdir() if path.is_dir())
    read = [
        analyze_node(folder, build_limits({}), chunk_ns).ranks
        for chunk_ns in (60 * S, 2 * S, S // 2)
    ]
    for whole, *parts in zip(*read):
        expected = whole.blocks
        assert expected is not None
        for blocks in (part.blocks for part in parts):
            assert blocks is not None
            assert blocks.width == expected.width
            assert blocks.sums.tolist() == expected.sums.tolist()
            assert blocks.keys.tolist() == expected.keys.tolist()
            assert {k: ns.tolist() for k, ns in blocks.lost.items()} == {
                k: ns.tolist() for k, ns in expected.lost.items()
            }


def test_blocks_of_a_recording_add_up_to_its_report(stored: Report) -> None:
    steps = stored.steps
    assert steps is not None and steps.blocks <= MAX_BLOCKS
    assert sum(steps.in_step_ns) == stored.in_step_ns
    assert sum(steps.lost_ns) == stored.lost_ns
    assert sum(steps.steps) == sum(rank.steps for rank in stored.ranks)
    by_cause: dict[str, int] = {}
    for rank in stored.ranks:
        for cause, ns in rank.buckets:
            by_cause[cause] = by_cause.get(cause, 0) + ns
    assert {cause: sum(ns) for cause, _, ns in steps.lost} == by_cause
    for block, count in zip(steps.lengths, steps.steps):
        assert sum(n for _, n in block) == count


def test_the_fingerprint_of_a_run_matches_its_recording(stored: Report) -> None:
    stated = stored.fingerprint
    assert stated is not None
    assert stated.recordings == tuple(sorted(node.key for node in stored.nodes))
    assert stated.measured_by == tuple(sorted({rank.source for rank in stored.ranks}))
    assert stated.nodes == 1 and stated.started_at_ns is not None
    assert _parse_frameworks("torch 2.13.0, jax 0.10.2") == [
        ("torch", " ", "2.13.0"),
        ("jax", " ", "0.10.2"),
    ]
    assert _parse_frameworks(None) == _parse_frameworks("torch") == []
