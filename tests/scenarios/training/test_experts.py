"""A real gloo job whose experts get different numbers of tokens: the report names the fullest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clusterprof.analysis.pipeline import analyze
from clusterprof.report.model import Evidence, Report
from tests.support.job_python import require_torch
from tests.support.recording_runs import RECORD, make_environment, make_job_id, wait_for_end

require_torch()
pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).parent / "scripts" / "experts.py"
STEPS = 30
TOKEN_BYTES = 256  # 64 numbers of 4 bytes


def record_job(out: Path, tokens: str, token_s: str) -> Report:
    root = str(Path(__file__).parents[3])
    env = make_environment(make_job_id("experts"), PYTHONPATH=root, OMP_NUM_THREADS="1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", str(SCRIPT), str(STEPS), tokens, token_s]
    command = [*RECORD, "-o", str(out), "--", *command]
    subprocess.run(command, env=env, timeout=120, check=True, capture_output=True)
    wait_for_end(out)
    return analyze(out)


def find_work_evidence(report: Report) -> dict[str, Evidence]:
    """The evidence of the finding that rank 1 had more work, by name."""
    [late, *_] = [
        f for f in report.findings if f.cause.id in ("sync-imbalance", "sync-slow-compute")
    ]
    assert [culprit.rank for culprit in late.culprits][:1] == [1]
    return {evidence.name: evidence for evidence in late.evidence}


def test_the_rank_with_the_fullest_expert_is_named_with_its_bytes(tmp_path: Path) -> None:
    # Both ranks send 10 tokens to the first expert and 30 to the second, which sends back 60 in
    # every step, 1.5 times the mean of 20 and 60. The tokens of the routers are 40 of each rank.
    evidence = find_work_evidence(record_job(tmp_path / "run", "10,30", "0.002,0.002"))
    brought = evidence["step.all_to_all_bytes"]
    # The operations of the first step, and of the last, need not be in the time of the steps.
    assert brought.value in [60 * TOKEN_BYTES * steps / STEPS for steps in (28, 29, 30)]
    assert brought.note == (
        "brought to all-to-all in a step by rank 1, 1.5 times the mean of the ranks (the load of"
        " its experts, if it has any); waiting ranks: 0.5 times"
    )


@pytest.mark.long  # from a recording made by hand: tests/analysis/cross_rank/test_waits.py
def test_a_slow_expert_with_equal_tokens_has_no_byte_evidence(tmp_path: Path) -> None:
    evidence = find_work_evidence(record_job(tmp_path / "run", "20,20", "0.001,0.003"))
    assert "step.worked_ns" in evidence and "step.all_to_all_bytes" not in evidence
