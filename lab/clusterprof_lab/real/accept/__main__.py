"""`python -m clusterprof_lab.real.accept [--judge] [--out DIR] [SCENARIO…]`: nine judged jobs.

Every scenario leaves `DIR/<scenario>/recording` and `DIR/<scenario>/truth.json`: the truth is from
the job's own stopwatches, not from the recording. With `--judge` every scenario runs several times,
in `DIR/<run>/<scenario>`, and the analysis is compared with the truth; exit code 1 when one is
wrong. `--kept DIR` judges existing recordings. Rules of thumb get the same recordings.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from clusterprof_lab.real.accept.faults import (
    SCENARIOS,
    Scenario,
    list_script_options,
    make_records,
    mount_slow_disk,
    run_cpu_hogs,
)
from clusterprof_lab.real.accept.judge import (
    HEADER,
    JudgedRun,
    analyze_recording,
    format_rows,
    format_summary,
    judge_findings,
)
from clusterprof_lab.real.accept.truth import compute_truth, format_truth
from clusterprof_lab.real.cable import Cable, Link, build_cable
from clusterprof_lab.real.job import run_job
from clusterprof_lab.real.node import Node, why_not_here

ROOT = Path(__file__).resolve().parents[4]
KNOWN = {scenario.name: scenario for scenario in SCENARIOS}


def record_scenario(
    scenario: Scenario, folder: Path, program: Path, records: Path, steps: int
) -> None:
    """Record one scenario and write what its stopwatches said."""
    folder.mkdir(parents=True)
    names = [f"node{index}" for index in range(scenario.nodes)]
    with ExitStack() as stack:
        nodes = [stack.enter_context(Node(index, names)) for index in range(scenario.nodes)]
        cable = stack.enter_context(Cable(program, nodes, scenario.mtu_bytes))
        for node in nodes:
            cable.set_link(node.index, scenario.links.get(node.index, Link()))
        options = [list_script_options(scenario, steps, str(records)) for _ in nodes]
        if scenario.slow_disk is not None:
            slow = mount_slow_disk(nodes[scenario.slow_disk], records)
            data, more = stack.enter_context(slow)
            options[scenario.slow_disk] += [f"--data={data}", *more]
        if scenario.hogs is not None:
            stack.enter_context(run_cpu_hogs(nodes[scenario.hogs]))
        out = folder / "recording"
        outputs = run_job(nodes, scenario.per_node, options, out, f"lab-{scenario.name}")
        counts = cable.read_counts()
    measured = compute_truth(
        sorted((rank for node in outputs for rank in node.ranks), key=lambda rank: rank["rank"])
    )
    document = {"scenario": scenario.name, "what": scenario.what, **measured, "cable": counts}
    (folder / "truth.json").write_text(json.dumps(document, indent=1) + "\n")


def judge(folder: Path) -> JudgedRun:
    """Judge the analysis and the rules of thumb on one recorded scenario by its truth."""
    measured = json.loads((folder / "truth.json").read_text())
    verdict = judge_findings(
        KNOWN[measured["scenario"]], analyze_recording(folder / "recording"), measured
    )
    sys.path.insert(0, str(ROOT / "bench"))
    from baselines.recorded import read_recording
    from baselines.rules import RULES

    seen = read_recording(folder / "recording")
    rules = {name: rule(seen.job) for name, rule in RULES.items()}
    rules |= {"iowait > 5 %": seen.iowait_above(), "AU < 90 %": seen.au_below()}
    return replace(verdict, rules=rules)


def record_scenarios(names: list[str], out: Path, options: argparse.Namespace) -> Iterator[Path]:
    """Record scenarios one after another; yield the folder of each."""
    with tempfile.TemporaryDirectory() as folder:
        program, records = build_cable(Path(folder)), make_records(Path(folder) / "records.bin")
        for number in range(1, options.runs + 1) if options.judge else [None]:
            for name in names:
                where = out / name if number is None else out / str(number) / name
                record_scenario(KNOWN[name], where, program, records, options.steps)
                yield where


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m clusterprof_lab.real.accept", description=__doc__
    )
    parser.add_argument("scenario", nargs="*", help=f"of {', '.join(KNOWN)}; all without any")
    parser.add_argument("--out", type=Path, help="a new folder for recordings and truths")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--judge", action="store_true", help="analyze, and compare")
    parser.add_argument("--runs", type=int, default=3, help="of each scenario, to judge")
    parser.add_argument("--kept", type=Path, help="judge the recordings below this folder")
    options = parser.parse_args()
    unknown = set(options.scenario) - set(KNOWN)
    if unknown:
        parser.error(f"there is no scenario {', '.join(sorted(unknown))}")
    return options


def main() -> int:
    """Run the scenarios asked for, one after the other, and judge them when asked to."""
    options = parse_options()
    names = options.scenario or list(KNOWN)
    if options.kept is not None:
        folders = sorted(file.parent for file in options.kept.rglob("truth.json"))
        return judge_recordings([folder for folder in folders if folder.name in names])
    reason = why_not_here()
    if reason:
        print(f"not run: {reason}", file=sys.stderr)
        return 4
    out = (options.out or Path(tempfile.mkdtemp(prefix="cluster-lab-"))).absolute()
    out.mkdir(parents=True, exist_ok=True)
    print(f"recordings and truths in {out}")
    if options.judge:
        return judge_recordings(record_scenarios(names, out, options))
    began = time.monotonic()
    for folder in record_scenarios(names, out, options):
        print(f"\n{folder.name}: {KNOWN[folder.name].what}; milliseconds per step")
        print(format_truth(json.loads((folder / "truth.json").read_text())))
        print(f"  ({time.monotonic() - began:.0f} s)", flush=True)
        began = time.monotonic()
    return 0


def judge_recordings(folders: Iterator[Path] | list[Path]) -> int:
    """Judge each recording as it is finished; return 1 when an analysis was wrong."""
    began = time.monotonic()
    runs: list[JudgedRun] = []
    print(HEADER, flush=True)
    for folder in folders:
        runs.append(judge(folder))
        number = sum(run.scenario == runs[-1].scenario for run in runs)
        print("\n".join(format_rows(number, runs[-1])), flush=True)
    print("\n".join(format_summary(runs)))
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if runs and all(run.right for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
