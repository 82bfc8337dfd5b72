"""Command lines of the lab: `clusterprof-synth`, `clusterprof-lab`, `python -m clusterprof_lab`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from clusterprof_lab.scenario import SEVERITIES, Scenario, ScenarioError, Split, Trial, load_corpus

FAILED = 2


def synth(argv: Sequence[str] | None = None) -> int:
    """Write recordings of simulated jobs, each with its truth; 2 when that can't be done."""
    from clusterprof_lab.synth.make import make_trial
    from clusterprof_lab.synth.simulate_plan import PlanError

    options = _parser().parse_args(argv)
    try:
        for trial in _trials(options):
            folder = options.out / trial.name
            if (folder / "recording").exists():
                print(f"{folder}: is there already", file=sys.stderr)
                continue
            made = make_trial(trial, folder, options.ranks)
            print(f"{folder}: {len(made.places)} ranks, {len(made.injected)} faults")
    except (PlanError, ScenarioError, OSError) as error:
        print(f"clusterprof-synth: {error}", file=sys.stderr)
        return FAILED
    return 0


def lab(argv: Sequence[str] | None = None) -> int:
    """Run real jobs with real faults."""
    from clusterprof_lab.real.__main__ import main as real

    return int(real(list(sys.argv[1:] if argv is None else argv)) or 0)


def score(argv: Sequence[str] | None = None) -> int:
    """Score answers against truths."""
    from clusterprof_lab.score.__main__ import main as scorer

    return int(scorer(list(sys.argv[1:] if argv is None else argv)) or 0)


def whatif(argv: Sequence[str] | None = None) -> int:
    """Hold predicted gains against clean runs."""
    from clusterprof_lab.score.whatif import main as what_if

    return int(what_if(list(sys.argv[1:] if argv is None else argv)) or 0)


def cluster(argv: Sequence[str] | None = None) -> int:
    """Write recordings of whole simulated clusters with their truth."""
    from clusterprof_lab.cluster.__main__ import main as write

    return write(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of them by name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {"synth": synth, "cluster": cluster, "lab": lab, "score": score, "whatif": whatif}
    if not arguments or arguments[0] not in commands:
        print("usage: python -m clusterprof_lab synth|cluster|lab|score|whatif …", file=sys.stderr)
        return FAILED
    return commands[arguments[0]](arguments[1:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="clusterprof-synth",
        description="Write recordings of simulated jobs with known faults.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where runs go")
    parser.add_argument("--split", choices=get_args(Split), default="dev")
    parser.add_argument("--severity", choices=SEVERITIES, action="append", help="(default: all)")
    parser.add_argument("--seeds", type=_count, default=1, metavar="N", help="seeds 0 to N - 1")
    parser.add_argument("--scenario", nargs="+", metavar="ID", help="(default: all)")
    parser.add_argument("--ranks", type=_count, metavar="N", help="ranks of each job, to 4,096")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 4096:
        raise argparse.ArgumentTypeError("must be from 1 to 4096")
    return number


def _trials(options: argparse.Namespace) -> list[Trial]:
    corpus: dict[str, Scenario] = {scenario.id: scenario for scenario in load_corpus()}
    wanted = options.scenario or list(corpus)
    unknown = [name for name in wanted if name not in corpus]
    if unknown:
        raise ScenarioError(f"no scenario {', '.join(unknown)}; there are {', '.join(corpus)}")
    return [
        Trial(corpus[name], severity, seed, options.split)
        for name in wanted
        if corpus[name].synth is not None
        for severity in options.severity or SEVERITIES
        for seed in range(options.seeds)
    ]
