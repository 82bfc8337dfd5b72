"""`python -m tests.lab.cluster [--out DIR] [--steps N] [SCENARIO…]`: record real multi-node jobs.

Every scenario leaves `DIR/<scenario>/recording` and `DIR/<scenario>/truth.json`, to lay an analysis
beside: the truth is from the job's own stopwatches, not from the recording.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from .cable import Cable, Link, build
from .faults import SCENARIOS, Scenario, command_options, hogs, make_records, slow_disk
from .job import train
from .node import Node, why_not_here
from .truth import table, truth


def run(scenario: Scenario, folder: Path, program: Path, records: Path, steps: int) -> None:
    """Record one scenario and write what its stopwatches said."""
    folder.mkdir(parents=True)
    names = [f"node{index}" for index in range(scenario.nodes)]
    with ExitStack() as stack:
        nodes = [stack.enter_context(Node(index, names)) for index in range(scenario.nodes)]
        cable = stack.enter_context(Cable(program, nodes))
        for node in nodes:
            cable.be(node.index, scenario.links.get(node.index, Link()))
        options = [command_options(scenario, node.index, steps, str(records)) for node in nodes]
        if scenario.slow_disk is not None:
            slow = slow_disk(nodes[scenario.slow_disk], records)
            data, more = stack.enter_context(slow)
            options[scenario.slow_disk] += [f"--data={data}", *more]
        if scenario.hogs is not None:
            stack.enter_context(hogs(nodes[scenario.hogs]))
        said = train(nodes, 1, options, folder / "recording", f"lab-{scenario.name}")
        counts = cable.counts()
    found = truth(sorted((one for node in said for one in node.ranks), key=lambda one: one["rank"]))
    document = {"scenario": scenario.name, "what": scenario.what, **found, "cable": counts}
    (folder / "truth.json").write_text(json.dumps(document, indent=1) + "\n")
    print(table(found), flush=True)


def main() -> int:
    """Run the scenarios asked for, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.cluster", description=__doc__)
    known = {scenario.name: scenario for scenario in SCENARIOS}
    parser.add_argument("scenario", nargs="*", help=f"of {', '.join(known)}; all without any")
    parser.add_argument("--out", type=Path, help="a new folder for recordings and truths")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    unknown = set(options.scenario) - set(known)
    if unknown:
        parser.error(f"there is no scenario {', '.join(sorted(unknown))}")
    reason = why_not_here()
    if reason:
        print(f"not run: {reason}", file=sys.stderr)
        return 4
    out = (options.out or Path(tempfile.mkdtemp(prefix="cluster-lab-"))).absolute()
    out.mkdir(parents=True, exist_ok=True)
    print(f"recordings and truths in {out}; milliseconds per step")
    with tempfile.TemporaryDirectory() as folder:
        program, records = build(Path(folder)), make_records(Path(folder) / "records.bin")
        for name in options.scenario or known:
            began = time.monotonic()
            print(f"\n{name}: {known[name].what}", flush=True)
            run(known[name], out / name, program, records, options.steps)
            print(f"  ({time.monotonic() - began:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
