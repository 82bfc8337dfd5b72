"""The pages docs/importers/: one per imported format, from its docstring, and an index.

    pages = importer_pages(MARK)
    pages["docs/importers/kineto.md"]

Each page ends with the answers of the importer on real traces, from
tests/analysis/importers/answers.json.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterprof.analysis.importers.core.base import Importer

ROOT = Path(__file__).resolve().parents[2]
ANSWERS = ROOT / "tests" / "analysis" / "importers" / "answers.json"
FOLDER = "docs/importers"
NO_ANSWER = "no answer"
"""Value of `stated` for files that come without a published answer."""
SECTIONS = (
    "## How to make the file",
    "## How to analyze it",
    "## What is read",
    "## What it cannot see",
)
"""Sections that every format describes, in this order."""

_FORMAT_OF_DATA = {
    "alibaba-minibatch": "step_times",
    "dcgm-prometheus": "prometheus",
    "dftracer-dlio-8rank": "dftracer",
    "dlio-sample": "dlio",
    "kineto-dataloader": "kineto",
    "kineto-dlrm-8rank": "kineto",
    "kineto-hta": "kineto",
    "kineto-tracelens": "kineto",
    "megatronapp-pipeline": "megatron-pipeline",
    "mllog": "mllog",
    "mlperf-storage": "dlio",
    "nccl-tests": "nccl-text",
    "node-exporter-fixtures": "prometheus",
    "nsys-sqlite": "nsys",
    "nvidia-smi-xml": "nvidia_smi",
    "spdl-fleet": "rank_series",
    "straggler-bytedance": "operator-table",
}
"""Importer that reads a data set of answers.json."""

_INDEX = """# Traces of other tools

`clusterprof analyze FILES…` reads the traces that you already have. It recognizes a file by its
content, converts it into a recording in a temporary folder, and analyzes that recording. `gate`,
`compare` and `export` accept the same files.

```
clusterprof analyze traces/                       # a folder: all files of a known format
clusterprof analyze rank*.pt.trace.json.gz        # the ranks of one job
clusterprof analyze my-run/ rank3.json.gz         # together with a recording of the same job
clusterprof export traces/ --to recording -o run/ # keep the converted recording
```

## Formats

| format | what it is |
|---|---|
{rows}

The notes of the report list for each file what was read, and what was left out and why. Nothing in
a file is ever executed, unpickled or unpacked to disk. A truncated file is read up to the
truncation.

`analyze` and `export` leave out a file that is unknown, empty or damaged from its beginning, and
name it. `gate` and `compare` refuse it, because they must not judge a part of the input. In a
folder, files of unknown formats are skipped, and a note names them. Damaged files of a known format
count as above.

## What an imported trace can show

* **Lost time** is idle time of the device within the steps, and time in which the device only
  communicates. The device is idle when it does nothing at all, no copies and no memory sets either.
* A profiler trace shows that a step waited for its data, but not what the loader did. Such a wait
  is `input-wait`. Traces of reads (DFTracer) show more. A recording made by clusterprof shows all
  of it.
* `launch-bound` in a trace of kernels is the time in which the device was idle and the call that
  launches its next kernel had not begun or not ended. Idle time with work in the queue (order,
  dependencies) stays unattributed.
* Collective operations of several ranks are matched by process group and sequence number, or by
  their order if the trace has no numbers. The time until the kernel of the last rank has begun is
  waiting, and that rank is the culprit. The shortest duration among the ranks is the transfer
  (`net-transfer`).
* A trace with a wall clock can be given **together with a recording** of the same rank. The
  analysis then takes the exact device times from the trace for as long as the trace lasts. The rest
  of the trace is ignored.
* Traces are short. Confidence decreases if less than about two seconds were lost.

## What is refused

Files that would fill the memory or never end are refused, with the reason:

* files that unpack to more than 250 times their size (gzip, zstd, members of a zip)
* zip files with more than 4,096 members, with encrypted members, or with an unusual compression
* a JSON value that needs more than 192 MiB of memory
* more than 1.5 million event names, 131,072 series (8,192 of one host), 65,536 names of metrics,
  processes or communicators, 16,384 ranks, or 1,024 jobs of step times
* databases whose pages form a circle, or with too many tables to read
* files that show one process at times more than 100 days apart

Lines of more than 1 MiB are left out and counted. `python -m bench.bombs` sends one file of each
kind through `analyze`. Each ends within 10 s of CPU time and 300 MB
([bench](../../bench/README.md)).

## Checked on real traces

{met} of {stated} published answers are met; {read} files without a published answer are read to
their end. Each page lists the answers of its format. The traces are not part of this project; `make
import-answers` reads them again.
"""


def make_importer_pages(mark: str) -> dict[str, str]:
    """Return the text of each page by its path; `mark` is the first line of each."""
    from clusterprof.analysis.importers.registry import IMPORTERS

    answers = _load_answers()
    pages = {
        f"{FOLDER}/{_get_page_name(importer)}": mark + _make_page(importer, answers)
        for importer in IMPORTERS
    }
    pages[f"{FOLDER}/README.md"] = mark + _make_index(IMPORTERS, answers)
    return pages


def _load_answers() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(ANSWERS.read_text())
    return rows


def _get_page_name(importer: Importer) -> str:
    return f"{importer.name.replace('_', '-')}.md"


def _get_heading(importer: Importer) -> str:
    return importer.title[0].upper() + importer.title[1:]


def _find_description(importer: Importer) -> str:
    """The docstring that describes the format: of the class, else of its module."""
    of_class = inspect.cleandoc(type(importer).__doc__ or "")
    module = sys.modules[type(importer).__module__]
    text = of_class if SECTIONS[0] in of_class else inspect.cleandoc(module.__doc__ or "")
    places = [text.find(section) for section in SECTIONS]
    if -1 in places or places != sorted(places):
        raise ValueError(f"{importer.name}: its docstring needs the sections {SECTIONS}")
    return text


def _make_page(importer: Importer, answers: list[dict[str, Any]]) -> str:
    text = f"# {_get_heading(importer)}\n\n{_find_description(importer)}\n"
    rows = [row for row in answers if _FORMAT_OF_DATA[row["data"]] == importer.name]
    return text + (_make_answer_table(rows) if rows else "")


def _make_index(importers: Any, answers: list[dict[str, Any]]) -> str:
    rows = [
        f"| [{_get_heading(importer)}]({_get_page_name(importer)}) |"
        f" {_find_description(importer).splitlines()[0]} |"
        for importer in importers
    ]
    stated = [row for row in answers if row["stated"] != NO_ANSWER]
    return _INDEX.format(
        rows="\n".join(rows),
        met=sum(row["met"] for row in stated),
        stated=len(stated),
        read=len(answers) - len(stated),
    )


def _format_mark(row: dict[str, Any]) -> str:
    if row["stated"] == NO_ANSWER:
        return "read" if row["met"] else "**cut**"
    return "met" if row["met"] else f"**{row['why']}**"


def _make_answer_table(rows: list[dict[str, Any]]) -> str:
    """The table of the files of one format whose answer is published."""
    lines = [
        "\n## Checked on real traces\n",
        "`all` stands for all files of one job. *Published by* is who states the value: the"
        " authors of the data, another tool, or arithmetic on the intervals in the file.\n",
        "| data | file | value | published | published by | clusterprof | |",
        "|---|---|---|---:|---|---:|---|",
    ]
    lines += [
        f"| {row['data']} | {row['file']} | {row['what']} | {row['stated']} | {row['by']} |"
        f" {row['ours']} | {_format_mark(row)} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"
