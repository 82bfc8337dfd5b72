"""Export the stacks in which device time was lost, for speedscope and for flame graph scripts.

The outermost frame of each stack is the cause; the weight is lost device time in ns.

    storage-local;rank 3;main (train.py:90);augment (train.py:42) 5000000000

Source: https://www.speedscope.app/file-format-schema.json, and Brendan Gregg's FlameGraph for
collapsed stacks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, BinaryIO, ClassVar

from clusterprof import __version__
from clusterprof.errors import NoRecording
from clusterprof.output.exporters.base import Output, Run
from clusterprof.output.renderers.text import code, wording
from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.report.code import CodeLocation, CodeProfile, StackTime
from clusterprof.report.model import Report

_SPEEDSCOPE_SCHEMA = "https://www.speedscope.app/file-format-schema.json"
_FILE_NAME = "stacks"  # of the file in an output folder
_MAX_PATH_CHARACTERS = 400
_SEPARATORS = str.maketrans({";": ","})  # a semicolon separates frames


class Speedscope:
    """Stacks of lost time as profiles for speedscope.app: all ranks, and each rank."""

    name: ClassVar[str] = "speedscope"
    suffix: ClassVar[str] = ".speedscope.json"

    def check(self, output: Output) -> None:
        """Accept every output: the format is text."""

    def export(self, run: Run, output: Output) -> Sequence[str]:
        """Write one document.

        Raises: NoRecording when there are no stacks.
        """
        document = build_speedscope_document(run.report, _require_code(run.report))
        text = json.dumps(document, allow_nan=False, separators=(",", ":"))
        with _open_output(output, self.suffix) as file:
            file.write(text.encode("ascii") + b"\n")
        return ()


class Collapsed:
    """Stacks of lost time as lines, for flamegraph.pl and what reads its input."""

    name: ClassVar[str] = "collapsed"
    suffix: ClassVar[str] = ".collapsed.txt"

    def check(self, output: Output) -> None:
        """Accept every output: the format is text."""

    def export(self, run: Run, output: Output) -> Sequence[str]:
        """Write one line per stack.

        Raises: NoRecording when there are no stacks.
        """
        lines = list_collapsed_lines(run.report, _require_code(run.report))
        with _open_output(output, self.suffix) as file:
            file.writelines(f"{line}\n".encode() for line in lines)
        return ()


def _open_output(output: Output, suffix: str) -> AbstractContextManager[BinaryIO]:
    return output.open_part(_FILE_NAME, suffix) if output.is_folder else output.open_whole()


def _require_code(report: Report) -> CodeProfile:
    why = code.explain_missing_lines(report)
    if report.code is None or why:
        remedy = "clusterprof record --stacks on"
        raise NoRecording(f"there are no stacks to export: {why}", remedy)
    return report.code


def list_collapsed_lines(report: Report, profile: CodeProfile) -> list[str]:
    """List stacks as "cause;outer;...;inner ns", sorted; the rank follows the cause if several."""
    names = code.build_file_names(report)
    frames = [
        _clean_frame(f"{code.format_function(location)} ({code.format_file_line(location, names)})")
        for location in profile.places
    ]
    sums: dict[str, int] = {}
    for stack in profile.stacks:
        rank = [_clean_frame(_format_rank(report, stack.rank))] if len(report.ranks) > 1 else []
        inner = [frames[place] for place in stack.places] or [code.UNKNOWN_STACK]
        key = ";".join([_clean_frame(escape_text(stack.cause, 60)), *rank, *inner])
        sums[key] = sums.get(key, 0) + stack.lost_ns
    return [f"{key} {ns}" for key, ns in sorted(sums.items()) if ns]


def _clean_frame(text: str) -> str:
    return text.translate(_SEPARATORS)


def build_speedscope_document(report: Report, profile: CodeProfile) -> dict[str, Any]:
    """Build a file of speedscope: sampled profiles whose weights are lost ns."""
    causes = _order_causes(profile.stacks)
    unknown = len(profile.places)
    frames = [_build_frame(location) for location in profile.places]
    frames += [{"name": code.UNKNOWN_STACK}, *({"name": escape_text(name, 60)} for name in causes)]
    frame_of = {cause: unknown + 1 + number for number, cause in enumerate(causes)}
    ranks = sorted({stack.rank for stack in profile.stacks})
    groups = [("all ranks", list(profile.stacks))] if len(ranks) > 1 else []
    for rank in ranks:
        stacks = [stack for stack in profile.stacks if stack.rank == rank]
        groups.append((_format_rank_and_node(report, rank), stacks))
    return {
        "$schema": _SPEEDSCOPE_SCHEMA,
        "name": escape_text(report.title),
        "exporter": f"clusterprof@{__version__}",
        "activeProfileIndex": 0,
        "shared": {"frames": frames},
        "profiles": [
            _build_sampled_profile(name, stacks, frame_of, unknown) for name, stacks in groups
        ],
    }


def _build_frame(location: CodeLocation) -> dict[str, Any]:
    frame: dict[str, Any] = {"name": code.format_function(location)}
    if location.file:
        frame["file"] = escape_text(location.file, _MAX_PATH_CHARACTERS)
    if location.line > 0:
        frame["line"] = location.line
    return frame


def _build_sampled_profile(
    name: str, stacks: Iterable[StackTime], frame_of: dict[str, int], unknown: int
) -> dict[str, Any]:
    """Build a profile, its stacks in an order in which equal outer frames are adjacent."""
    sums: dict[tuple[int, ...], int] = {}
    for stack in stacks:
        key = (frame_of[stack.cause], *(stack.places or (unknown,)))
        sums[key] = sums.get(key, 0) + stack.lost_ns
    samples = sorted(key for key, ns in sums.items() if ns)
    return {
        "type": "sampled",
        "name": name,
        "unit": "nanoseconds",
        "startValue": 0,
        "endValue": sum(sums.values()),
        "samples": samples,
        "weights": [sums[key] for key in samples],
    }


def _order_causes(stacks: Iterable[StackTime]) -> list[str]:
    """Order the causes by their lost time, largest first."""
    sums: dict[str, int] = {}
    for stack in stacks:
        sums[stack.cause] = sums.get(stack.cause, 0) + stack.lost_ns
    return sorted(sums, key=lambda cause: (-sums[cause], cause))


def _format_rank(report: Report, index: int) -> str:
    if not 0 <= index < len(report.ranks):
        return "unknown rank"
    return wording.format_rank_name(report.ranks[index])


def _format_rank_and_node(report: Report, index: int) -> str:
    if not 0 <= index < len(report.ranks):
        return "unknown rank"
    return f"{_format_rank(report, index)} · {escape_text(report.ranks[index].node, 60)}"
