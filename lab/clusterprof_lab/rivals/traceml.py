"""TraceML run for real on a job, and its verdict as an `Answer`.

    python -m clusterprof_lab.rivals.traceml --python VENV/bin/python --ranks 2 --out FOLDER \\
        SCRIPT -- ARGUMENTS

TraceML (pip package `traceml-ai`, https://github.com/traceopt-ai/traceml) is installed in an
environment of its own with torch; it is no dependency of anything here. `traceml_job.py` puts the
two lines around the job's loop that its guide asks for. Of what it writes, `final_summary.json`
(schema 1.9) is read, section `step_time`, as "How to Read TraceML Output" and its DIAGNOSIS.md
explain it.

| its word | as an answer |
|---|---|
| INPUT_BOUND ("workers, transforms, collation, or storage") | cpu, covers storage; its share |
| H2D_BOUND | h2d, h2d-copy; its share |
| RESIDUAL_HEAVY ("logging, checkpointing, validation, CPU stalls") | checkpoint, covers eval, cpu |
| COMPUTE_BOUND, BALANCED | nothing is wrong |
| INPUT_STRAGGLER | as INPUT_BOUND, of the rank it names; no share |
| H2D_STRAGGLER | as H2D_BOUND, of the rank it names; no share |
| COMPUTE_STRAGGLER, STRAGGLER | synchronization, of the rank it names; no share |
| INCOMPLETE_DATA, WARMUP, NO_DATA | claims nothing |
| system, process and memory findings | left out: it does not promote them to a cause either |

Its score is a share of a typical rank's step, which is what it is scored as. Its verdict comes
first among the causes and alone blames a rank for the run; a verdict that is no straggler blames
nobody. All further findings of the section follow in its order.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterprof_lab.answer import Answer, NamedCause, dump

JOB = Path(__file__).with_name("traceml_job.py")
TIMEOUT_S = 300.0
_UNDECIDED = ("INCOMPLETE_DATA", "WARMUP", "NO_DATA")
_CAUSES: Mapping[str, tuple[str, str | None, tuple[str, ...]]] = {
    "INPUT_BOUND": ("cpu", None, ("storage",)),
    "INPUT_STRAGGLER": ("cpu", None, ("storage",)),
    "H2D_BOUND": ("h2d", "h2d-copy", ()),
    "H2D_STRAGGLER": ("h2d", "h2d-copy", ()),
    "RESIDUAL_HEAVY": ("checkpoint", None, ("eval", "cpu")),
    "COMPUTE_STRAGGLER": ("synchronization", None, ()),
    "STRAGGLER": ("synchronization", None, ("network",)),
}


class NotRun(Exception):  # noqa: N818 (named for what happened)
    """TraceML could not be run on a job; the text says why."""


@dataclass(frozen=True, slots=True)
class Job:
    """A training script with a loop over a torch DataLoader."""

    script: Path
    arguments: Sequence[str] = ()
    ranks: int = 1


def make_answer(summary: Mapping[str, Any], version: str) -> Answer:
    """Convert a `final_summary.json` to an answer in the terms of the corpus."""
    tool = f"TraceML {version} (run on the job, two lines added)"
    section = summary.get("step_time") or {}
    kind = (section.get("diagnosis") or {}).get("kind", "NO_DATA")
    if kind in _UNDECIDED:
        return Answer(tool, None)
    issues = [issue for issue in section.get("issues") or () if issue["kind"] in _CAUSES]
    causes = tuple(_parse_cause(issue) for issue in issues)
    ranks = (section.get("metadata") or {}).get("global_ranks_seen") or 1
    blamed = causes[0].culprits if causes else None
    return Answer(tool, causes, culprits=(blamed or ()) if ranks > 1 else None)


def _parse_cause(issue: Mapping[str, Any]) -> NamedCause:
    family, leaf, covers = _CAUSES[issue["kind"]]
    if issue["kind"].endswith("STRAGGLER"):
        ranks = tuple(int(rank) for rank in issue.get("ranks") or ())
        return NamedCause(family, leaf, None, culprits=ranks, covers=covers)
    return NamedCause(family, leaf, issue.get("score"), covers=covers)


def find_version(python: Path) -> str:
    """Return the version installed beside an interpreter; NotRun when there is none."""
    code = "import importlib.metadata as m; print(m.version('traceml-ai')); import torch"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotRun(f"{python}: {error}") from error
    if done.returncode:
        message = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        raise NotRun(f"{python} has no traceml-ai with torch: {message}")
    return done.stdout.strip()


def make_command(
    python: Path, ranks: int, logs: Path, script: Path, arguments: Sequence[str]
) -> list[str]:
    """Return the command line that runs a script under TraceML; it writes `logs`/run."""
    return [
        str(python.with_name("traceml")),
        "run",
        str(JOB),
        "--nproc-per-node",
        str(ranks),
        "--run-name",
        "run",
        "--logs-dir",
        str(logs),
        "--aggregator-port",
        _find_free_port(),
        "--master-port",
        _find_free_port(),
        "--args",
        str(script),
        *arguments,
    ]


def run_job(job: Job, folder: Path, python: Path, timeout_s: float = TIMEOUT_S) -> Answer:
    """Run a job under TraceML; its logs stay below `folder`. NotRun when it did not end well."""
    version = find_version(python)
    folder.mkdir(parents=True, exist_ok=True)
    words = make_command(python, job.ranks, folder, job.script.resolve(), job.arguments)
    with open(folder / "output.txt", "w", encoding="utf-8") as output:
        try:
            process = subprocess.Popen(
                words, stdout=output, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True
            )
        except OSError as error:
            raise NotRun(f"{words[0]}: {error.strerror}") from error
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise NotRun(f"it had not ended after {timeout_s:.0f} s") from None
        finally:
            _end_process(process)
    written = folder / "run" / "final_summary.json"
    if code or not written.exists():
        raise NotRun(f"it ended with {code}: {_find_error_line(folder / 'output.txt')}")
    return make_answer(json.loads(written.read_text(encoding="utf-8")), version)


def _find_error_line(output: Path) -> str:
    """Return the last line that speaks of an error, else where all lines are."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in reversed(lines) if "error" in line.lower()), f"see {output}")


def _find_free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing of it behind: torchrun ends its workers when asked to, not when killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                continue


def main() -> int:
    """Run one job; print and keep the answer."""
    parser = argparse.ArgumentParser(prog="python -m clusterprof_lab.rivals.traceml")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs="*", help="of the script, after --")
    parser.add_argument("--python", type=Path, required=True, help="of TraceML's environment")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    job = Job(options.script, options.arguments, options.ranks)
    try:
        verdict = run_job(job, options.out.absolute(), options.python.absolute())
    except NotRun as reason:
        print(f"not run: {reason}", file=sys.stderr)
        return 4
    dump(verdict, options.out / "answer.json")
    print((options.out / "answer.json").read_text(encoding="utf-8"), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
