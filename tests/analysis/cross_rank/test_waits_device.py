"""Ranks whose hosts only issue operations while their devices wait in them (CUDA)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterprof.probe import layout
from tests.support.random_jobs import SLOW, analyze_script, check_conservation, draw_scripts
from tests.support.recordings import Script, make_training
from tests.support.report_laws import analyze_metrics
from tests.support.waiting_jobs import make_scripts, record_and_analyze, sum_rank_seconds

ISSUE_S = 0.0001


def issued(scripts: list[Script]) -> list[Script]:
    """The same job on CUDA: hosts go on after 0.1 ms, events say how long the devices stood."""
    for script in scripts:
        waits = []
        for at, span in enumerate(script.main_spans):
            if span[0] == layout.COLLECTIVE:
                kind, come, leave, *rest = span
                gone = round(come + ISSUE_S, 6)
                script.main_spans[at] = (kind, come, gone, *rest)
                waits.append((come, gone, rest[1], round((leave - come) * 1e9)))
        measure(script, waits)
    return scripts


def measure(script: Script, waits: list[tuple[float, float, int, int]]) -> None:
    """Add `exposed_collective` spans (came, went on, number of the operation, device ns)."""
    script.main_spans += [
        (layout.EXPOSED_COLLECTIVE, come, gone, ("number", number), ns)
        for come, gone, number, ns in waits
    ]
    script.main_spans.sort(key=lambda span: span[2])  # as they are handed over and numbered
    sequence = {
        span[4]: at for at, span in enumerate(script.main_spans, 1) if span[0] == layout.COLLECTIVE
    }
    for at, span in enumerate(script.main_spans):
        if span[0] == layout.EXPOSED_COLLECTIVE:
            script.main_spans[at] = (*span[:3], sequence[span[3][1]], span[4])


def test_device_waits_are_charged_like_host_waits(tmp_path: Path) -> None:
    # Rank 1 waits 0.2 s for data before its 0.3 s of work; rank 0 therefore 0.2 s in the
    # all-reduce, both then transfer for 0.1 s: 60 steps of 0.6 s.
    host = record_and_analyze(make_scripts((0.0, 0.3), (0.2, 0.3)), tmp_path / "host")
    device = record_and_analyze(issued(make_scripts((0.0, 0.3), (0.2, 0.3))), tmp_path / "device")
    assert sum_rank_seconds(device, 0) == {
        "net-transfer": 6.0,
        "storage-local": 6.0,
        "cpu-preprocess": 6.0,
    }
    for rank in (0, 1):
        assert sum_rank_seconds(device, rank) == sum_rank_seconds(host, rank)
    assert analyze_metrics(device)["stall.network_ratio"] == pytest.approx(12 / 72)


def test_sleep_after_an_operation_without_events_has_no_cause(tmp_path: Path) -> None:
    # 60 steps of 0.6 s. The span of an operation is 0.1 ms long, and the host sleeps on until all
    # have left it: rank 0 for 0.3 s, rank 1 for 0.1 s. What its device does meanwhile is unknown.
    scripts = issued(make_scripts((0.0, 0.3), (0.2, 0.3)))
    for script in scripts:
        script.main_spans = [s for s in script.main_spans if s[0] != layout.EXPOSED_COLLECTIVE]
    report = record_and_analyze(scripts, tmp_path)
    transfer = round(60 * ISSUE_S, 3)
    assert sum_rank_seconds(report, 0) == {"net-transfer": transfer, "unattributed": 18 - transfer}
    second = sum_rank_seconds(report, 1)
    assert second.pop("startup") + second.pop("unattributed") == pytest.approx(6 - transfer)
    assert second == {"net-transfer": transfer, "storage-local": 6.0, "cpu-preprocess": 6.0}


@st.composite
def with_operations(draw: st.DrawFn) -> Script:
    """Any job of `draw_scripts`, with operations that its device waited in, one after another."""
    script = draw(draw_scripts())
    issues = draw(
        st.lists(st.integers(600, int(script.end * 1000) - 600), max_size=12, unique=True)
    )
    waits = []
    for number, at_ms in enumerate(sorted(issues)):
        come, gone = at_ms / 1000, at_ms / 1000 + 0.0005
        script.main_spans.append((layout.COLLECTIVE, come, gone, 7, number, 1, layout.ALL_REDUCE))
        if draw(st.booleans()):
            waits.append((come, gone, number, draw(st.integers(0, 900_000_000))))
    measure(script, waits)
    return script


@SLOW
@given(with_operations(), st.sampled_from([400, 900, 2_000, 7_000]))
def test_cutting_into_chunks_does_not_change_the_ledger(script: Script, chunk_ms: int) -> None:
    [whole] = analyze_script(script, 10**15)
    [cut] = analyze_script(script, chunk_ms * 1_000_000)
    check_conservation(whole)
    check_conservation(cut)
    assert cut.ledger.lost_ns == whole.ledger.lost_ns
    mine, theirs = dict(whole.ledger.buckets), dict(cut.ledger.buckets)
    for id_ in {*mine, *theirs}:
        assert abs(mine.get(id_, 0) - theirs.get(id_, 0)) <= 0.02 * whole.ledger.lost_ns + 2


def test_a_wait_across_chunks_is_counted_in_full(tmp_path: Path) -> None:
    # Two steps of 4 s; the operation issued at 1.2 holds the device until 4.7: 3.5 s.
    script = make_training([(0.0, 4.0), (0.0, 4.0)])
    script.busy = None
    script.main_spans.append((layout.COLLECTIVE, 1.2, 1.201, 7, 0, 1, layout.ALL_REDUCE))
    measure(script, [(1.2, 1.201, 0, 3_500_000_000)])
    for chunk_ns in (10**15, 400_000_000, 1_000_000_000):
        [rank_result] = analyze_script(script, chunk_ns)
        assert rank_result.ledger.lost_ns == 3_500_000_000
