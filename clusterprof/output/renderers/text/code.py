"""Lines of code in words: where the lost time of a finding went, and lost time by line.

    train.py:42 in augment → PIL/Image.py:2450 resize: 71 % ± 4 of it

A file of the user has its base name, with as many parent folders as tell it from others. A file of
a library is named from its package on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.output.renderers.text.wording import format_share
from clusterprof.report.code import CodeLine, CodeLocation, CodeProfile, StackTime, WorkLine
from clusterprof.report.model import Finding, Report
from clusterprof.units import format_quantity

LINE_HEADS = ("line", "share", "lost", "function", "calls")
"""Columns of `list_line_rows`; the second and third are numbers."""
MAX_SHOWN_LINES = 5
"""Lines of a finding in text outputs; JSON and HTML have all."""
_MIN_WORK_RATIO = 0.25
_MIN_UNKNOWN_RATIO, _MIN_UNKNOWN_SAMPLES = 0.25, 8
UNKNOWN_STACK = "stack not known"
_ARROW = "→"
_MIN_WHOLE_RATIO = 0.95
"""Part of a line's time from which the line that it called stands for all of it."""
_MAX_FILE_CHARACTERS = 60  # of a short file name; its beginning is cut
_MAX_FUNCTION_CHARACTERS = 60
_MAX_PARENTS = 8  # folders before a file name that tell files apart; then the whole path is shown
_LIBRARY_FOLDER = re.compile(r".*/(?:site-packages|dist-packages|lib/python\d[\d.]*t?)/(?=.)")
_STAGES = {
    "dataset": "in the data loader's dataset",
    "transform": "in the data loader's transforms",
    "collate": "in the data loader's collate function",
    "pin": "in the data loader's pinning of memory",
}
"""Stage of the data loader -> words behind a line."""

FileNames = Mapping[str, str]
"""Path of a file -> its short name, not escaped."""


@dataclass(frozen=True, slots=True)
class LineTime:
    """A line of code, and the device time lost while it ran, over all causes and ranks."""

    place: CodeLocation
    cause: str
    """Id of the cause that lost most of it."""
    lost_ns: int
    samples: int


@dataclass(frozen=True, slots=True)
class LineTotals:
    """Lost device time by line of the user's own code."""

    lines: tuple[LineTime, ...] = ()
    """Largest first."""
    total_ns: int = 0
    """Lost time of all stacks."""
    unknown_ns: int = 0
    """Part of it whose stack is not known."""


# --- names --------------------------------------------------------------------------------------


def build_file_names(report: Report) -> dict[str, str]:
    """Build short names for all files in the stacks and lines of a report."""
    places = [*report.code.places] if report.code is not None else []
    code = report.code
    lines: list[CodeLine | WorkLine] = (
        [*code.busiest_lines, *code.unattributed] if code is not None else []
    )
    lines += [line for finding in report.findings for line in finding.lines]
    for line in lines:
        places += [line.place] if line.library is None else [line.place, line.library]
    names: dict[str, str] = {}
    own: list[str] = []
    for file in dict.fromkeys(location.file for location in places):
        match = _LIBRARY_FOLDER.match(file)
        if match is not None:
            names[file] = file[match.end() :]
        elif file.startswith("<") or "/" not in file:
            names[file] = file
        else:
            own.append(file)
    return {**names, **_build_distinct_names(own)}


def _build_distinct_names(files: Iterable[str]) -> dict[str, str]:
    """Name each path by its last parts, as many as tell it from the other paths."""
    names: dict[str, str] = {}
    unresolved = [(file, file.split("/")) for file in files]
    for count in range(1, _MAX_PARENTS + 2):
        groups: dict[str, list[tuple[str, list[str]]]] = {}
        for file, parts in unresolved:
            groups.setdefault("/".join(parts[-count:]), []).append((file, parts))
        unresolved = []
        for name, members in groups.items():
            if len(members) == 1:
                names[members[0][0]] = name
            else:
                unresolved += members
    return {**names, **{file: file for file, _ in unresolved}}


