"""Name the line in which a rank stands still, and what its data loader's workers do.

rank 1    train.py:60 in main, in the loader        its thread waits for a batch
worker    data.py:31 in read_image                  the line that matters

It also reads what the recorder collected while ranks stood still: the answer of NCCL's RAS service.

    {"communicators": [{"hash": "0x5f", "size": 8,
        "ranks": [{"rank": 0, "collective_counts": {"AllReduce": 812, …}, …}, …],
        "missing_ranks": [{"rank": 3, "host": "10.0.0.3", "pid": 4711,
                           "status": {"unresponsive": true, "considered_dead": false}}]}]}

Ranks are those of the communicator. Before 2.28.9 the answer is text, of which the section `Errors`
is shown. An answer comes from a process of the job and is not trusted.

Source: NVIDIA/nccl, src/ras/client_support.cc.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from clusterprof.analysis.job.ranks import format_ranges
from clusterprof.analysis.node.analyze import NodeResult
from clusterprof.analysis.node.last_code_position import LastCodePosition
from clusterprof.analysis.node.observations import RankEnding
from clusterprof.analysis.timeline.code_locations import LocatedStack, is_library_file, locate_stack
from clusterprof.analysis.timeline.collectives.operations import OPERATION_NAMES
from clusterprof.probe import layout
from clusterprof.report.code import CodeLine, CodeLocation
from clusterprof.units import SECOND_NS

_OPERATION_NAMES = {
    **OPERATION_NAMES,
    layout.GRADIENTS: "the reduction of gradients",
    layout.OTHER_OPERATION: "an operation",
}
_MIN_WORKER_NS = 5 * SECOND_NS
"""A worker that marked a batch later than this before the end was at work."""
_MAX_FUNCTION_CHARACTERS = 60


def locate_last_line(node: NodeResult, line: LastCodePosition | None) -> LocatedStack | None:
    """Locate the line in which a process was last; None if no stack is known."""
    table = node.loaded.stacks
    if line is None or not 0 < line.stack < table.parent.size:
        return None
    return locate_stack([table.locations[index] for index in table.list_locations(line.stack)])


def find_stuck_worker(
    node: NodeResult, ending: RankEnding
) -> tuple[LastCodePosition, LocatedStack] | None:
    """Find the worker of a rank that has been in user code for longest; None if no worker is.

    A worker without work waits in the code of the data loader alone.
    """
    stuck = []
    for worker in ending.workers:
        located = locate_last_line(node, worker)
        if located is None or is_library_file(located.user_line.file):
            continue
        if worker.last_sample_ns - worker.last_span_ns >= _MIN_WORKER_NS:
            stuck.append((worker, located))
    return min(stuck, key=lambda pair: (pair[0].last_span_ns, pair[0].pid), default=None)


def describe_last_line(node: NodeResult, ending: RankEnding) -> str:
    """Describe where a rank was last, for the end of a sentence; "" if no stack is known."""
    line = ending.last_line
    located = locate_last_line(node, line)
    worker = find_stuck_worker(node, ending)
    text = ""
    if line is not None and located is not None:
        text = f"{'' if line.samples else 'last seen '}at {format_code_position(located.user_line)}"
        if located.library is not None and not worker:
            text += f" -> {format_code_position(located.library)}"
    if worker is not None:
        text += "; " if text else ""
        text += f"its data worker {worker[0].pid} is at {format_code_position(worker[1].user_line)}"
    return text


def build_hang_line(node: NodeResult, ending: RankEnding, lost_ns: int) -> CodeLine | None:
    """Build the line of a finding that says where a root hangs; None if its stack is not known.

    lost_ns: time lost by all ranks meanwhile. A stuck worker's line comes before the rank's own.
    """
    worker = find_stuck_worker(node, ending)
    line = ending.last_line if worker is None else worker[0]
    located = locate_last_line(node, line)
    if line is None or located is None or not line.samples:
        return None
    return CodeLine(
        located.user_line,
        located.library,
        lost_ns,
        1.0,
        0.0,
        line.samples,
        located.stage,
        located.transform,
    )


def format_code_position(code_location: CodeLocation) -> str:
    """Format a code location: `train.py:31 in load_batch`."""
    name = os.path.basename(code_location.file) or "unknown file"
    where = f"{name}:{code_location.line}" if code_location.line else name
    return f"{where} in {code_location.function[:_MAX_FUNCTION_CHARACTERS] or 'unknown function'}"


def format_operation(code: int, number: int) -> str:
    """Format an operation and its number in the group: `all_reduce 812`; -1 = not numbered."""
    name = _OPERATION_NAMES.get(code & layout.OPERATION_MASK, "an operation")
    return name if number < 0 else f"{name} {number}"


def format_signal(number: int) -> str:
    """Format the name of a signal: `SIGKILL`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def list_endings(nodes: Sequence[NodeResult], job: int) -> list[tuple[NodeResult, RankEnding]]:
    """List how the ranks of a job ended, of all nodes."""
    out = []
    for node in nodes:
        jobs = {(rank.ledger.pid, rank.started_ticks): rank.job for rank in node.ranks}
        out += [
            (node, ending)
            for ending in node.endings
            if jobs.get((ending.pid, ending.started_ticks)) == job
        ]
    return out


