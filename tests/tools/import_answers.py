"""Read other people's traces with known answers, write tests/analysis/importers/answers.json.

    python tests/tools/import_answers.py          # needs ../shared/data beside the project

Every row compares one stated number or name with ours; the pages docs/importers show them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # `python tests/tools/…` puts this folder there alone
from clusterprof.analysis.attribution.accumulator import SHARE_SCALE  # noqa: E402
from clusterprof.analysis.pipeline import Analysis, AnalysisRequest, analyze_with_details  # noqa: E402
from tests.tools.answers_of_logs import iterate_answers  # noqa: E402

DATA = ROOT.parent / "shared" / "data"
OUT = ROOT / "tests" / "analysis" / "importers" / "answers.json"
WITHIN = 0.01
"""Of the stated number: as near as two ways of rounding are."""
LEAST_US = 2.0
_DATA = ("input", "storage", "cpu")


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    data: str
    file: str
    what: str
    stated: str
    by: str
    ours: str
    met: bool
    why: str = ""
    """Where it is not met: by which definition."""


def main() -> int:
    if not DATA.is_dir():
        print(f"nothing to read: {DATA} is not there", file=sys.stderr)
        return 1
    made = (
        check_kineto,
        check_single_ranks,
        check_data_waits,
        check_verdicts,
        check_other_folders,
        check_logs,
    )
    rows = [row for make in made for row in make()]
    OUT.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    for row in rows:
        print("met " if row.met else "MISS", row.data, row.file, row.what, row.stated, row.ours)
    print(f"{sum(row.met for row in rows)} of {len(rows)} met")
    return 0


@cache
def import_folder(name: str) -> Analysis:
    return analyze_with_details(
        [DATA / name], AnalysisRequest(leave_unknown=True)
    )  # as `analyze` does


def load_known(folder: str) -> Mapping[str, Any]:
    collected: Mapping[str, Any] = json.loads((DATA / folder / "known.json").read_text())
    return collected


def measure_idle_us(made: Analysis) -> float:
    """Device time within the steps in which it did nothing at all, of all ranks."""
    in_step = sum(rank.in_step_ns for rank in made.report.ranks)
    busy = sum(b.accumulator.totals.get("busy", 0) for n in made.across.nodes for b in n.ranks)
    return (in_step - busy) / 1e3


def measure_exposed_us(made: Analysis) -> float:
    """Time in communication alone: what is lost while the device is neither idle nor copying."""
    copying = sum(
        units
        for node in made.across.nodes
        for rank in node.ranks
        for (cause, *_), units in rank.accumulator.claimed.items()
        if cause == "h2d-copy-bound"
    )
    return made.report.lost_ns / 1e3 - measure_idle_us(made) - copying / SHARE_SCALE / 1e3


def measure_share(made: Analysis, *families: str) -> float:
    """Part of the time in steps lost to some families, in percent."""
    buckets = [bucket for rank in made.report.ranks for bucket in rank.buckets]
    lost = sum(ns for cause, ns in buckets if cause.split("-")[0] in families)
    return 100 * lost / made.report.in_step_ns


def is_near(stated: float, ours: float, within: float = WITHIN, least: float = LEAST_US) -> bool:
    return abs(stated - ours) <= max(least, within * abs(stated))


def check_kineto() -> Iterator[Row]:
    """Idle and exposed communication of every trace of PyTorch's profiler."""
    for folder in ("kineto-dataloader", "kineto-hta", "kineto-tracelens"):
        for name, trace in load_known(folder)["traces"].items():
            yield from _check_intervals(folder, name, trace.get("independent_interval_reference"))


def check_single_ranks() -> Iterator[Row]:
    """The same of each rank of DLRM, and all of them as one job."""
    result = load_known("kineto-dlrm-8rank")
    for rank, reference in result["independent_interval_reference"].items():
        yield from _check_intervals("kineto-dlrm-8rank", f"{rank}.pt.trace.json.gz", reference)
    job, by = "kineto-dlrm-8rank", "aligned kernels"
    made = import_folder(job)
    moved = sum(f.lost_ns for f in made.report.findings if f.cause.id == "net-transfer") / 8e3
    stated = result["collective_alignment"]["sum_of_min_durations_us"]
    yield Row(
        job,
        "all",
        "transfer, each rank",
        f"{stated:,.0f} us",
        by,
        f"{moved:,.0f} us",
        is_near(stated, moved),
    )
    late: dict[int | None, int] = {}
    for finding in made.report.findings:
        for culprit in finding.culprits:
            late[culprit.rank] = late.get(culprit.rank, 0) + (culprit.others_ns or 0)
    ours = max(late, key=lambda rank: late[rank])
    yield Row(job, "all", "whom the others wait for", "rank 7", by, f"rank {ours}", ours == 7)


