"""TraceML's verdicts on six real jobs (0.5.0, two cores, no GPU), as answers.

`fixtures/traceml/*.json` are parts of what it wrote; `situation` says which job that was.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterprof_lab.answer import Answer, NamedCause, dump, load
from clusterprof_lab.rivals import traceml

FIXTURES = Path(__file__).parent / "fixtures" / "traceml"
INPUT, RESIDUAL = ("storage",), ("eval", "cpu")
RANK_1 = (1,)
WANTED = {
    # nothing is wrong but how long the computing takes
    "clean": ((), ()),
    # every loader reads from a disk that is busy; rank 0 a little slower than rank 1
    "slow-reads": (
        (
            NamedCause("cpu", None, 0.6453670750148823, covers=INPUT),
            NamedCause("cpu", None, None, culprits=(0,), covers=INPUT),
        ),
        (),
    ),
    "slow-decode": ((NamedCause("cpu", None, 0.5012103991160002, covers=INPUT),), None),
    "slow-rank": ((NamedCause("synchronization", None, None, culprits=RANK_1),), RANK_1),
    "slow-loader-of-a-rank": (
        (
            NamedCause("cpu", None, None, culprits=RANK_1, covers=INPUT),
            NamedCause("cpu", None, 0.3002663707855845, covers=INPUT),
        ),
        RANK_1,
    ),
    # its own stopwatch says 26.8 % of the loop
    "checkpoint": ((NamedCause("checkpoint", None, 0.2907995577401619, covers=RESIDUAL),), None),
}


@pytest.mark.parametrize("name", sorted(WANTED))
def test_a_traceml_summary_becomes_an_answer(name: str, tmp_path: Path) -> None:
    summary = json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))
    causes, culprits = WANTED[name]
    reply = traceml.make_answer(summary, "0.5.0")
    tool = "TraceML 0.5.0 (run on the job, two lines added)"
    assert reply == Answer(tool, causes, culprits=culprits)
    dump(reply, tmp_path / "answer.json")
    assert load(tmp_path / "answer.json") == reply


def test_every_fixture_has_an_expected_answer() -> None:
    assert {path.stem for path in FIXTURES.glob("*.json")} == WANTED.keys()


@pytest.mark.parametrize("kind", ["NO_DATA", "WARMUP", "INCOMPLETE_DATA"])
def test_insufficient_data_makes_no_claim(kind: str) -> None:
    section = {"diagnosis": {"kind": kind}, "issues": [{"kind": kind}]}
    reply = traceml.make_answer({"step_time": section}, "0.5.0")
    assert (reply.causes, reply.culprits) == (None, None)
    assert traceml.make_answer({}, "0.5.0").causes is None


def test_a_missing_or_failing_traceml_is_reported_as_not_run(tmp_path: Path) -> None:
    job = traceml.Job(tmp_path / "train.py")
    with pytest.raises(traceml.NotRun, match="no-such-python"):
        traceml.run_job(job, tmp_path, tmp_path / "no-such-python")
    broken = tmp_path / "bin" / "python"  # a traceml that fails beside a Python that has it
    broken.parent.mkdir()
    for name, does in (("python", "echo 0.5.0"), ("traceml", "echo ERROR: no room; exit 1")):
        broken.with_name(name).write_text(f"#!/bin/sh\n{does}\n", encoding="utf-8")
        broken.with_name(name).chmod(0o755)
    with pytest.raises(traceml.NotRun, match="it ended with 1: ERROR: no room"):
        traceml.run_job(job, tmp_path / "out", broken)
    with pytest.raises(traceml.NotRun, match="/bin/false has no traceml-ai with torch"):
        traceml.run_job(job, tmp_path, Path("/bin/false"))
