"""Stored reports of many jobs of a simulated cluster in which some nodes are known to be faulty.

    python -m clusterprof_lab.fleet --out DIR [--jobs 240] [--nodes 40] [--lemons 3] [--seed 0]

A few small jobs are simulated, recorded by the real writer and analyzed: clean ones, and ones with
a slow node, a slow disk of a node, or a late loader, at each place. Each job of the fleet is one of
these reports with nodes, user, account and start of its own. Nodes are drawn at random for each
job; a lemon is bad in most jobs that it takes part in, other nodes in a few. DIR gets a JSON report
per job and `truth.json`: the lemons, and how often each node was bad.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from clusterprof.analysis.pipeline import analyze
from clusterprof.output.renderers.json import Json
from clusterprof.report.model import Report
from clusterprof_lab.cluster.make import make_cluster
from clusterprof_lab.cluster.plan import Fault, make_plan

BAD_NODE = ("slow-node", "slow-storage")
"""Faults that a bad node has."""
LEMON_RATIO, OTHER_RATIO, LOADER_RATIO = 0.7, 0.08, 0.3
"""How often a lemon is bad in a job, another node of the job is, and a loader is late instead."""
FIRST_NS = 1_756_684_800 * 10**9
"""Start of the first week, 1 September 2025."""
WEEKS = 12
WEEK_NS = 7 * 86_400 * 10**9
USERS = (
    ("vision", "ada"),
    ("vision", "ben"),
    ("speech", "cleo"),
    ("speech", "dan"),
    ("bio", "eve"),
)
_SECONDS, _PER_NODE = 20, 2


@dataclass(frozen=True, slots=True)
class Kind:
    """What is wrong in a job."""

    fault: str
    """A kind of fault, or "" in a clean job."""
    place: int = 0
    """Number of the bad node, or of the rank with a late loader."""


@dataclass(frozen=True, slots=True)
class FleetTruth:
    """What is true of a fleet."""

    lemons: tuple[str, ...]
    bad_jobs: Mapping[str, int]
    """Node -> jobs in which it was bad."""
    jobs: int


def make_templates(sizes: Sequence[int]) -> dict[int, dict[Kind, Report]]:
    """Simulate, record and analyze every kind of job on so many nodes."""
    templates: dict[int, dict[Kind, Report]] = {}
    for size in sizes:
        kinds = [Kind(""), Kind("late-loader", _PER_NODE * size - 1)]
        kinds += [Kind(fault, place) for fault in BAD_NODE for place in range(size)]
        templates[size] = {kind: _make_report(kind, size) for kind in kinds}
    return templates


def _make_report(kind: Kind, nodes: int) -> Report:
    faults = (Fault(kind.fault, kind.place, 0.3),) if kind.fault else ()  # type: ignore[arg-type]
    plan = make_plan(
        "data-parallel", nodes, _PER_NODE, seconds=_SECONDS, modules=2, faults=faults, seed=nodes
    )
    with tempfile.TemporaryDirectory(prefix="clusterprof-fleet-") as folder:
        make_cluster(plan, Path(folder) / "run")
        return analyze(Path(folder) / "run" / "recording")


def make_fleet(
    folder: Path,
    templates: Mapping[int, Mapping[Kind, Report]],
    jobs: int,
    nodes: int,
    lemons: int,
    seed: int = 0,
) -> FleetTruth:
    """Write the reports of a fleet and its truth into a folder."""
    random = np.random.default_rng(seed)
    names = [f"gpu-{number:02d}" for number in range(1, nodes + 1)]
    bad = tuple(sorted(random.choice(names, lemons, replace=False).tolist()))
    sizes = sorted(templates)
    bad_jobs: Counter[str] = Counter()
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(jobs):
        members = random.choice(names, int(random.choice(sizes)), replace=False).tolist()
        members.sort()  # as resource managers do: the first has rank 0
        kind = _draw_kind(random, members, bad)
        if kind.fault in BAD_NODE:
            bad_jobs[members[kind.place]] += 1
        start_ns = FIRST_NS + int(random.integers(WEEKS * WEEK_NS))
        report = _rename(templates[len(members)][kind], members, number, start_ns)
        text = Json().render(report)
        (folder / f"job-{number:05d}.json").write_text(text, encoding="ascii")
    truth = FleetTruth(bad, dict(sorted(bad_jobs.items())), jobs)
    document = {"lemons": bad, "bad_jobs": truth.bad_jobs, "jobs": jobs}
    (folder / "truth.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return truth


def _draw_kind(random: np.random.Generator, members: Sequence[str], lemons: Sequence[str]) -> Kind:
    places = [place for place, name in enumerate(members) if name in lemons]
    fault = str(random.choice(BAD_NODE))
    if places and random.random() < LEMON_RATIO:
        return Kind(fault, int(random.choice(places)))
    if random.random() < OTHER_RATIO:
        return Kind(fault, int(random.integers(len(members))))
    if random.random() < LOADER_RATIO:
        return Kind("late-loader", _PER_NODE * len(members) - 1)
    return Kind("")


def _rename(report: Report, members: Sequence[str], number: int, start_ns: int) -> Report:
    """Return the report as of another job on other nodes."""
    order = sorted({node.name for node in report.nodes})
    new_name = dict(zip(order, members))
    account, user = USERS[number % len(USERS)]
    assert report.job is not None and report.fingerprint is not None
    keys = tuple(f"{name}-{number:05d}" for name in members)
    return replace(
        report,
        title=f"job-{number:05d}",
        nodes=tuple(
            replace(node, name=new_name[node.name], key=key, rack=f"leaf{members[at][-1]}")
            for at, (node, key) in enumerate(zip(report.nodes, keys))
        ),
        ranks=tuple(replace(rank, node=new_name[rank.node]) for rank in report.ranks),
        findings=tuple(
            replace(
                finding,
                culprits=tuple(
                    replace(culprit, node=new_name.get(culprit.node, culprit.node))
                    for culprit in finding.culprits
                ),
            )
            for finding in report.findings
        ),
        job=replace(report.job, name=str(4000 + number), user=user, account=account),
        fingerprint=replace(report.fingerprint, started_at_ns=start_ns, recordings=keys),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a fleet and say which nodes are lemons."""
    parser = argparse.ArgumentParser(
        prog="clusterprof_lab.fleet", description="Reports of many jobs with known lemon nodes"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--jobs", type=int, default=240)
    parser.add_argument("--nodes", type=int, default=40)
    parser.add_argument("--lemons", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    templates = make_templates((2, 3, 4))
    truth = make_fleet(
        options.out, templates, options.jobs, options.nodes, options.lemons, options.seed
    )
    print(f"{options.out}: {truth.jobs} jobs; lemons: {', '.join(truth.lemons)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
