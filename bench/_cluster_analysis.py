"""Analyze a simulated cluster in this process and print, as JSON, what each part of it cost.

    python bench/_cluster_analysis.py RUN PROCESSES

The parts: the map over nodes, every pass over all ranks, building the report, rendering it. Of each
part the CPU seconds of this process (the serial part) and of its workers, the wall time, and the
most memory of this process. Then the report is compared with the truth of the run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterprof.analysis import pipeline
from clusterprof.analysis.cross_rank import pipeline as cross_rank
from clusterprof.output.renderers.base import load_renderer
from clusterprof_lab import truth
from clusterprof_lab.cluster.check import check_report
from clusterprof_lab.cluster.plan import restore_plan

TICKS = os.sysconf("SC_CLK_TCK")
FORMATS = ("terminal", "json")
RESET_PEAK = "5"  # written to clear_refs: VmHWM begins anew


@dataclasses.dataclass
class Part:
    """What one part cost."""

    name: str
    own_cpu_s: float = 0.0
    workers_cpu_s: float = 0.0
    wall_s: float = 0.0
    peak_bytes: int = 0


class Meter:
    """Accounts for parts that follow each other; a part that comes again is added to."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}
        self._part: Part | None = None
        self._before = (0.0, 0.0, 0.0)

    def begin(self, name: str) -> None:
        """End the current part and begin another one."""
        now = (time.process_time(), measure_workers_cpu_s(), time.perf_counter())
        if self._part is not None:
            spent = [after - before for after, before in zip(now, self._before)]
            self._part.own_cpu_s += spent[0]
            self._part.workers_cpu_s += max(0.0, spent[1])
            self._part.wall_s += spent[2]
            self._part.peak_bytes = max(self._part.peak_bytes, read_peak_bytes())
        self._part, self._before = self.parts.setdefault(name, Part(name)), now

    def wrap(self, name: str, function: Callable[..., Any], after: str = "") -> Callable[..., Any]:
        """Return a function that is accounted for as a part of its own."""

        def measured(*arguments: Any, **options: Any) -> Any:
            self.begin(name)
            try:
                return function(*arguments, **options)
            finally:
                self.begin(after)

        return measured


def measure_workers_cpu_s() -> float:
    """Return CPU seconds of all workers, those that ended too."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = ended.ru_utime + ended.ru_stime
    try:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    except OSError:
        children = []
    for child in children:
        try:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            spent += (int(fields[11]) + int(fields[12])) / TICKS
        except OSError:
            continue
    return spent


def read_peak_bytes() -> int:
    """Return the most memory since the last call, and begin anew."""
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) << 10
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    return peak


def main() -> None:
    """Analyze the run and print one JSON document."""
    run, processes = Path(sys.argv[1]), int(sys.argv[2])
    meter = Meter()
    cross_rank.CROSS_RANK_PASSES = tuple(
        meter.wrap(apply_pass.__name__, apply_pass, "between passes")
        for apply_pass in cross_rank.CROSS_RANK_PASSES
    )
    pipeline.build_report = meter.wrap("build_report", pipeline.build_report, "after")
    read_peak_bytes()
    meter.begin("map over nodes")
    report = pipeline.analyze(run / "recording", jobs=processes)
    sizes = {}
    for name in FORMATS:
        meter.begin(f"render {name}")
        sizes[name] = len(load_renderer(name)().render(report))
    meter.begin("check")
    true = truth.read_truth(run)
    plan = restore_plan(true.parameters)
    check = check_report(report, true, plan)
    ranks = plan.ranks // plan.stages
    a_step = sum(ranks * len(plan.list_stage_operations(s)) for s in range(plan.stages))
    meter.begin("end")
    parts = [dataclasses.asdict(part) for name, part in meter.parts.items() if name != "check"]
    print(
        json.dumps(
            {
                "parts": parts[: -1 if parts[-1]["name"] == "end" else None],
                "output_bytes": sizes,
                "operations": a_step * true.places[0].steps,
                "check": {**dataclasses.asdict(check), "right": check.right},
                "causes": [
                    (f.cause.id, f.lost_ns, [(c.node, c.rank) for c in f.culprits[:2]])
                    for f in report.findings[:6]
                ],
                "lost_ns": report.lost_ns,
                "in_step_ns": report.in_step_ns,
                "reasons": report.unattributed_reasons[:3],
            }
        )
    )


if __name__ == "__main__":
    main()
