"""Build `docs/what-if.md` from the results in `lab/results/what-if/`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterprof_lab.score.figures import compute_wilson
from clusterprof_lab.score.markdown import format_table
from clusterprof_lab.score.whatif import FORMAT, SCHEMA, TARGET_RATIO, WITHIN_POINTS

RESULTS = Path(__file__).resolve().parents[2] / "results" / "what-if"
PAGE = "docs/what-if.md"
HEAD = """# What if

How much sooner would a job end with one cause fixed? `clusterprof` replays the operations of all
ranks without the delay of that cause ([design/what-if.md](design/what-if.md)). In the replay an
operation ends when its last rank has arrived. This page compares the predictions with the truth:
the same job without the fault. Points are percentage points of the time in steps. Bounds are 95 %
intervals of a block bootstrap over steps. They show how much the run varies, not the error of the
model.
"""
SEEDS = "The model was developed on the split dev; no run of the split test was used."
READ = """\
*Within* is the share of faults whose predicted savings are at most 3 points off, with Wilson's
interval. *True ledger* is the same for the lost time that the truth itself assigns to the fault.
Such a tool would measure everything without error, but would not know what hides behind what. On
real jobs it shows how well a clean run at another time, on a busy machine, can serve as truth.
"""
RULES = """\
* A prediction is the sum over the findings that name the fault: its accepted leaves, or its family
  if the leaves are less than half of what the family lost. A fault that no finding names has a
  prediction of zero.
* Synthetic jobs: each fault of a run is removed alone, the others stay. Work that is uneven in turn
  (`sync-sequence-skew`) is evened out, not removed, because no fix of an imbalance removes work.
* Real jobs in turns: the fault of one job is off, on, on and off in blocks of 28 steps, so that a
  slow drift of the machine affects both halves equally. The truth is the mean step with the fault
  minus the mean step without it. The prediction uses only the steps with the fault, because the
  analysis sees no others. The first 8 steps of a turn are left out. If the 95 % interval of the
  truth is wider than 3 points to either side, the fault is not counted.
* Real jobs, clean run at another time: one clean run per layout of the job, on the same machine.
  The jobs in turns replaced this method. Its last score is shown. It was computed before the hosts'
  part of transfers was known, and its recordings were not kept.
* Faults outside the steps (start-up, restarts, hangs) are left out, because only steps are
  replayed.
"""
SHORT = """\
* A host that synchronizes with its device (`.item()`, a log, a save) also loses its lead over the
  device. The launches after it cost device time too. Only a part of that time is attributed to it.
* Two faults can alternate. While the first delays the job, the loader of the second works ahead.
  Without the first fault, the second costs more.
* On real jobs with two cores, a fault also slows down everything else. The waits of transfers for a
  CPU are counted. Two effects are not: a busy interpreter (a rank without workers), and the
  launches after a pause. Predictions are therefore one to three points too small.
* Wrong findings give wrong savings. Of twelve real jobs with their fault at its strongest (half of
  all time, on a busy machine, not among the rows below), 9 were within 3 points. Logging that
  waited for CPUs, and launches that were partly taken for metrics, were 23 and 25 points off. The
  sum over all findings was right to a point.
* For `net-transfer` the prediction assumes a network that needs only the time of the hosts. The way
  through both network stacks and the link at its best speed remain in reality. A recording of a
  network that was always slow does not show how long they take, so the prediction is up to three
  points too large. If no thread is known to move the data (NCCL), the assumed network takes no
  time.
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


def store_results(path: Path, folder: Path = RESULTS) -> Path:
    """Keep what was found for the page, named after its split and testbed."""
    document = _load_checked(path)
    beds = sorted({fault["testbed"] for fault in document["faults"]})
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{document['split']}-{'-'.join(beds).replace(' ', '-')}.json"
    kept.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
    return kept


