"""`docs/what-if.md`, from what is stored under `lab/results/what-if/`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterprof_lab.score.figures import wilson
from clusterprof_lab.score.markdown import table
from clusterprof_lab.score.whatif import FORMAT, SCHEMA, TARGET_RATIO, WITHIN_POINTS

RESULTS = Path(__file__).resolve().parents[2] / "results" / "what-if"
PAGE = "docs/what-if.md"
HEAD = """# What if

How much sooner would a job end with one cause fixed? `clusterprof` plays the operations of all
ranks once more without the cause's own pieces; everyone leaves one when the last has come
([design/what-if.md](design/what-if.md)). Here its predictions stand beside the truth: the
same job without the fault. Points are hundredths of the time in steps. Bounds are 95 %, of a block
bootstrap over stretches of steps: they say how much the run varies, not how far the model may be
off.
"""
SEEDS = "The split dev is the one the model may be improved on; no run of the split test was used."
READ = """\
*Within* is the part of faults whose predicted gain is at most 3 points off, with Wilson's interval.
*Truth's books* is the same for what the truth itself says was lost to the fault, a tool that
measured everything without error and knew nothing of what hides behind what: on real jobs it says
how far a clean run, made at another time on a busy machine, can serve as truth at all.
"""
RULES = """\
* A prediction is that of the findings that name the fault: its accepted leaves, or its family
  where those are less than half of what the family lost. What no finding names is predicted to win
  nothing.
* Synthetic: each fault of a run is taken away alone, the others stay. Work that is uneven in turn
  (`sync-sequence-skew`) is evened out, not taken away: no fix of an imbalance makes work vanish.
* Real in turns: one job, its fault off, on, on, off in blocks of 28 steps, so that what the machine
  does more and more is in both halves alike. The truth is the mean step with the fault against that
  without it; the prediction is of the steps with the fault alone, which are all that the analysis
  sees. The first 8 steps of a turn count for neither. Where the 95 % interval of the truth is wider
  than 3 points either way nothing can be told, and the fault is not counted.
* Real, at another time: one clean run per layout of the job, on the same machine, which is why the
  jobs in turns were made. It stands as it was scored last, before the hosts' part of transfers and
  the waits for a CPU in them were known; its recordings are not kept.
* Faults outside the steps (start-up, restarts, hangs) have no place here: only steps are played.
"""
SHORT = """\
* A host that synchronises with its device (`.item()`, a log, a save) also loses its lead over it:
  the launches after it cost device time too, which is not all known to be its doing.
* Two faults that strike in turn: while one holds the job up, the loader of the other works ahead,
  and without the first the second is felt more.
* Real jobs on two cores: with a fault the rest is slower as well. Of transfers the waits for a CPU
  are counted; what an interpreter that is busy elsewhere costs them (a rank without workers), and
  the launches after a pause, are not: one to three points too small.
* What the findings name wrongly is won wrongly. Twelve of the real jobs with their fault at its
  strongest (half of all time, on a busy machine, not among the rows below): 9 within 3 points; of
  logging that waited for CPUs, and of launches of which some were taken for metrics, 23 and 25
  points went to other findings, which all together were right to a point.
* `net-transfer` is what a network wins that leaves only what the hosts need. The way through both
  stacks in turn and the link itself at its best stay too, and nothing in a recording whose network
  was never well tells how long they take: up to three points too much. Where no thread is known to
  move the data (NCCL), it is what a network wins that takes no time.