def _check_intervals(folder: str, name: str, reference: Any) -> Iterator[Row]:
    if not reference or not (DATA / folder / name).exists():
        return
    made = import_folder(f"{folder}/{name}")
    by = f"intervals in {reference['window']}"
    for what, key, ours in (
        ("idle", "gpu_idle_us", measure_idle_us(made)),
        ("exposed communication", "exposed_comm_us", measure_exposed_us(made)),
    ):
        stated = float(reference[key])
        yield Row(
            folder, name, what, f"{stated:,.0f} us", by, f"{ours:,.0f} us", is_near(stated, ours)
        )


def check_data_waits() -> Iterator[Row]:
    """Idle time in waits for data, and what comes first."""
    folder = "kineto-dataloader"
    for name, trace in load_known(folder)["traces"].items():
        reference = trace["independent_interval_reference"]
        made = import_folder(f"{folder}/{name}")
        stated, ours = (
            reference["idle_during_dataloader_pct_of_window"],
            measure_share(made, *_DATA),
        )
        yield Row(
            folder,
            name,
            "idle in waits for data",
            f"{stated:.1f} %",
            "intervals",
            f"{ours:.1f} %",
            abs(stated - ours) < 0.2,
        )
    for part, wanted in (("num_workers_0.16", True), ("num_workers_4", False)):
        name = next(n for n in load_known(folder)["traces"] if part in n)
        first = import_folder(f"{folder}/{name}").report.findings[0].cause
        printed = "the dataloader first" if wanted else "not the dataloader"
        yield Row(
            folder,
            name,
            "verdict",
            printed,
            "torch-tb-profiler",
            first.id,
            (first.family in _DATA) == wanted,
        )


def check_other_folders() -> Iterator[Row]:
    """One line for every other folder."""
    for folder, file, what, stated, by, ask in _JOBS:
        ours, met = ask(import_folder(f"{folder}/{file}" if file != "all" else folder))
        yield Row(folder, file, what, stated, by, ours, met)


def check_verdicts() -> Iterator[Row]:
    """What stands first where somebody says why a device was idle."""
    folder = "kineto-tracelens"
    for name, trace in load_known(folder)["traces"].items():
        printed = trace.get("verdict_ours", "")
        wanted = next((cause for word, cause in _VERDICTS if word in printed), None)
        if wanted is None:
            continue
        first = import_folder(f"{folder}/{name}").report.findings[0].cause.id
        yield Row(
            folder, name, "verdict", printed.partition(":")[0], "intervals", first, first == wanted
        )


def check_logs() -> Iterator[Row]:
    """Logs, tables and readings; and that nothing is found where nothing is wrong."""
    for answer in iterate_answers():
        yield Row(*answer)
    for folder, file, by in _HEALTHY:
        ours, met = _check_no_finding(
            import_folder(f"{folder}/{file}" if file != "all" else folder)
        )
        yield Row(folder, file, "findings", "0", by, ours, met)


def _find_first_culprit(rank: int, *families: str) -> Callable[[Analysis], tuple[str, bool]]:
    def ask(made: Analysis) -> tuple[str, bool]:
        first = made.report.findings[0]
        result = first.culprits[0].rank if first.culprits else None
        met = result == rank and (not families or first.cause.family in families)
        return f"rank {result}, {first.cause.id}", met

    return ask


def _check_percent(
    low: float, high: float, *families: str
) -> Callable[[Analysis], tuple[str, bool]]:
    def ask(made: Analysis) -> tuple[str, bool]:
        ours = measure_share(made, *families)
        return f"{ours:.1f} %", low <= ours <= high

    return ask


def _check_no_finding(made: Analysis) -> tuple[str, bool]:
    return f"{len(made.report.findings)} findings", not made.report.findings


def _check_slowdown(made: Analysis) -> tuple[str, bool]:
    by_key = {metric.name: metric.value for metric in made.report.metrics}
    ours = by_key.get("yardstick.slowdown_factor")
    return ("not known", False) if ours is None else (f"{ours:.3f}", abs(ours - 1.179) <= 0.02)