def _load_checked(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if document.get("format") != FORMAT or document.get("schema") != SCHEMA:
        raise ValueError(f"{path}: not predictions of schema {SCHEMA}")
    return document


def make_pages(folder: Path = RESULTS) -> dict[str, str]:
    """Return path -> text; nothing where nothing is stored."""
    documents = [_load_checked(path) for path in sorted(folder.glob("*.json"))]
    return {PAGE: "\n".join(_make_page(documents))} if documents else {}


def _make_page(documents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    faults = [{**fault, "split": d["split"]} for d in documents for fault in d["faults"]]
    beds = sorted({(fault["testbed"], fault["split"]) for fault in faults}, reverse=True)
    yield HEAD
    yield f"Target: {100 * TARGET_RATIO:.0f} % within {WITHIN_POINTS:g} points. {SEEDS}\n"
    yield format_table(
        [
            "jobs",
            "faults",
            "cannot tell",
            "within",
            "mean error",
            "largest error",
            "true ledger, within",
        ],
        [
            _format_line(
                bed, [fault for fault in faults if (fault["testbed"], fault["split"]) == bed]
            )
            for bed in beds
        ],
    )
    yield READ
    yield "## How it is counted\n"
    yield RULES
    yield "## Known errors\n"
    yield SHORT
    for bed in beds:
        yield f"## Every scenario: {_NAMES.get(bed[0], bed[0])}, {bed[1]}\n"
        yield format_table(
            ["scenario", "faults", "within", "true, points", "predicted, points", "largest error"],
            [
                _format_scenario(name, scenario_faults)
                for name, scenario_faults in _format_by_scenario(faults, bed).items()
            ],
        )
    yield "## How to repeat it\n"
    yield REDO


def _format_line(bed: tuple[str, str], faults: Sequence[Mapping[str, Any]]) -> list[str]:
    conclusive = [fault for fault in faults if fault.get("told", True)]
    right = sum(bool(fault["within"]) for fault in conclusive)
    off = [abs(fault["off"]) for fault in conclusive] or [0.0]
    own = [
        abs(fault["stopwatch"] - fault["true"]) <= WITHIN_POINTS
        for fault in faults
        if fault["stopwatch"] is not None and fault["how"] == "removed"
    ]
    mark = "✓" if right >= TARGET_RATIO * len(conclusive) else "✗"
    return [
        f"{_NAMES.get(bed[0], bed[0])}, {bed[1]}",
        str(len(faults)),
        str(len(faults) - len(conclusive)),
        f"{mark} {_format_ratio(right, len(conclusive))}",
        f"{sum(off) / len(off):.1f}",
        f"{max(off):.1f}",
        _format_ratio(sum(own), len(own)),
    ]


def _format_ratio(right: int, of: int) -> str:
    interval = compute_wilson(right, of)
    if interval.value is None or interval.low is None or interval.high is None:
        return "-"
    low, high = round(100 * interval.low), round(100 * interval.high)
    return f"{100 * interval.value:.0f} % ({low}–{high}; {right} of {of})"


def _format_by_scenario(
    faults: Sequence[Mapping[str, Any]], bed: tuple[str, str]
) -> dict[str, list[Mapping[str, Any]]]:
    out: dict[str, list[Mapping[str, Any]]] = {}
    for fault in faults:
        if (fault["testbed"], fault["split"]) == bed:
            out.setdefault(fault["scenario"], []).append(fault)
    return dict(sorted(out.items()))


def _format_truth(fault: Mapping[str, Any]) -> str:
    """Write a truth, with half of its 95 % interval where it has one."""
    error = fault.get("error")
    return f"{fault['true']:.1f}" + ("" if error is None else f" ± {error:.1f}")


def _format_scenario(name: str, faults: Sequence[Mapping[str, Any]]) -> list[str]:
    right = sum(bool(fault["within"]) for fault in faults)
    worst = max(faults, key=lambda fault: abs(fault["off"]))
    evened = ", evened out" if any(fault["how"] != "removed" for fault in faults) else ""
    return [
        name + evened,
        str(len(faults)),
        str(right),
        ", ".join(_format_truth(fault) for fault in faults),
        ", ".join(f"{fault['said']:.1f}" for fault in faults),
        f"{worst['off']:+.1f}",
    ]
