"""Two stages of a pipeline with one batch in flight: each works while the other waits.

rank 0   |= work 0.2 =|s|------ waits 0.4 ------|r|= work 0.2 =|
rank 1   -- waits 0.4 --|r|==== work 0.4 ====|s|------ waits …
"""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.probe import layout
from tests.support.recordings import Script
from tests.support.waiting_jobs import GROUP, STEPS, record_and_analyze, sum_rank_seconds

SEND, RECV = layout.SEND, layout.RECV
SENDING_S = 0.001


def message(
    kind: int, begin: float, end: float, number: int, peer: int
) -> tuple[int, float, float, int, int, int, int]:
    what = kind | (peer + 1) << layout.PEER_SHIFT
    return (layout.COLLECTIVE, begin, end, GROUP, number, 1000, what)


def stages(more: float) -> list[Script]:
    """Both stages work for 0.4 s a step, the second for `more` on top."""
    step_s = 0.8 + more
    scripts = []
    for rank in (0, 1):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a job"}
        script = Script(end=round(2.0 + STEPS * step_s, 6), variables=variables)
        main, left = ["U1.0"], 1.0
        for number in range(STEPS):
            at = round(1.0 + number * step_s, 6)
            script.main_spans.append((layout.STEP, at, round(at + step_s, 6), number))
            there, back = round(at + 0.2, 6), round(at + 0.6 + more, 6)  # when each sends
            if rank == 0:
                sent, got = there, back
                waits = (round(sent + 2 * SENDING_S, 6), round(got + SENDING_S, 6))
                main += [f"U{round(sent - left, 6)}", f"I{round(waits[1] - sent, 6)}"]
                left = waits[1]
            else:
                sent, waits = back, (round(left + SENDING_S, 6), round(there + SENDING_S, 6))
                main += [f"I{round(waits[1] - left, 6)}", f"U{round(sent - waits[1], 6)}"]
                main.append(f"I{SENDING_S}")
                left = round(sent + SENDING_S, 6)
            script.main_spans += [
                message(SEND, sent, round(sent + SENDING_S, 6), number, 1 - rank),
                message(RECV, *waits, number, 1 - rank),
            ]
        script.main = " ".join(main)
        scripts.append(script)
    return scripts


def test_waits_of_equal_stages_are_pipeline_bubbles(tmp_path: Path) -> None:
    report = record_and_analyze(stages(0.0), tmp_path)
    for rank in (0, 1):
        seconds = sum_rank_seconds(report, rank)
        # 0.4 s of each of 60 steps; of the first ones nobody knows yet what is usual
        assert seconds["sync-bubble"] == pytest.approx(0.4 * STEPS, abs=1.0)
        assert seconds.get("sync-imbalance", 0) + seconds.get("sync-slow-compute", 0) < 0.5
    [bubble] = [finding for finding in report.findings if finding.cause.id == "sync-bubble"]
    assert bubble.culprits == ()
    assert bubble.share_ratio == pytest.approx(0.5, abs=0.02)


def test_a_heavier_stage_is_blamed_only_for_its_extra_work(tmp_path: Path) -> None:
    # 0.1 s more in every step: 6 s for which the first stage waits, beside 0.4 s of schedule.
    report = record_and_analyze(stages(0.1), tmp_path)
    seconds = sum_rank_seconds(report, 0)
    assert seconds.get("sync-imbalance", 0) + seconds.get("sync-slow-compute", 0) == pytest.approx(
        0.1 * STEPS, abs=0.6
    )
    assert seconds["sync-bubble"] == pytest.approx(0.4 * STEPS, abs=1.0)
    named = {
        (finding.cause.id, culprit.rank)
        for finding in report.findings
        for culprit in finding.culprits
        if finding.cause.family == "synchronization"
    }
    assert named <= {("sync-imbalance", 1), ("sync-slow-compute", 1)} and named