def _check_accelerator_utilization(made: Analysis) -> tuple[str, bool]:
    by_key = {metric.name: metric.value for metric in made.report.metrics}
    ours = 100 * (by_key.get("au_ratio") or 0.0)
    return f"{ours:.2f} %", abs(ours - 91.226) <= 0.1


def _check_reads(made: Analysis) -> tuple[str, bool]:
    ours = 100 * measure_share(made, "storage") / measure_share(made, "storage", "cpu")
    return f"{ours:.1f} %", abs(ours - 84.98) <= 0.5


def _check_waits(made: Analysis) -> tuple[str, bool]:
    """Of steps as the source lists them: what lies between the lists is in no cause of ours."""
    report = made.report
    rest = sum(ns for rank in report.ranks for cause, ns in rank.buckets if cause == "unattributed")
    lost = measure_share(made, *_DATA) / 100 * report.in_step_ns
    ours = 100 * lost / (report.in_step_ns - rest)
    return f"{ours:.2f} %", abs(ours - 2.259) <= 0.05


def _check_idle_percent(
    *stated: float, within: float = 0.15
) -> Callable[[Analysis], tuple[str, bool]]:
    def ask(made: Analysis) -> tuple[str, bool]:
        collected = []
        for node in made.across.nodes:
            for rank in node.ranks:
                in_step = rank.ledger.in_step_ns
                collected.append(100 * (in_step - rank.accumulator.totals.get("busy", 0)) / in_step)
        printed = ", ".join(f"{value:.1f} %" for value in collected)
        return printed, len(collected) == len(stated) and all(
            abs(a - b) <= within for a, b in zip(collected, stated)
        )

    return ask


_JOBS: tuple[tuple[str, str, str, str, str, Callable[[Analysis], tuple[str, bool]]], ...] = (
    (
        "nsys-sqlite",
        "mfu_2gpu_before.sqlite.gz",
        "idle, copies are activity",
        "8.7 %, 10.5 %",
        "nsys-ai 0.3.0 and intervals",
        _check_idle_percent(8.68, 10.51),
    ),
    (
        "dftracer-dlio-8rank",
        "all",
        "lost in `__getitem__`: reads and work",
        "33 to 35 %",
        "intervals",
        _check_percent(33.0, 35.0, "storage", "cpu"),
    ),
    ("dftracer-dlio-8rank", "all", "of it in calls for files", "85.0 %", "intervals", _check_reads),
    (
        "mlperf-storage",
        "all",
        "waits for batches, of waits and work",
        "2.26 %",
        "its step lists",
        _check_waits,
    ),
    (
        "mlperf-storage",
        "all",
        "AU, mean of epochs",
        "91.23 %",
        "its summary.json",
        _check_accelerator_utilization,
    ),
    (
        "straggler-bytedance",
        "all",
        "slowdown by stragglers",
        "1.179",
        "its authors",
        _check_slowdown,
    ),
    (
        "straggler-bytedance",
        "all",
        "the stage that is slow",
        "the last (ranks 6, 7)",
        "its authors",
        lambda made: (
            f"rank {made.report.findings[0].culprits[0].rank}",
            made.report.findings[0].culprits[0].rank in (6, 7),
        ),
    ),
    (
        "spdl-fleet",
        "all",
        "the slow rank",
        "rank 19, preprocessing",
        "its authors",
        _find_first_culprit(19, "cpu", "input"),
    ),
    (
        "alibaba-minibatch",
        "job_2_norm.csv",
        "the slowest worker",
        "5 (233 of 254)",
        "step times",
        _find_first_culprit(5),
    ),
    (
        "alibaba-minibatch",
        "job_3_norm.csv",
        "the slowest worker",
        "1 (115), 0 (102)",
        "step times",
        _find_first_culprit(1),
    ),
    ("megatronapp-pipeline", "all", "the heavy stage", "3", "intervals", _find_first_culprit(3)),
    (
        "megatronapp-pipeline",
        "all",
        "bubbles by stage",
        "52.9, 54.9, 54.2, 24.7 %",
        "intervals",
        _check_idle_percent(52.85, 54.86, 54.16, 24.66),
    ),
)

_VERDICTS = (("launch bound", "launch-bound"), ("dataloader:", "input-wait"))
_HEALTHY = (
    ("dcgm-prometheus", "all", "idle GPUs"),
    ("nvidia-smi-xml", "all", "readings alone"),
    ("node-exporter-fixtures", "expected-e2e-output.txt.gz", "readings alone"),
)

if __name__ == "__main__":
    raise SystemExit(main())