"""
REDO = """\
```
python -m clusterprof_lab whatif --split dev --out whatif        # synthetic: minutes
make record-whatif                                              # real jobs: root, 25 minutes
python -m clusterprof_lab whatif --paired score-dev-paired --out whatif-paired
python -m clusterprof_lab whatif --store whatif/whatif.json     # then `make docs`
```
"""


_NAMES = {"real": "real, clean run at another time"}


def store(path: Path, folder: Path = RESULTS) -> Path:
    """Keep what was found for the page, named after its split and testbed."""
    document = _checked(path)
    beds = sorted({one["testbed"] for one in document["faults"]})
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{document['split']}-{'-'.join(beds).replace(' ', '-')}.json"
    kept.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
    return kept


def _checked(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if document.get("format") != FORMAT or document.get("schema") != SCHEMA:
        raise ValueError(f"{path}: not predictions of schema {SCHEMA}")
    return document


def pages(folder: Path = RESULTS) -> dict[str, str]:
    """Return path -> text; nothing where nothing is stored."""
    documents = [_checked(path) for path in sorted(folder.glob("*.json"))]
    return {PAGE: "\n".join(_page(documents))} if documents else {}


def _page(documents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    faults = [{**one, "split": d["split"]} for d in documents for one in d["faults"]]
    beds = sorted({(one["testbed"], one["split"]) for one in faults}, reverse=True)
    yield HEAD
    yield f"Target: {100 * TARGET_RATIO:.0f} % within {WITHIN_POINTS:g} points. {SEEDS}\n"
    yield table(
        [
            "jobs",
            "faults",
            "cannot tell",
            "within",
            "off by, mean",
            "off by, worst",
            "truth's books, within",
        ],
        [
            _line(bed, [one for one in faults if (one["testbed"], one["split"]) == bed])
            for bed in beds
        ],
    )
    yield READ
    yield "## How it is counted\n"
    yield RULES
    yield "## Where it falls short\n"
    yield SHORT
    for bed in beds:
        yield f"## Every scenario: {_NAMES.get(bed[0], bed[0])}, {bed[1]}\n"
        yield table(
            ["scenario", "faults", "within", "true, points", "said, points", "off by, worst"],
            [_scenario(name, some) for name, some in _by_scenario(faults, bed).items()],
        )
    yield "## How to redo it\n"
    yield REDO


def _line(bed: tuple[str, str], some: Sequence[Mapping[str, Any]]) -> list[str]:
    told = [one for one in some if one.get("told", True)]
    right = sum(bool(one["within"]) for one in told)
    off = [abs(one["off"]) for one in told] or [0.0]
    own = [
        abs(one["stopwatch"] - one["true"]) <= WITHIN_POINTS
        for one in some
        if one["stopwatch"] is not None and one["how"] == "removed"
    ]
    mark = "✓" if right >= TARGET_RATIO * len(told) else "✗"
    return [
        f"{_NAMES.get(bed[0], bed[0])}, {bed[1]}",
        str(len(some)),
        str(len(some) - len(told)),
        f"{mark} {_part(right, len(told))}",
        f"{sum(off) / len(off):.1f}",
        f"{max(off):.1f}",
        _part(sum(own), len(own)),
    ]


def _part(right: int, of: int) -> str:
    one = wilson(right, of)
    if one.value is None or one.low is None or one.high is None:
        return "-"
    low, high = round(100 * one.low), round(100 * one.high)
    return f"{100 * one.value:.0f} % ({low}–{high}; {right} of {of})"


def _by_scenario(
    faults: Sequence[Mapping[str, Any]], bed: tuple[str, str]
) -> dict[str, list[Mapping[str, Any]]]:
    out: dict[str, list[Mapping[str, Any]]] = {}
    for one in faults:
        if (one["testbed"], one["split"]) == bed:
            out.setdefault(one["scenario"], []).append(one)
    return dict(sorted(out.items()))


def _true(one: Mapping[str, Any]) -> str:
    """Write a truth, with half of its 95 % interval where it has one."""
    error = one.get("error")
    return f"{one['true']:.1f}" + ("" if error is None else f" ± {error:.1f}")


def _scenario(name: str, some: Sequence[Mapping[str, Any]]) -> list[str]:
    right = sum(bool(one["within"]) for one in some)
    worst = max(some, key=lambda one: abs(one["off"]))
    evened = ", evened out" if any(one["how"] != "removed" for one in some) else ""
    return [
        name + evened,
        str(len(some)),
        str(right),
        ", ".join(_true(one) for one in some),
        ", ".join(f"{one['said']:.1f}" for one in some),
        f"{worst['off']:+.1f}",
    ]
