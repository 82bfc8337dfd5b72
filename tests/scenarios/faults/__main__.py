"""Inject faults and count what came of them: `make faults`, `make faults-long`.

    python -m tests.scenarios.faults [NAME…] [--long] [--trials N] [--seconds S] [--store FILE]
    python -m tests.scenarios.faults --tests [--store FILE]
    python -m tests.scenarios.faults [NAME…] --guards [--store FILE]
    python -m tests.scenarios.faults --list

Results are merged into bench/results/faults.json, from which `make docs` makes the page
docs/reliability.md: a fault that is injected again replaces its figures. `--tests` runs the tests
that the page names for each promise and counts their cases. `--guards` removes each guard in a copy
of the source and injects its fault there, which must notice it. Returns 1 when a promise was
broken, or a guard not missed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.scenarios.faults import results
from tests.scenarios.faults.guards import try_guards
from tests.scenarios.faults.model import Fault, NotPossible, Outcome, choose_faults
from tests.scenarios.faults.registry import FAULTS
from tests.support.killed_jobs import remove_run_dirs

MAX_WORDS = 400
LOCAL_PARTS = re.compile(r"(?:/[\w.+@-]+)+/| at 0x[0-9a-f]+")
"""Folders and addresses in memory: they say nothing on another machine."""


def main() -> int:
    """Inject the faults that were asked for; return 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="faults; all without a name")
    parser.add_argument("--long", action="store_true", help="the numbers of `make faults-long`")
    parser.add_argument("--trials", type=int, help="so many of each fault")
    parser.add_argument("--seconds", type=float, default=3600, help="at most, of each fault")
    parser.add_argument("--store", type=Path, default=results.STORE)
    parser.add_argument("--tests", action="store_true", help="run the tests of the promises")
    parser.add_argument("--guards", action="store_true", help="remove the guards of the faults")
    parser.add_argument("--list", action="store_true", help="print the names of the faults")
    asked = parser.parse_args()
    if asked.list:
        for fault in FAULTS:
            print(f"{fault.name:24} {fault.title}")
        return 0
    if asked.guards:
        return try_guards(asked.names, asked.store)
    if asked.tests:
        return results.store_tests(asked.store)
    broken = False
    for fault in choose_faults(FAULTS, asked.names):
        trials = asked.trials or (fault.long if asked.long else fault.short)
        began = time.monotonic()
        outcome = inject_often(fault, trials, asked.seconds)
        values = {**outcome.export(), "wall_s": round(time.monotonic() - began, 1)}
        results.store_outcome(asked.store, fault, values)
        broken = broken or bool(outcome.broken)
        print(f"{fault.name}: {results.format_outcome(values, fault)}", flush=True)
        for line in outcome.broken[:3]:
            print(f"  {line}", flush=True)
    return int(broken)


def inject_often(fault: Fault, trials: int, max_seconds: float) -> Outcome:
    """Inject a fault so often, or until the time is over."""
    outcome = Outcome()
    end = time.monotonic() + max_seconds
    with tempfile.TemporaryDirectory(prefix="clusterprof-fault-") as name:
        for batch in iterate_batches(trials, fault.at_once):
            if time.monotonic() > end or outcome.not_possible:
                break
            with ThreadPoolExecutor(fault.at_once) as threads:
                waiting = {threads.submit(try_once, fault, Path(name), n): n for n in batch}
                for future in as_completed(waiting):
                    try:
                        outcome.add(future.result())
                    except NotPossible as reason:
                        outcome.not_possible = str(reason)
                    except Exception as error:  # whatever comes is what is looked for
                        outcome.add_broken(waiting[future], describe_error(error))
    remove_run_dirs()
    return outcome


def iterate_batches(trials: int, at_once: int) -> Iterator[range]:
    """Yield the numbers of the trials, several batches wide of `at_once`."""
    width = 1 if at_once == 1 else 4 * at_once
    for start in range(0, trials, width):
        yield range(start, min(start + width, trials))


def try_once(fault: Fault, folder: Path, number: int):  # type: ignore[no-untyped-def]
    """Inject a fault once in a folder of its own; the folder of a broken trial is kept."""
    own = folder / str(number)
    own.mkdir()
    trial = fault.inject(own, number)
    shutil.rmtree(own, ignore_errors=True)
    return trial


def describe_error(error: BaseException) -> str:
    """Return an error and its place in the fault's own code, in a line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    words = " ".join(f"{type(error).__name__}: {error}".split())
    words = LOCAL_PARTS.sub("", words)
    return f"{words[:MAX_WORDS]} ({place})"


if __name__ == "__main__":
    sys.exit(main())
