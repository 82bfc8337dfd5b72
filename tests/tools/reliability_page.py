"""docs/reliability.md, from the promises and the stored results of faults and tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from tests.scenarios.faults.guards import GUARDS, UNGUARDED, Guard
from tests.scenarios.faults.model import Fault
from tests.scenarios.faults.promises import GROUPS, Promise
from tests.scenarios.faults.registry import FAULTS
from tests.scenarios.faults.results import STORE, load_results

COST = STORE.with_name("overhead_blocks.json")
PAGE = "docs/reliability.md"
NOT_TRIED = "not tried"
HEAD = """# Reliability

The training job comes first. clusterprof must not crash, block, slow or outlive it. No output may
contain values that were not measured.

This page lists every promise, the faults that were injected to try it, how often, and what was
lost. Every figure is from a run of `make faults` (minutes) or `make faults-long` (hours) on the day
and machine that [the faults](#the-faults) state. A promise without a figure says "not tried", and
why. A *trial* is one injection, mostly into a real recorder beside a real job; *broken* is the
number of trials in which a promise did not hold. Lost time is measured from the fault back to the
last sample or span in the recording, without the time in which the recorder waited for a CPU. The
tests named beside them run with `make test`.

"""
FAULTS_HEAD = """## The faults

| fault | how injected | measured | {unit} | further figures |
|---|---|---|---|---|
"""
GUARDS_HEAD = """
## Guards

Each guard was removed in a copy of the source, and its fault injected there: the promise must
break, or the fault would notice nothing.

| fault | guard | seen to break on | first broken |
|---|---|---|---|
"""
MUTATIONS_HEAD = """
## Mutated files

Good files were mutated: bits, bytes, numbers, tokens, lines and nesting; parts repeated, removed,
exchanged, compressed. Each input was read in a process with limits: 2 s of CPU, 256 MiB beyond
what the process had; of traces and recordings one in a thousand also went through a whole analysis
(10 s). An input must end in records or in a refusal. *Defects* are other errors, hangs, and
deaths of the process.

| format | inputs | read | refused | analyzed | defects | measured |
|---|---|---|---|---|---|---|
"""
COST_HEAD = """
## Cost to the job

A recorded training loop switches recording on and off in turns, after each block of steps: recorder
and probe are stopped or go on (`make -C bench overhead-blocks`). Two blocks are a pair. A step
computes on the CPU, exchanges gradients, and sleeps for the time in the second column, as a rank
does that waits for its accelerator. Where ranks keep all CPUs busy, the recorder takes its time
from one of them, and the others wait for that one. What the hooks cost per operation is measured
apart (bench/README.md).

| ranks | sleep per step | busy CPUs | pairs | a step takes longer by | 95 % interval | measured |
|---|---|---|---|---|---|---|
"""
TAIL = """
## Again

    make faults          # about half an hour on two cores; root for the faults that mount
    make faults-long     # hours
    make -C bench fuzz   # a million mutated files per format: hours
    make docs            # writes this page from bench/results/faults.json

`python -m tests.scenarios.faults --list` lists the faults; with names it injects those alone, and
with `--guards` it removes their guards.

## Not covered

Disks that lose what they have confirmed, weeks of uninterrupted recording, and faults of real GPU
drivers: all of them are simulated; a healthy driver was [measured](gpu-notes.md).
`make overhead CMD="python train.py"` measures what recording costs your job.
"""


def make_pages() -> dict[str, str]:
    """Return path -> text of the page."""
    document = load_results()
    by_name = {fault.name: fault for fault in FAULTS}
    lines = [HEAD]
    for title, promises in GROUPS:
        lines.append(
            f"## {title}\n\n| | promise | fault | tried | lost | tests |\n"
            "|---|---|---|---|---|---|\n"
        )
        lines += [format_promise(promise, by_name, document) for promise in promises]
        lines.append("\n")
    lines.append(FAULTS_HEAD.format(unit="trials"))
    lines += [
        format_fault(fault, document["faults"][fault.name])
        for fault in FAULTS
        if fault.name in document["faults"]
    ]
    lines.append(GUARDS_HEAD)
    for guard in GUARDS:
        values = document.get("guards", {}).get(f"{guard.fault}: {guard.name}")
        lines.append(format_guard(guard, values))
    lines += [f"| `{fault}` | – | no guard: {why} | – |\n" for fault, why in UNGUARDED.items()]
    lines.append(MUTATIONS_HEAD)
    lines += map(format_mutations, sorted(document.get("mutations", {}).items()))
    lines.append(COST_HEAD)
    costs = json.loads(COST.read_text(encoding="utf-8")).values()
    lines += map(format_cost, sorted(costs, key=itemgetter("device_ms", "ranks")))
    lines.append(TAIL)
    return {PAGE: "".join(lines)}


def format_cost(values: Mapping[str, Any]) -> str:
    """Return the row of one job."""
    mean, low, high = (f"{value:+.3f} %" for value in values["percent"])
    sleep = f"{values['device_ms']:g} ms" if values["device_ms"] else "none"
    ratio = values["busy_ratio"]
    busy = "not recorded" if ratio is None else f"{ratio:.0%} of {values['cpus']}"
    job = f"{values['ranks']} | {sleep} | {busy} | {values['pairs']:,}"
    return f"| {job} | {mean} | {low} to {high} | {values['date']} |\n"


def format_mutations(entry: tuple[str, Mapping[str, Any]]) -> str:
    """Return the row of a format whose files were mutated."""
    name, values = entry
    counts = " | ".join(
        f"{values[key]:,}" for key in ("inputs", "read", "refused", "analyzed", "defects")
    )
    return f"| `{name}` | {counts} | {values['date']}, {values['machine']} |\n"


def format_promise(
    promise: Promise, by_name: Mapping[str, Fault], document: Mapping[str, Any]
) -> str:
    """Return the row of a promise."""
    tried, lost, titles = [], [], []
    for name in promise.faults:
        values = document["faults"].get(name)
        titles.append(f"[{by_name[name].title}](#the-faults)")
        tried.append(format_tried(values, by_name[name]))
        lost.append(format_lost(values, by_name[name]))
    tests = []
    for name in promise.tests:
        counts = document["tests"].get(name)
        tests.append(f"`{name}`" + (f": {format_cases(counts)}" if counts else ""))
    text = promise.text + (f" *{promise.shortfall}*" if promise.shortfall else "")
    if not promise.faults:
        untried = f"{NOT_TRIED}: {promise.untried}" if promise.untried else NOT_TRIED
        tried = ["by its tests" if promise.tests else untried]
    cells = (titles, tried, lost, tests)
    row = " | ".join("<br>".join(cell) for cell in cells)
    return f"| {promise.name} | {text} | {row} |\n"


def format_tried(values: Mapping[str, Any] | None, fault: Fault) -> str:
    """Return how often a fault was injected, and how often a promise was broken."""
    if values is None:
        return NOT_TRIED
    if values.get("not_possible"):
        return f"{NOT_TRIED}: {values['not_possible']}"
    count = f"{values['trials']:,}"
    if values["injected"] != values["trials"]:
        trials = "trial" if values["trials"] == 1 else "trials"
        count = f"{values['injected']:,} {fault.counted} in {count} {trials}"
    return f"{count}, {values['broken']} broken"


def format_lost(values: Mapping[str, Any] | None, fault: Fault) -> str:
    """Return the median and the worst loss, "–" where nothing is counted."""
    if values is None or "lost_worst" not in values:
        return "–"
    median, worst = (format_number(values[f"lost_{name}"]) for name in ("median", "worst"))
    unit = fault.unit.replace("frames", "frame") if worst == "1" else fault.unit
    return f"{worst} {unit}" if median == worst else f"{median} to {worst} {unit}"


def format_number(value: float) -> str:
    """Return a number with at most two decimals."""
    return f"{value:,.2f}".rstrip("0").rstrip(".")


def format_cases(counts: Mapping[str, Any]) -> str:
    """Return how many cases of a test file passed, and when."""
    words = [f"{counts['passed']} passed"]
    words += [f"{counts[kind]} {kind}" for kind in ("failed", "skipped") if counts[kind]]
    return f"{', '.join(words)} ({counts['date']})"


def format_fault(fault: Fault, values: Mapping[str, Any]) -> str:
    """Return the row of a fault."""
    further = "; ".join(f"{name}: {value:,}" for name, value in values.get("facts", {}).items())
    examples = values.get("examples", [])
    if examples:
        further = "; ".join(
            [*([further] if further else []), f"first broken: {_escape(examples[0])}"]
        )
    measured = f"{values['date']}, {values['machine']}"
    return (
        f"| {fault.title} (`{fault.name}`) | {fault.injection} | {measured} |"
        f" {format_tried(values, fault)} | {further or '–'} |\n"
    )


def format_guard(guard: Guard, values: Mapping[str, Any] | None) -> str:
    """Return the row of a guard."""
    seen, words = NOT_TRIED, ""
    if values is not None:
        seen = f"{values['date']}, {values['broken']} of {values['tried']}"
        seen = seen if values["noticed"] else f"not noticed ({seen})"
        if values.get("not_possible"):
            seen = f"{NOT_TRIED}: {values['not_possible']}"
        words = _escape(values["words"])
    return f"| `{guard.fault}` | `{guard.file}`: {guard.name} | {seen} | {words or '–'} |\n"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
