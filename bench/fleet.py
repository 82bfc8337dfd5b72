"""What does `fleet` cost: a job beyond its analysis, and a question to a ledger of 100,000 jobs?

A job is added from its report: entry, transaction and commit on this disk. The large ledger has
jobs of 1 to 32 nodes, 6 on average, of 200 nodes, 40 users and a year; all tables are computed, as
the command does without a choice of jobs. Targets: 50 ms a job, 1 s a question.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.fleet.database import Ledger, Price, RecordedInput, open_ledger
from clusterprof.fleet.job_entry import JobEntry, build_job_entry
from clusterprof.fleet.page import render_fleet_page
from clusterprof.fleet.queries import Choice, summarize_ledger
from clusterprof.gate.stored_report import load_report
from clusterprof.output.renderers.json import Json
from clusterprof.report.model import Report
from tests.support.cluster_report import make_cluster_report
from tests.support.fleet_jobs import MONDAY_NS, WEEK_NS, make_entry

JOBS, NODES, USERS, WEEKS = 100_000, 200, 40, 52
SIZES = (1, 1, 2, 2, 4, 4, 8, 8, 8, 32)
ROUNDS, ADDED = 3, 30


def main() -> None:
    """Print the cost of adding, and of asking."""
    with tempfile.TemporaryDirectory() as folder:
        add_jobs(Path(folder))
        ask_many(Path(folder) / "large.db")


def measure_cpu_s(run: Callable[[int], object]) -> float:
    """Return the least CPU time of a few rounds, in seconds."""
    spent = []
    for round_ in range(ROUNDS):
        begun = time.process_time()
        run(round_)
        spent.append(time.process_time() - begun)
    return min(spent)


def add_jobs(folder: Path) -> None:
    """Add jobs of a node and of 128 one by one."""
    for nodes in (1, 16, 128):
        report = make_cluster_report(nodes=nodes)
        path = folder / "report.json"
        path.write_text(Json().render(report))
        load_s = measure_cpu_s(lambda _, path=path: load_report(path))
        with open_ledger(folder / f"add-{nodes}.db") as ledger:

            def add(round_: int, report: Report = report, ledger: Ledger = ledger) -> None:
                for number in range(ADDED):
                    fresh = replace(build_job_entry(report, CAUSES), key=f"{round_} {number}")
                    ledger.put(fresh, RecordedInput(fresh.key, "1", 1))

            add_s = measure_cpu_s(add) / ADDED
        print(
            f"  a job of {nodes} nodes, {report.rank_count} ranks: {1e3 * add_s:.1f} ms of CPU to"
            f" add (target 50); its stored report is read in {1e3 * load_s:.1f} ms"
        )


def ask_many(path: Path) -> None:
    """Fill a ledger without waiting for the disk, and compute all tables."""
    chance = random.Random(0)
    names = [f"gpu-{number:03d}" for number in range(NODES)]
    with open_ledger(path) as ledger:
        ledger.connection.execute("PRAGMA synchronous = OFF")
        ledger.connection.execute("PRAGMA journal_mode = MEMORY")
        begun = time.process_time()
        for number in range(JOBS):
            entry = draw(chance, names, chance.choice(SIZES))
            start_ns = MONDAY_NS + number * WEEKS * WEEK_NS // JOBS
            fresh = replace(
                entry, key=str(number), user=f"user-{number % USERS}", started_ns=start_ns
            )
            ledger.put(fresh, RecordedInput(str(number), "1", 1), Price(2.5, "USD"))
        filled = time.process_time() - begun
    size = os.stat(path).st_size
    print(f"  {JOBS:,} jobs: {size / 1e6:.0f} MB, filled in {filled:.0f} CPU-s")
    for name, choice in (
        ("all jobs", Choice()),
        ("the last weeks", Choice(MONDAY_NS + 48 * WEEK_NS)),
    ):
        with open_ledger(path, False) as ledger:
            ask_s = measure_cpu_s(
                lambda _, ledger=ledger, choice=choice: summarize_ledger(ledger, choice)
            )
            summary = summarize_ledger(ledger, choice)
        page = render_fleet_page(summary)
        draw_s = measure_cpu_s(lambda _, summary=summary: render_fleet_page(summary))
        print(
            f"  all tables of {name}: {ask_s:.2f} CPU-s (target 1); the page,"
            f" {len(page) / 1e3:.0f} KB: {draw_s:.2f}"
        )


def draw(chance: random.Random, names: list[str], size: int) -> JobEntry:
    """Draw a job on some nodes, of which one may be a culprit."""
    members = sorted(chance.sample(names, size))
    culprits = [chance.choice(members)] if size > 1 and chance.random() < 0.3 else []
    return make_entry(0, members, culprits)


if __name__ == "__main__":
    main()