def format_file(file: str, names: FileNames) -> str:
    """Format the short name of a file; a long one keeps its end."""
    name = names.get(file, file) or "unknown file"
    if len(name) > _MAX_FILE_CHARACTERS:
        name = "…" + name[1 - _MAX_FILE_CHARACTERS :]
    return escape_text(name)


def format_file_line(location: CodeLocation, names: FileNames) -> str:
    """Format file and line: "train.py:42"; without the line where it is not known."""
    name = format_file(location.file, names)
    return escape_text(f"{name}:{location.line}") if location.line > 0 else name


def format_function(location: CodeLocation) -> str:
    """Format the name of a function."""
    return escape_text(location.function, _MAX_FUNCTION_CHARACTERS) or "unknown function"


# --- the lines of a finding ---------------------------------------------------------------------


def describe_where(report: Report, finding: Finding) -> str:
    """Describe the line in which most of a finding's time was lost; "" if no line is known."""
    if not finding.lines:
        return ""
    line = finding.lines[0]
    parts = [
        f"{describe_line(line, build_file_names(report))}: {format_line_share(line)} of it",
        "more than the other ranks" if finding.lines_compared else "",
        describe_stage(line),
    ]
    return ", ".join(part for part in parts if part)


def describe_unknown_where(report: Report) -> str:
    """Describe the line that ran during most of the time without a known cause; "" = not known."""
    line = next(iter(report.code.unattributed if report.code is not None else ()), None)
    if line is None or line.share_ratio < _MIN_UNKNOWN_RATIO or line.samples < _MIN_UNKNOWN_SAMPLES:
        return ""
    text = f"{describe_line(line, build_file_names(report))}: {format_line_share(line)}"
    return f"{text} of the time without a cause"


def describe_work(report: Report) -> str:
    """Describe the line in which training threads without a device worked longest; "" = not known.

    A line below a quarter of the step time is not worth a sentence.
    """
    line = (
        report.code.busiest_lines[0]
        if report.code is not None and report.code.busiest_lines
        else None
    )
    if line is None or line.share_ratio < _MIN_WORK_RATIO:
        return ""
    line_text = describe_line(line, build_file_names(report))
    text = f"{line_text}: {format_line_share(line)} of step time, at work in the training thread."
    return text if line.library else f"{text} Move it out of the step if it is not training."


def describe_line(line: CodeLine | WorkLine, names: FileNames) -> str:
    """Describe a line, its function, and the line of a library that it called."""
    text = f"{format_file_line(line.place, names)} in {format_function(line.place)}"
    called = format_called_line(line, names)
    if called and line.library_ratio < _MIN_WHOLE_RATIO:
        called += f" ({100 * line.library_ratio:.0f} % of that)"
    return f"{text} {_ARROW} {called}" if called else text


def describe_line_in_full(line: CodeLine, names: FileNames) -> str:
    """Describe a line, and the stage of the data loader in which it ran."""
    stage = describe_stage(line)
    return describe_line(line, names) + (f", {stage}" if stage else "")


def format_called_line(line: CodeLine | WorkLine, names: FileNames) -> str:
    """Format the line of a library that was called; "" where none was."""
    if line.library is None:
        return ""
    return f"{format_file_line(line.library, names)} {format_function(line.library)}"


def describe_stage(line: CodeLine) -> str:
    """Describe the transform or stage of the data loader in which a line ran; "" outside one."""
    if line.transform:
        return f"in the data loader's transform {escape_text(line.transform, 60)}"
    return _STAGES.get(line.stage, "")


def format_line_share(line: CodeLine | WorkLine) -> str:
    """Format a line's share with its sampling error: "71 % ± 4"."""
    if not math.isfinite(line.share_ratio):
        return "an unknown share"
    share, error = 100 * line.share_ratio, 100 * line.error_ratio
    if not math.isfinite(error):
        return f"{share:.0f} %"
    digits = 0 if error >= 0.5 else 1
    return f"{share:.{digits}f} % ± {error:.{digits}f}"


