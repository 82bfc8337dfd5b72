"""Score a slice of the corpus, or existing runs: two processes, progress, two files.

python -m clusterprof_lab.score --split dev                        a slice, made and scored
python -m clusterprof_lab.score --runs DIR --answers mytool=DIR    runs and answers of others
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import get_args

from clusterprof_lab.scenario import CORPUS, ScenarioError, Split, load_corpus
from clusterprof_lab.score.document import make_document
from clusterprof_lab.score.modes import MODES
from clusterprof_lab.score.plan import (
    TESTBEDS,
    ScoredRun,
    Slice,
    list_stored_runs,
    plan_runs,
    select_recorded,
)
from clusterprof_lab.score.progress import Progress
from clusterprof_lab.score.score_sheet import format_score_page, format_summary
from clusterprof_lab.score.work import RunResult, Settings, score_run

PROCESSES = 2
MANY = 1024


def main(argv: Sequence[str] | None = None) -> int:
    """Score; 0 when something was scored, 2 when nothing could be."""
    given = _parse_arguments().parse_args(argv)
    try:
        corpus = load_corpus(given.corpus)
    except (ScenarioError, OSError) as error:
        print(f"score: {error}", file=sys.stderr)
        return 2
    if given.runs is not None:
        modes = tuple(given.modes.split(",")) if given.modes else MODES
        works = list_stored_runs(given.runs, modes, given.ablate)
    else:
        works = plan_runs(corpus, given.split, given.slice, given.testbed)
        if given.modes:
            works = [replace(work, modes=tuple(given.modes.split(","))) for work in works]
        if given.recorded is not None:
            works = select_recorded(works, given.recorded, not given.no_recording)
    works = [work for work in works if _ask_tools(work, given)]
    if not works:
        print(f"score: no run under {given.runs or 'this choice'}", file=sys.stderr)
        return 2
    keep = given.keep and given.out / "kept"
    given.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        not given.no_rules,
        dict(map(_split_tool_folder, given.answers)),
        keep or None,
        {scenario.id: scenario for scenario in corpus},
        not given.uncalibrated,
    )
    begun = time.monotonic()
    done = sorted(
        _run_all(works, settings, given.jobs), key=lambda result: works.index(result.work)
    )
    seconds = time.monotonic() - begun
    splits = {row.split for result in done for row in result.rows} or {given.split}
    split = splits.pop() if len(splits) == 1 else "test"  # what may not be looked at, if any
    made = make_document(
        done, split, "runs" if given.runs else given.slice, seconds, settings.calibrated
    )
    (given.out / "score.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    (given.out / "score.md").write_text(format_score_page(made), encoding="utf-8")
    print(format_summary(made))
    print(f"more in {given.out / 'score.md'}: modes, confusion, every scenario, what was wrong")
    return 0 if any(result.rows for result in done) else 2


def _parse_arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m clusterprof_lab.score",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--split", choices=get_args(Split), default="dev")
    parser.add_argument("--slice", choices=get_args(Slice), default="ci")
    parser.add_argument("--testbed", nargs="*", choices=TESTBEDS, default=list(TESTBEDS))
    parser.add_argument("--runs", type=Path, help="score the runs under this folder")
    parser.add_argument(
        "--recorded",
        type=Path,
        metavar="DIR",
        help="real jobs of the slice that `clusterprof-lab run --out DIR` left here are not made",
    )
    parser.add_argument(
        "--no-recording", action="store_true", help="nor are those that do not lie there"
    )
    parser.add_argument(
        "--answers",
        action="append",
        default=[],
        metavar="[TOOL=]DIR",
        help="answers of another tool, by name of run",
    )
    parser.add_argument("--out", type=Path, default=Path("score"))
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--only", default="", help="scenarios or groups, by comma")
    parser.add_argument("--modes", default="", help="M0,M1,…; all of them otherwise")
    parser.add_argument("--ablate", action="store_true", help="with --runs: leave out each signal")
    parser.add_argument("--no-rules", action="store_true", help="without the rules of others")
    parser.add_argument("--keep", action="store_true", help="keep runs judged wrong under OUT/kept")
    parser.add_argument(
        "--uncalibrated", action="store_true", help="for score.calibrate: confidence before it"
    )
    parser.add_argument("--jobs", type=int, default=PROCESSES)
    return parser


def _split_tool_folder(text: str) -> tuple[str, Path]:
    """Split TOOL=DIR; without a name a tool is called what it calls itself."""
    name, _, folder = text.rpartition("=")
    return name, Path(folder)


def _ask_tools(work: ScoredRun, given: argparse.Namespace) -> bool:
    names = {name for name in given.only.split(",") if name}
    if not names:
        return True
    if work.trial is None:
        return any(work.name.startswith(name) for name in names)
    return bool(names & {work.trial.scenario.id, work.trial.scenario.group})


def _needs_whole_machine(work: ScoredRun) -> bool:
    """Return whether a run must be alone: real jobs need both CPUs, large simulations 3 GB of
    memory."""
    made = work.testbed == "real" and work.folder is None and not work.not_now
    return made or (work.ranks or 0) > MANY


def _run_all(works: Sequence[ScoredRun], settings: Settings, jobs: int) -> Iterator[RunResult]:
    """Do all work, several at a time or alone, and say on stderr how far it is."""
    progress = Progress(len(works))
    do_work = partial(score_run, settings=settings)
    alone = [work for work in works if jobs <= 1 or _needs_whole_machine(work)]
    pooled = [work for work in works if work not in alone]
    with ExitStack() as stack:
        if pooled:
            pool = stack.enter_context(get_context("spawn").Pool(min(jobs, len(pooled))))
            for done in pool.imap_unordered(do_work, pooled):
                progress.report(done)
                yield done
    for done in map(do_work, alone):
        progress.report(done)
        yield done
