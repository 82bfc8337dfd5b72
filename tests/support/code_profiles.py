"""Stacks of lost time made by hand, with sums to check in one's head.

Two ranks lose 10 s: 7 s in Image.resize below `augment` (train.py:42), 2 s in `collate`
(data/utils.py:7), 1 s under a stack that is not known.
"""

from __future__ import annotations

import dataclasses

from clusterprof.report.code import CodeLine, CodeLocation, CodeProfile, StackTime, WorkLine
from clusterprof.report.model import Report
from tests.support.reports import make_storage_report

S = 1_000_000_000
MAIN = CodeLocation("/job/train.py", 90, "main")
AUGMENT = CodeLocation("/job/train.py", 42, "Images.augment")
LOADER = CodeLocation("/venv/lib/python3/dist-packages/torch/utils/data/loader.py", 733, "__next__")
RESIZE = CodeLocation("/venv/lib/python3/dist-packages/PIL/Image.py", 2450, "Image.resize")
COLLATE = CodeLocation("/job/data/utils.py", 7, "collate")
OTHER_UTILS = CodeLocation("/job/model/utils.py", 12, "log")
JSON = CodeLocation("/usr/lib/python3.12/json/decoder.py", 355, "raw_decode")
PLACES = (MAIN, LOADER, AUGMENT, RESIZE, COLLATE, OTHER_UTILS, JSON)

PROFILE = CodeProfile(
    PLACES,
    (False, True, False, True, False, False, True),
    (
        StackTime("storage-local", 1, (0, 1, 2, 3), 5 * S, 100),
        StackTime("cpu-preprocess", 1, (0, 1, 2, 3), 2 * S, 40),
        StackTime("storage-local", 0, (0, 1, 4), 2 * S, 40),
        StackTime("unattributed", 0, (), S, 20),
    ),
    samples=1234,
    notes=("rank 7 was not sampled",),
)
LINES = (
    CodeLine(AUGMENT, RESIZE, 142 * S, 0.71, 0.042, 460, "transform", "Resize"),
    CodeLine(COLLATE, None, 40 * S, 0.2, 0.0371, 130, "collate"),
    CodeLine(OTHER_UTILS, JSON, 2 * S, 0.01, 0.0049, 6),
)


def add_code_profile(
    report: Report, lines: tuple[CodeLine, ...] = LINES, code: CodeProfile | None = PROFILE
) -> Report:
    """Return the report with sampled stacks, and with code lines in its first finding."""
    first, *rest = report.findings
    findings = (dataclasses.replace(first, lines=lines), *rest)
    return dataclasses.replace(report, findings=findings, code=code)


def add_training_thread_line(report: Report, share: float) -> Report:
    """The report with a line in which its training thread worked for this part of step time."""
    work = (WorkLine(AUGMENT, None, int(share * report.in_step_ns), share, 0.041, 300),)
    return dataclasses.replace(report, code=CodeProfile(samples=300, busiest_lines=work))


def make_report_with_code() -> Report:
    return add_code_profile(make_storage_report())
