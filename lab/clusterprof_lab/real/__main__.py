"""`clusterprof-lab run|list`: scenarios of the corpus as real jobs, each with its truth.

Every trial leaves `OUT/<trial>/recording` and `OUT/<trial>/truth.json`. A trial that cannot run on
this machine is listed with the reason in `OUT/not-run.json`; it never counts as a pass. Exit codes:
0 all trials that can run here did, 1 a job failed, 2 wrong options, 4 no trial could run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from clusterprof_lab.real import trial as trials
from clusterprof_lab.scenario import (
    CORPUS,
    SEVERITIES,
    Scenario,
    ScenarioError,
    Split,
    Trial,
    load_corpus,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says; return the exit code."""
    options = _parse(argv)
    try:
        corpus = load_corpus(options.corpus)
    except ScenarioError as error:
        print(f"clusterprof-lab: {error}", file=sys.stderr)
        return 2
    if options.command == "list":
        return _print_scenarios(corpus)
    known = {scenario.id: scenario for scenario in corpus}
    unknown = sorted(set(options.scenario) - set(known))
    if unknown:
        print(f"clusterprof-lab: no scenario {', '.join(unknown)}: see list", file=sys.stderr)
        return 2
    chosen = [known[name] for name in options.scenario] or list(corpus)
    return _run_trials(list(_list_trials(chosen, options)), options.out.absolute())


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="clusterprof-lab", description=__doc__)
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="folder of scenario files")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="all scenarios, and which can be run here")
    run = commands.add_parser("run", help="run scenarios for real")
    run.add_argument("--scenario", nargs="+", default=[], metavar="ID", help="all without any")
    run.add_argument("--severity", nargs="+", choices=SEVERITIES, default=list(SEVERITIES))
    run.add_argument("--seeds", type=int, default=3, help="of each, from 0 (default: 3)")
    run.add_argument("--split", choices=get_args(Split), default="dev")
    run.add_argument("--out", type=Path, required=True, help="folder; what is there is kept")
    return parser.parse_args(argv)


def _print_scenarios(corpus: Sequence[Scenario]) -> int:
    for scenario in corpus:
        reason = trials.why_not_here(scenario)
        print(f"{scenario.id:<26}{scenario.group:<14}{f'not run: {reason}' if reason else 'ok'}")
    return 0


def _list_trials(chosen: Sequence[Scenario], options: argparse.Namespace) -> Iterator[Trial]:
    for scenario in chosen:
        # A null has no severity; in the plan of the score it bears the middle one.
        severities = options.severity if scenario.wanted.family else SEVERITIES[1:2]
        for severity in severities:
            for seed in range(options.seeds):
                yield Trial(scenario, severity, seed, options.split)


def _run_trials(wanted: Sequence[Trial], out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    not_run: dict[str, str] = {}
    failed = done = 0
    for trial in wanted:
        reason = trials.why_not_here(trial.scenario)
        if reason:
            not_run[trial.name] = reason
            print(f"{trial.name}: not run: {reason}", flush=True)
            continue
        if (out / trial.name / "truth.json").exists():
            done += 1
            print(f"{trial.name}: there already", flush=True)
            continue
        began = time.monotonic()
        try:
            trials.run_trial(trial, out)
        except (RuntimeError, OSError) as error:
            failed += 1
            not_run[trial.name] = f"failed: {error}"
            print(f"{trial.name}: {error}", file=sys.stderr, flush=True)
            continue
        done += 1
        print(f"{trial.name}: {time.monotonic() - began:.0f} s", flush=True)
    (out / "not-run.json").write_text(json.dumps(not_run, indent=1) + "\n")
    print(f"{done} of {len(wanted)} run")
    if failed:
        return 1
    return 0 if done or not wanted else 4


if __name__ == "__main__":
    sys.exit(main())
