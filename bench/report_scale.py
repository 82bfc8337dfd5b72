"""What does the report of 10,000 ranks cost the process that joins the nodes?

CPU seconds, peak memory and bytes by stage at 1,024 and 10,000 ranks (`--ranks`): the results of
nodes as they travel, cross-rank passes with and without blame, history, report, and each output.
The results are those of `_replicated_nodes.py`: `--seconds` of operations, 16 a second and rank.
`--without-blame` leaves waits between ranks as they are, so that results of an hour can be
measured.
"""

from __future__ import annotations

import argparse
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _cluster_recording import RANKS
from _replicated_nodes import analyze_two_nodes, replicate_nodes

from clusterprof.analysis.cross_rank.pipeline import CROSS_RANK_PASSES
from clusterprof.analysis.cross_rank.state import JobState
from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.findings.history import build_history
from clusterprof.analysis.findings.report import REPORT_PASSES, RunContext, _begin_report
from clusterprof.analysis.node.analyze import NodeResult
from clusterprof.output.renderers.base import load_renderer

BLAME = ("attribute_waits",)
OUTPUTS = ("json", "html", "markdown", "plain", "terminal", "openmetrics")
T = TypeVar("T")


class Stages:
    """CPU seconds by stage, and the peak of memory after each."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}

    def run(self, name: str, function: Callable[[], T]) -> T:
        """Run a stage and print what it took."""
        began = time.process_time()
        result = function()
        self.cpu_s[name] = time.process_time() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"    {name:30} {self.cpu_s[name]:7.2f} CPU-s, peak {peak:6.0f} MiB", flush=True)
        return result


def unpack_results(packed: list[bytes]) -> list[NodeResult]:
    """Unpack results in their order; the packed ones are dropped one by one."""
    return [pickle.loads(packed.pop(0)) for _ in range(len(packed))]  # noqa: S301


def measure(ranks: int, source: Path, with_blame: bool) -> None:
    """Print the stages of one size."""
    results, place = pickle.loads(source.read_bytes())  # noqa: S301
    count = ranks // RANKS
    stages = Stages()
    packed = stages.run("(made by workers)", lambda: list(replicate_nodes(results, count)))
    sizes = sum(map(len, packed))
    print(f"    {sizes / count / 1e3:.1f} kB a node of {RANKS} ranks (target 100)")
    nodes = stages.run("unpack_results", partial(unpack_results, packed))
    state = JobState(tuple(nodes), place, build_limits({}))
    del nodes
    passes = [p for p in CROSS_RANK_PASSES if with_blame or p.__name__ not in BLAME]
    for apply_pass in passes:
        state = stages.run(apply_pass.__name__, partial(apply_pass, state))
    history = stages.run("build_history", lambda: build_history(state, place))
    report = stages.run(
        "begin_report", lambda: _begin_report("job", state, RunContext(history=history))
    )
    for report_pass in REPORT_PASSES:
        report = stages.run(report_pass.__name__, partial(report_pass, report))
    for name in OUTPUTS:
        text = stages.run(name, lambda n=name: load_renderer(n)().render(report.report))
        print(f"    {'':30} {len(text) / 1e6:7.2f} MB")
        (source.parent / f"report-{ranks}.{name}").write_text(text)
    (source.parent / f"report-{ranks}.pickle").write_bytes(pickle.dumps(report.report, 5))
    apart = {*BLAME, *OUTPUTS, "(made by workers)"}
    client = sum(cpu_s for name, cpu_s in stages.cpu_s.items() if name not in apart)
    blame = sum(stages.cpu_s.get(name, 0.0) for name in BLAME)
    print(
        f"  {ranks:,} ranks: {client:.1f} CPU-s and one output, of which the dearest of those a"
        f" person reads takes {max(stages.cpu_s[name] for name in OUTPUTS[:5]):.1f} (target 10);"
        f" {blame:.1f} of blame in one process besides\n"
    )


def main() -> None:
    """Print both sizes, each measured in a process of its own."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--seconds", type=int, default=30)
    asked.add_argument("--ranks", type=int, nargs="*", default=[1024, 10_000])
    asked.add_argument("--folder", type=Path, help="keep the results here, and take them from here")
    asked.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    asked.add_argument("--without-blame", action="store_true")
    options = asked.parse_args()
    if options.measure:
        measure(options.ranks[0], options.measure, not options.without_blame)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        source = folder / f"results-{options.seconds}.pickle"
        if not source.exists():
            source.write_bytes(pickle.dumps(analyze_two_nodes(folder, options.seconds), 5))
        for ranks in options.ranks:
            print(f"{ranks:,} ranks, {options.seconds} s of operations", flush=True)
            command = [sys.executable, __file__, "--measure", str(source), "--ranks", str(ranks)]
            command += ["--without-blame"] if options.without_blame else []
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