def list_line_rows(
    finding: Finding, names: FileNames, max_rows: int | None = None
) -> list[tuple[str, ...]]:
    """List a finding's lines as rows of `LINE_HEADS`, largest first; `max_rows`: None = all."""
    return [
        (
            format_file_line(line.place, names),
            format_line_share(line),
            format_quantity(line.lost_ns, "ns"),
            _append_stage(format_function(line.place), describe_stage(line)),
            format_called_line(line, names),
        )
        for line in finding.lines[:max_rows]
    ]


def _append_stage(function: str, stage: str) -> str:
    return f"{function}, {stage}" if stage else function


def describe_lines_rest(finding: Finding, shown: int) -> str:
    """Describe what rows of a finding's lines leave out, and what they compare; "" = nothing."""
    hidden_count = len(finding.lines) - shown
    parts = (
        ["in these lines it spends more time than the other ranks"]
        if finding.lines_compared
        else []
    )
    parts += (
        [f"{hidden_count:,} more {'line' if hidden_count == 1 else 'lines'}: see --json"]
        if hidden_count > 0
        else []
    )
    return "; ".join(parts)


# --- lost time by line --------------------------------------------------------------------------


def sum_lines(code: CodeProfile | None) -> LineTotals:
    """Sum lost time by line of the user's own code, over all causes and ranks."""
    if code is None:
        return LineTotals()
    causes: dict[CodeLocation, dict[str, int]] = {}
    samples: dict[CodeLocation, int] = {}
    unknown_ns = 0
    for stack in code.stacks:
        location = find_own_place(code, stack)
        if location is None:
            unknown_ns += stack.lost_ns
            continue
        by_cause = causes.setdefault(location, {})
        by_cause[stack.cause] = by_cause.get(stack.cause, 0) + stack.lost_ns
        samples[location] = samples.get(location, 0) + stack.samples
    lines = [
        LineTime(location, max(sorted(ns), key=ns.__getitem__), sum(ns.values()), samples[location])
        for location, ns in causes.items()
    ]
    lines.sort(key=lambda line: (-line.lost_ns, line.place.file, line.place.line))
    return LineTotals(tuple(lines), sum(stack.lost_ns for stack in code.stacks), unknown_ns)


def find_own_place(code: CodeProfile, stack: StackTime) -> CodeLocation | None:
    """Find the innermost line outside libraries, else the outermost line; None without lines."""
    if stack.user_place >= 0:
        return code.places[stack.user_place]
    for index in reversed(stack.places):
        if not code.is_library[index]:
            return code.places[index]
    return code.places[stack.places[0]] if stack.places else None


def list_total_rows(
    totals: LineTotals, names: FileNames, max_rows: int
) -> list[tuple[str, str, str, str, str]]:
    """List lost time by line as rows (line, lost, share, function, main cause)."""
    return [
        (
            format_file_line(line.place, names),
            format_quantity(line.lost_ns, "ns"),
            format_share(line.lost_ns, totals.total_ns),
            format_function(line.place),
            escape_text(line.cause, 60),
        )
        for line in totals.lines[:max_rows]
    ]


def describe_totals_rest(totals: LineTotals, shown: int) -> str:
    """Describe the lines that the rows leave out, and lost time without a line; "" = nothing."""
    hidden = totals.lines[shown:]
    parts = []
    if hidden:
        noun = "line" if len(hidden) == 1 else "lines"
        lost = format_quantity(sum(line.lost_ns for line in hidden), "ns")
        parts.append(f"{len(hidden):,} more {noun} with {lost}")
    if totals.unknown_ns:
        part = format_share(totals.unknown_ns, totals.total_ns)
        parts.append(f"{format_quantity(totals.unknown_ns, 'ns')} ({part}) without a known stack")
    return f"and {', '.join(parts)}" if parts else ""


def explain_missing_lines(report: Report) -> str:
    """Explain why no line of code is known; "" where there are some."""
    code = report.code
    if code is None:
        return "no Python stacks were recorded"
    if any(stack.places for stack in code.stacks):
        return ""
    return escape_text(code.why_missing or "no stack was sampled while device time was lost", 300)


def list_code_notes(report: Report) -> Sequence[str]:
    """List what was not sampled."""
    return [escape_text(note, 400) for note in report.code.notes] if report.code else []