PROGRESS_STOPPED, PROGRESS_RESUMED = "progress-stopped", "progress-resumed"
AUTOPSY_FINISHED = "autopsy-finished"
MAX_REPLY_CHARACTERS = 1 << 20
_MAX_NOTES = 4
_MAX_COMMUNICATORS = 1000
_MAX_NAMED = 3
_MAX_LINES = 6
_READ_ERRORS = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)


def describe_ras(nodes: Sequence[NodeResult]) -> list[str]:
    """Describe what RAS knew of missing and late ranks at the last standstill of each node."""
    notes: dict[str, str] = {}
    for node in nodes:
        reply = find_last_reply(node)
        for text in describe_reply(reply) if reply else ():
            notes.setdefault(text, node.facts.name)
    return [f"NCCL RAS on {name}: {text}" for text, name in notes.items()][:_MAX_NOTES]


def find_last_reply(node: NodeResult) -> str:
    """Find the answer at the last standstill; "" if ranks went on after it, or there is none."""
    reply = ""
    for event in node.loaded.events:
        if event.kind == AUTOPSY_FINISHED:
            reply = str(event.attributes.get("ras_reply") or "")[:MAX_REPLY_CHARACTERS]
        elif event.kind == PROGRESS_RESUMED:
            reply = ""
    return reply


def describe_reply(reply: str) -> list[str]:
    """Describe what an answer says about ranks that are missing or late."""
    begin = reply.find("{")
    if begin >= 0:
        try:
            document = json.loads(reply[begin:])
            return list(_describe_communicators(document["communicators"]))
        except _READ_ERRORS:
            return ["its answer could not be read"]
    lines = [line.strip() for line in reply.splitlines()]
    if "Errors" not in lines:
        return ["its answer could not be read"]
    errors = lines[lines.index("Errors") + 2 :]
    shown = [line for line in errors[: _find_index(errors, "Warnings")] if line][:_MAX_LINES]
    return [" ".join(shown)[:300]] if shown else []


def _find_index(lines: Sequence[str], text: str) -> int:
    return lines.index(text) if text in lines else len(lines)


def _describe_communicators(communicators: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence per communicator in which ranks are missing or differ, largest first."""
    for communicator in sorted(
        communicators[:_MAX_COMMUNICATORS], key=lambda item: -int(item["size"])
    ):
        parts = [*_describe_missing(communicator), *_describe_counts(communicator)]
        if parts:
            name = f"communicator {str(communicator['hash'])[:20]} of {int(communicator['size'])}"
            yield f"{name} ranks: {'; '.join(parts)}"


def _describe_missing(communicator: Mapping[str, Any]) -> Iterator[str]:
    missing = communicator.get("missing_ranks") or ()
    for rank in missing[:_MAX_NAMED]:
        status = rank.get("status") or {}
        how = "is considered dead" if status.get("considered_dead") else "does not answer"
        yield f"rank {int(rank['rank'])} (process {int(rank['pid'])} on {rank['host']!s:.40}) {how}"
    if len(missing) > _MAX_NAMED:
        yield f"and {len(missing) - _MAX_NAMED} more"


def _describe_counts(communicator: Mapping[str, Any]) -> Iterator[str]:
    """Yield the ranks that began fewer operations of a kind than most."""
    counts: dict[str, dict[int, int]] = {}
    for rank in communicator["ranks"]:
        for operation, count in rank["collective_counts"].items():
            counts.setdefault(str(operation)[:40], {})[int(rank["rank"])] = int(count)
    for operation, by_rank in counts.items():
        largest = max(by_rank.values())
        late: dict[int, list[int]] = {}
        for rank, count in by_rank.items():
            if count < largest:
                late.setdefault(count, []).append(rank)
        if not late:
            continue
        count, ranks = min(late.items())
        plural = "s" if len(ranks) > 1 else ""
        yield (f"rank{plural} {format_ranges(ranks)} began {count} {operation}, others {largest}")
