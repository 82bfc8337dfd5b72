"""TraceML on the real jobs of the corpus: the same trials, run under it instead of clusterprof.

    python -m clusterprof_lab.rivals.corpus --python VENV/bin/python --slice ci --out ANSWERS

Script, fault, size of the fault and culprit ranks are the same; the clean run that sizes the fault
runs without TraceML. Leaves `ANSWERS/real.<trial>.json`, and in `ANSWERS/not-run.json` the reason
for each trial that could not run. Then `python -m clusterprof_lab.score --answers TraceML=ANSWERS`.

Known limits: only jobs on one machine (its launcher needs a network of its own between nodes), and
no job that is meant to fail or to start before it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

from clusterprof_lab.answer import Answer, dump
from clusterprof_lab.rivals import traceml
from clusterprof_lab.rivals.traceml import NotRun
from clusterprof_lab.scenario import Scenario, Split, Trial, load_corpus
from clusterprof_lab.score.plan import Slice, plan_runs

_LOGS = "traceml"


def ask_traceml(trial: Trial, python: Path, version: str, shared: Path, place: Path) -> Answer:
    """Run one trial under TraceML; NotRun with the reason when that can't be."""
    reason = check_scenario(trial.scenario)
    if reason:
        raise NotRun(reason)
    from clusterprof_lab.real import trial as real

    (place / "clean").symlink_to(shared)
    try:
        with replace_recorder(python, place / _LOGS):
            real.run_trial(trial, place)
    except (RuntimeError, OSError) as error:
        raise NotRun(f"the job failed: {' '.join(str(error).split())[-300:]}") from error
    written = place / _LOGS / "run" / "final_summary.json"
    if not written.exists():
        raise NotRun("the job ended and TraceML wrote no summary")
    return traceml.make_answer(json.loads(written.read_text(encoding="utf-8")), version)


def check_scenario(scenario: Scenario) -> str:
    """Return why TraceML cannot be asked about a scenario, "" when it can."""
    if scenario.real is None:
        return "no real processes can make it"
    try:
        from clusterprof_lab.real import trial as real
    except ImportError as error:
        return f"real jobs are not there: {error}"
    if real.read_layout(scenario.real).nodes:
        return "two nodes: TraceML was run on one machine only"
    if scenario.real.get("capture") or scenario.wanted.family == "fail":
        return "its job ends badly, or runs before the tool does"
    return str(real.why_not_here(scenario))


@contextmanager
def replace_recorder(python: Path, logs: Path) -> Iterator[None]:
    """Let real jobs that would be recorded run under TraceML instead."""
    from clusterprof_lab.real import launch

    usual: Callable[..., list[str]] = launch.make_command

    def command(
        placements: Sequence[Any], placement: Any, out: Path | None, run_id: str
    ) -> list[str]:
        words = usual(placements, placement, out, run_id)
        if out is None:  # the clean job, or a neighbor
            return words
        enter = words[: words.index(sys.executable)]
        return [
            *enter,
            *traceml.make_command(python, placement.ranks, logs, launch.SCRIPT, placement.words),
        ]

    with (
        patch.object(launch, "make_command", command),
        patch.object(launch, "wait_for_recording", lambda out, nodes: None),
    ):
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Ask about every trial; 0 when one was answered, 4 when none was."""
    parser = argparse.ArgumentParser(prog="python -m clusterprof_lab.rivals.corpus")
    parser.add_argument("--python", type=Path, required=True, help="of TraceML's environment")
    parser.add_argument("--split", choices=get_args(Split), default="dev")
    parser.add_argument("--slice", choices=get_args(Slice), default="ci")
    parser.add_argument("--scenario", nargs="+", default=[], metavar="ID", help="all without any")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(argv)
    python, out = given.python.absolute(), given.out.absolute()
    try:
        version = traceml.find_version(python)
    except NotRun as reason:
        print(f"not run: {reason}", file=sys.stderr)
        return 4
    works = plan_runs(load_corpus(), given.split, given.slice, ["real"])
    trials = [work.trial for work in works if work.trial is not None]
    trials = [
        trial for trial in trials if not given.scenario or trial.scenario.id in given.scenario
    ]
    return _ask_trials(trials, python, version, out)


def _ask_trials(trials: Sequence[Trial], python: Path, version: str, out: Path) -> int:
    shared = out / "clean"
    shared.mkdir(parents=True, exist_ok=True)
    not_run: dict[str, str] = {}
    for number, trial in enumerate(trials, 1):
        with tempfile.TemporaryDirectory(prefix="clusterprof-rival-") as name:
            try:
                answer = ask_traceml(trial, python, version, shared, Path(name))
            except NotRun as reason:
                not_run[trial.name] = str(reason)
                print(f"{number}/{len(trials)} {trial.name}: not run: {reason}", flush=True)
                continue
        dump(answer, out / f"real.{trial.name}.json")
        words = ", ".join(cause.family for cause in answer.causes or ()) or "nothing"
        print(f"{number}/{len(trials)} {trial.name}: {words}", flush=True)
    (out / "not-run.json").write_text(json.dumps(not_run, indent=1) + "\n", encoding="utf-8")
    print(f"{len(trials) - len(not_run)} of {len(trials)} answered")
    return 0 if len(not_run) < len(trials) else 4


if __name__ == "__main__":
    sys.exit(main())
