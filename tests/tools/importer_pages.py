"""The page docs/importers.md: what each importer says of itself, and its answers on real traces."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ANSWERS = ROOT / "tests" / "analysis" / "importers" / "answers.json"
PAGE = "docs/importers.md"
NO_ANSWER = "no answer"
"""What stands in the column of stated answers of files that have none."""
_INTRO = """# Traces of other tools

`clusterprof analyze FILES…` takes the traces a team has already: it recognises them by their
content, turns them into a recording of its own in a temporary folder, and analyses that as any
other. Commands that read a recording read them too (`gate`, `compare`, `export`).

```
clusterprof analyze traces/                       # a folder: every file of a known format
clusterprof analyze rank*.pt.trace.json.gz        # the ranks of one job
clusterprof analyze my-run/ rank3.json.gz         # beside our own recording of the same job
clusterprof export traces/ --to recording -o run/ # keep what they became
```

The notes of the report say of each format what was understood, what was left out and why. Nothing
in a file is ever run, unpickled or unpacked to disk; what is cut off is read up to there.
Beside files that are known, `analyze` and `export` leave out one that is not, that is damaged from
its beginning or says nothing, and name it; `gate` and `compare` refuse it and say which, why and
what to do, for they may not judge by a part of what they were given. Of a folder only what is
damaged counts for one: what else is of no known format in it is passed over, and a note names it.

## What is refused

Files that would fill the memory, or never end, are refused with the reason: what unpacks to more
than 250 times its size (gzip, zstd, members of a zip); more than 4,096 members, or such as are
encrypted or packed by another method than zip's usual one; one JSON value whose parts take more
than 192 MiB of memory; more than 1.5 million names of events, 131,072 series (8,192 of one host),
65,536 names of metrics, processes or communicators, 16,384 ranks or 1,024 jobs of step times; a
database whose pages refer to each other in circles, or with more tables than can be looked at;
what shows one process at times more than 100 days apart. Lines of more than 1 MiB are left out and
counted. `python -m bench.bombs` sends one of each through `analyze`: all end within 10 s of CPU and
300 MB (bench/README.md). Mutated files: `make fuzz`.

## What an imported trace can say, and what not

* **Lost** is idle time of the device within the steps, and time in which it does nothing but
  communicate. Idle is the complement of *all* its activity, copies and memory sets included.
* A profiler marks that a step waited for its data and not what the loader did. Such a wait is
  `input-wait`; tracers of reads (DFTracer) tell more, a recording of our own tells all of it.
* `launch-bound` in a trace of kernels is the time in which the device was idle and the call that
  launches its next kernel had not begun, or not ended. Idle time with work in the queue (order,
  dependencies) is nobody's, and stays unattributed.
* Operations between ranks are matched by process group and sequence number where the trace has
  them, else by their order. The time until the last rank's kernel has begun is waiting and is its
  doing; the shortest duration among the ranks is transfer (`net-transfer`).
* **Beside our own recording** of the same rank, a trace with a wall clock lends it its exact device
  times for as long as it lasts, and all else of it is left out.
* Traces are short. Below some two seconds of loss a report says rather less sure what it says.
"""


def importer_page(mark: str) -> str:
    """Return the page."""
    from clusterprof.analysis.importers.registry import IMPORTERS

    parts = [mark + _INTRO, "## Formats\n"]
    for importer in IMPORTERS:
        module = sys.modules[type(importer).__module__]
        text = inspect.cleandoc(module.__doc__ or "")
        title, _, body = text.partition("\n")
        body = body.strip().replace("\n## ", "\n#### ").replace("## What", "#### What", 1)
        parts.append(f"### {importer.title}\n\n{title}\n\n{body}\n")
    parts.append(_answers())
    return "\n".join(parts)


def _mark(row: dict[str, Any]) -> str:
    if row["stated"] == NO_ANSWER:
        return "read" if row["met"] else "**cut**"
    return "met" if row["met"] else f"**{row['why']}**"


def _answers() -> str:
    """The table of all files with an answer that somebody else states."""
    if not ANSWERS.exists():
        return ""
    rows: list[dict[str, Any]] = json.loads(ANSWERS.read_text())
    stated = [row for row in rows if row["stated"] != NO_ANSWER]
    met = sum(row["met"] for row in stated)
    lines = [
        "## Answers on real traces\n",
        f"Other people's traces with a stated answer, and ours: {met} of {len(stated)} met;"
        f" {len(rows) - len(stated)} files of which nobody states one are read to their end. Those"
        " that belong to one job are a line, `all`. The traces are no part of this project; `make"
        " import-answers` reads them again.\n",
        "| data | file | what | stated | by | ours | |",
        "|---|---|---|---:|---|---:|---|",
    ]
    lines += [
        f"| {row['data']} | {row['file']} | {row['what']} | {row['stated']} | {row['by']} |"
        f" {row['ours']} | {_mark(row)} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"
