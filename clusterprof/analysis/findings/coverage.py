"""List coverage gaps: lost records, failed sources, causes that could not be checked.

It also describes the errors that drivers reported about devices during the recording, and which
rank failed first.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from clusterprof.analysis.attribution.ledger import RankResult
from clusterprof.analysis.attribution.rank.claims import MISSING_TRACE_DATA
from clusterprof.analysis.cross_rank.hang_evidence import (
    describe_last_line,
    format_operation,
    format_signal,
    list_endings,
)
from clusterprof.analysis.cross_rank.implicit_collectives import UNVERIFIED_BUSY
from clusterprof.analysis.detectors.registry import DETECTORS
from clusterprof.analysis.job.ranks import format_ranges
from clusterprof.analysis.node.analyze import NodeResult
from clusterprof.analysis.node.observations import FailedExit
from clusterprof.errors import DEVICES_RELEASED
from clusterprof.probe import layout
from clusterprof.report.model import CoverageGap
from clusterprof.signals.host import is_absence_normal
from clusterprof.trace.reader import SkippedInput
from clusterprof.trace.schema import Event, Gap
from clusterprof.units import format_quantity
from clusterprof.util.ranges import format_host_list

_OPERATIONS = "operations between ranks"
_REPORT_BUG = "if it happens often, please report it with `clusterprof dump`"
_UNMATCHED_TEXTS = {
    "group-unknown": ("name no group of ranks", "use process groups of torch.distributed"),
    "peer-unknown": ("do not name their peer rank", "name the peer in send and recv"),
    "issue-not-seen": ("end an operation whose start was not recorded", ""),
    "wait-not-seen": ("begin an operation whose wait was not recorded", ""),
    "backwards": ("end before they begin", _REPORT_BUG),
    "seen-twice": ("repeat a rank in an operation", _REPORT_BUG),
    "another-operation": (
        "differ in kind from the operation of other ranks with that number",
        "check that all ranks call the same operations in the same order",
    ),
    "number-unknown": ("have no sequence number", _REPORT_BUG),
    "too-late": (
        "arrived after those of the other ranks had been discarded",
        "record all nodes of the job in one go",
    ),
    "restart-unclear": (
        "lie around a restart of only some ranks of the group",
        "restart all ranks of a job together",
    ),
    "sequence-skew": (
        "have sequence numbers that disagree with those of other ranks",
        "record from the start of the job on",
    ),
}


def list_coverage_gaps(
    nodes: Sequence[NodeResult],
    ranks: Sequence[RankResult],
    unmatched: Mapping[str, int],
    left_out: Sequence[SkippedInput],
) -> tuple[CoverageGap, ...]:
    """List the coverage gaps of a recording, lost data first."""
    gaps: dict[tuple[str, str], CoverageGap] = {}
    nodes_by_gap: dict[tuple[str, str], list[str]] = {}
    nodes_by_collector = _collect_lacking_nodes(nodes)
    all_nodes = {node.facts.name for node in nodes}
    for node in nodes:
        for blind in _report_lost_records(node):
            gaps[(blind.what, blind.message)] = blind
        for gap in _list_gaps(node):
            if _is_elsewhere(node, gap) and (
                gap.collector.startswith("gpu_") or nodes_by_collector[gap.collector] == all_nodes
            ):
                continue  # but what only some nodes lack is reported, accelerators aside
            subject = gap.signal or gap.collector
            source = gap.signal.partition(".")[0] or gap.collector.partition(":")[0]
            coverage_gap = CoverageGap(subject, gap.kind, gap.message, gap.remedy, source=source)
            gaps.setdefault((subject, gap.message), coverage_gap)
            nodes_by_gap.setdefault((subject, gap.message), []).append(node.facts.name)
    for key, names in nodes_by_gap.items():
        if set(names) < all_nodes:  # not on all of them
            coverage_gap = gaps[key]
            gaps[key] = replace(
                coverage_gap,
                message=f"{coverage_gap.message.rstrip('.')} (on {format_host_list(names)})",
            )
    lost = [
        CoverageGap(str(folder.path), "lost", f"left out: {folder.why}", folder.remedy)
        for folder in left_out
        if not folder.is_copy
    ]
    coverage_gaps = sorted(gaps.values(), key=lambda b: (b.kind != "lost", b.what, b.message))
    coverage_gaps += _report_unverified_busy_time(ranks)
    return (*lost, *coverage_gaps, *_report_unmatched(unmatched), *_report_unchecked_causes(ranks))


def _list_gaps(node: NodeResult) -> Iterator[Gap]:
    """Yield the gaps of a node; those of released devices state when each release was."""
    periods = _find_release_periods(node.loaded.events)
    for gap in node.loaded.gaps:
        if not (gap.message == DEVICES_RELEASED.message and gap.collector in periods):
            yield gap
    start_ns = int(node.loaded.header.started.get("monotonic_ns", 0))
    for collector, times in periods.items():
        texts = [_format_period(since_ns, until_ns, start_ns) for since_ns, until_ns in times]
        if len(texts) > _MAX_PERIODS:
            texts[_MAX_PERIODS:] = [f"and {len(texts) - _MAX_PERIODS} more times"]
        since_ns, until_ns = times[-1]
        remedy = DEVICES_RELEASED.remedy if until_ns is None else ""
        message = f"{DEVICES_RELEASED.message} {', '.join(texts)}"
        yield Gap(since_ns, collector, "", "", DEVICES_RELEASED.kind, message, remedy)


_MAX_PERIODS = 4  # listed of a collector


def _find_release_periods(events: Sequence[Event]) -> dict[str, list[tuple[int, int | None]]]:
    """Find by collector when its devices were released: (since, until) in ns.

    None = they were to the end of the recording.
    """
    periods: dict[str, list[tuple[int, int | None]]] = {}
    for event in events:
        if event.kind not in ("devices-released", "devices-resumed"):
            continue
        collectors = event.attributes.get("collectors")
        for collector in collectors if isinstance(collectors, list | tuple) else ():
            if event.kind == "devices-released":
                periods.setdefault(str(collector), []).append((event.t_ns, None))
            elif str(collector) in periods:
                since_ns, _ = periods[str(collector)][-1]
                periods[str(collector)][-1] = since_ns, event.t_ns
    return periods


def _format_period(since_ns: int, until_ns: int | None, start_ns: int) -> str:
    """Format a period as seconds since the start of the recording. All in ns."""
    until = "the end" if until_ns is None else f"{(until_ns - start_ns) / 1e9:,.1f} s"
    return f"from {(since_ns - start_ns) / 1e9:,.1f} s to {until}"


_MIN_UNVERIFIED_RATIO = 0.01  # of the time in steps


def _report_unverified_busy_time(ranks: Sequence[RankResult]) -> list[CoverageGap]:
    """Report busy time that may contain waiting in collectives."""
    in_step_ns = sum(rank.ledger.in_step_ns for rank in ranks)
    busy_ns = sum(rank.accumulator.totals.get(UNVERIFIED_BUSY, 0) for rank in ranks)
    if busy_ns <= _MIN_UNVERIFIED_RATIO * in_step_ns:
        return []
    part = format_quantity(busy_ns / in_step_ns, "ratio")
    message = (
        f"for {part} of the time in steps it is unknown whether busy devices computed or waited in"
        " a collective (no stream events, no SM activity): lost time is a lower bound"
    )
    remedy = "record with `sampling.gpm: true` (Hopper and later), or with the probe's CUDA hooks"
    return [CoverageGap("waits in collectives", "absent", message, remedy)]


def _collect_lacking_nodes(nodes: Sequence[NodeResult]) -> dict[str, set[str]]:
    """Return by collector the nodes that have no device of its kind."""
    nodes_by_collector: dict[str, set[str]] = {}
    for node in nodes:
        for gap in node.loaded.gaps:
            if _is_elsewhere(node, gap):
                nodes_by_collector.setdefault(gap.collector, set()).add(node.facts.name)
    return nodes_by_collector


def _is_elsewhere(node: NodeResult, gap: Gap) -> bool:
    """Return whether a node simply lacks the device, such as a GPU of another vendor."""
    real = any(not device.get("emulated") for device in node.loaded.header.devices)
    return not gap.signal and is_absence_normal(gap.collector, gap.kind, gap.remedy, real)


def _report_unmatched(counts: Mapping[str, int]) -> list[CoverageGap]:
    """Report spans of operations that could not be matched with those of other ranks."""
    gaps = []
    for reason, spans in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if spans:
            why, remedy = _UNMATCHED_TEXTS.get(reason, (f"do not fit ({reason})", ""))
            message = f"{spans:,} of their spans {why}; waits in them have no cause"
            gaps.append(CoverageGap(_OPERATIONS, "failed", message, remedy))
    return gaps


def _report_lost_records(node: NodeResult) -> list[CoverageGap]:
    """Report records that cannot be read, and spans that were dropped before recording."""
    damage, name = node.loaded.damage, node.facts.name
    source = f"recording of {name}"
    gaps = []
    if damage.damaged_places:
        message = f"{damage.damaged_bytes:,} bytes in {damage.damaged_places} places are damaged"
        gaps.append(CoverageGap(source, "lost", message, "check the file system it was kept on"))
    if damage.altered_segments:
        noun = "file is" if damage.altered_segments == 1 else "files are"
        message = (
            f"{damage.altered_segments:,} {noun} not as the recorder closed them"
            f" (SHA256SUMS); the first: {damage.altered_example}"
        )
        gaps.append(CoverageGap(source, "lost", message, "analyze the original recording"))
    if damage.torn_tail_bytes:
        message = f"the last {damage.torn_tail_bytes:,} bytes belong to a truncated frame"
        gaps.append(CoverageGap(source, "lost", message, ""))
    if damage.unknown_frames:
        message = f"{damage.unknown_frames:,} frames are not understood"
        gaps.append(CoverageGap(source, "lost", message, "analyze with a newer clusterprof"))
    implausible = [
        f"{count:,} {noun}"
        for count, noun in (
            (damage.implausible_records, "records"),
            (damage.implausible_attributes, "attributes of records"),
        )
        if count
    ]
    if implausible:
        message = (
            f"{' and '.join(implausible)} say what no recorder writes, and are left"
            f" out; the first: {damage.implausible_example}"
        )
        remedy = "the recording was changed after it was written: analyze the original"
        gaps.append(CoverageGap(source, "lost", message, remedy))
    if node.loaded.dropped_spans:
        message = f"{node.loaded.dropped_spans:,} spans were dropped before they could be stored"
        gaps.append(CoverageGap("spans", "lost", message, "give the recorder more CPU time"))
    return gaps


_RECORD_INSTEAD = "record the same job with clusterprof record"


def _report_unchecked_causes(ranks: Sequence[RankResult]) -> list[CoverageGap]:
    """Report causes that could not be checked on any rank."""
    evaluated, missing = (
        {key for rank in ranks for key in getattr(rank.accumulator, name)}
        for name in ("evaluated", "missing")
    )
    gaps = []
    unmarked = [rank for rank in ranks if not rank.marked]
    if unmarked:
        message = f"{len(unmarked)} of {len(ranks)} training processes marked no steps"
        remedy = (
            "call clusterprof.step() at the end of each step; if that changes nothing, clusterprof"
            " doctor says whether the probe can be loaded"
        )
        if all(rank.job_position.attached for rank in unmarked):
            message = f"{message}: the recorder attached to them while they ran"
            remedy = "start the job with `clusterprof record` to see steps and causes"
        gaps.append(CoverageGap("causes below family level", "absent", message, remedy))
    for detector in DETECTORS:
        id_ = detector.cause.id
        needs = sorted(need for cause, need in missing if cause == id_)
        if id_ not in evaluated and needs:
            missing_needs = ", ".join(need for need in needs if need) or "a measure of it"
            if needs == [MISSING_TRACE_DATA]:  # of an imported trace: many causes, one reason
                message = f"cannot be determined: the trace has no {MISSING_TRACE_DATA}"
                gaps.append(CoverageGap(id_, "absent", message, _RECORD_INSTEAD))
                continue
            message = f"cannot tell {id_}: the recording has no {missing_needs}"
            gaps.append(CoverageGap(id_, "absent", message, f"clusterprof explain {id_}"))
    return gaps


_ERROR_NAMES = {"gpu-xid": "Xid", "nvswitch-sxid": "SXid"}
_MAX_ERROR_NOTES = 8
_PCI_ADDRESS = re.compile(r"^(?:([0-9a-f]+):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.[0-9a-f]+)?$")


def describe_driver_errors(nodes: Sequence[NodeResult]) -> tuple[str, ...]:
    """Describe every kind of error of every device in a note, in order of first occurrence."""
    notes = []
    for node in nodes:
        start_ns = int(node.loaded.header.started.get("monotonic_ns", 0))
        notes += _describe_node_errors(
            node.facts.name, node.loaded.events, node.loaded.header.devices, start_ns
        )
    hidden_count = len(notes) - _MAX_ERROR_NOTES
    if hidden_count > 0:
        notes[_MAX_ERROR_NOTES:] = [f"{hidden_count} more kinds of driver errors were recorded"]
    return tuple(notes)


def _describe_node_errors(
    name: str, events: Sequence[Event], devices: Sequence[Mapping[str, Any]], start_ns: int
) -> list[str]:
    first: dict[tuple[Any, ...], Event] = {}
    times: dict[tuple[Any, ...], int] = {}
    for event in events:
        attributes = event.attributes
        key: tuple[Any, ...]
        if event.kind in _ERROR_NAMES:
            key = (
                event.kind,
                attributes.get("pci"),
                attributes.get("code"),
                attributes.get("gpu_instance"),
            )
        elif event.kind == "device-lost":
            key = (event.kind, attributes.get("device"), attributes.get("message"))
        else:
            continue
        first.setdefault(key, event)
        count = attributes.get("count", 1)
        times[key] = times.get(key, 0) + (count if isinstance(count, int) else 1)
    return [
        _describe_error(name, event, times[key], devices, (event.t_ns - start_ns) / 1e9)
        for key, event in first.items()
    ]


def _describe_error(
    name: str, event: Event, times: int, devices: Sequence[Mapping[str, Any]], seconds: float
) -> str:
    attributes = event.attributes
    when = f"after {max(0.0, seconds):.0f} s" + (f", {times} times" if times > 1 else "")
    if event.kind == "device-lost":
        return f"{attributes.get('device')} on {name} was lost {when}: {attributes.get('message')}"
    device = f"NVSwitch {attributes.get('pci')}"
    if event.kind == "gpu-xid":
        device = _format_gpu(str(attributes.get("pci")), devices)
        if "gpu_instance" in attributes:
            device += f", GPU instance {attributes['gpu_instance']}"
    text = str(attributes.get("text") or "").strip()
    error = f"{_ERROR_NAMES[event.kind]} {attributes.get('code')} of {device} on {name} {when}"
    return f"the NVIDIA driver reported {error}" + (f": {text}" if text else "")


def _format_gpu(pci: str, devices: Sequence[Mapping[str, Any]]) -> str:
    """Format the GPU at a PCI address, with its index and id where the header has them."""
    address = _parse_pci_address(pci)
    for device in devices:
        if (
            "parent" not in device
            and address
            and _parse_pci_address(str(device.get("pci_bus_id"))) == address
        ):
            return f"GPU {device.get('index')} ({device.get('id')}, {pci})"
    return f"the GPU at {pci}"


def _parse_pci_address(pci: str) -> tuple[int, int, int] | None:
    """Parse domain, bus and device of a PCI address, however many digits it has."""
    parts = _PCI_ADDRESS.match(pci.lower())
    if parts is None:
        return None
    return (int(parts[1] or "0", 16), int(parts[2], 16), int(parts[3], 16))


_LAUNCHER_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""How launchers and users end ranks that did not fail."""


def describe_failed_ranks(nodes: Sequence[NodeResult]) -> tuple[str, ...]:
    """Describe the first rank of each node that failed and was not started again.

    When one fails, its launcher ends the others with SIGTERM. A node has a clock of its own here,
    so ranks of several nodes are not put in order.
    """
    texts = []
    for node in nodes:
        ranks = {(rank.ledger.pid, rank.started_ticks): rank for rank in node.ranks}
        failed = [
            (item, ranks[item.pid, item.started_ticks])
            for item in sorted(node.failed_exits, key=lambda item: item.t_ns)
            if (item.pid, item.started_ticks) in ranks and item.signal not in _LAUNCHER_SIGNALS
        ]
        final = [pair for pair in failed if not _has_successor(*pair, node.ranks)]
        if final:
            text = _describe_exit(*final[0], node.facts.name, len(final) - 1)
            texts.append(text + _describe_last_act(node, *final[0], nodes))
    return (f"the job failed: {'; '.join(texts)}",) if texts else ()


def _describe_last_act(
    node: NodeResult, item: FailedExit, rank: RankResult, nodes: Sequence[NodeResult]
) -> str:
    """Describe the line in which a rank failed, and the operation the others were in then."""
    text = ""
    number = rank.job_position.rank
    by_operation: dict[tuple[int, int, int], list[int]] = {}
    for other_node, ending in list_endings(nodes, rank.job):
        if other_node is node and ending.pid == item.pid:
            line = describe_last_line(node, ending)
            text = f", {line}" if line else ""
        began = ending.under_way
        if began is not None and ending.job_position.rank is not None:
            key = began.group, began.number, began.operation & layout.OPERATION_MASK
            by_operation.setdefault(key, []).append(ending.job_position.rank)
    if by_operation:
        key, ranks = max(by_operation.items(), key=lambda pair: len(pair[1]))
        peers = [peer for peer in ranks if peer != number]
        if peers:
            names, verb = ("ranks", "were") if len(peers) > 1 else ("rank", "was")
            where = format_operation(key[2], key[1])
            had = " too" if number in ranks else ", where it had not arrived"
            text += f"; {names} {format_ranges(peers)} {verb} in {where}{had}"
    return text


def _has_successor(item: FailedExit, rank: RankResult, ranks: Iterable[RankResult]) -> bool:
    """Return whether a process with the same rank began after this one had ended."""
    return any(
        successor.job_position.rank == rank.job_position.rank and successor.first_ns >= item.t_ns
        for successor in ranks
    )


def _describe_exit(item: FailedExit, rank: RankResult, node: str, other_count: int) -> str:
    process_name = (
        f"process {item.pid}"
        if rank.job_position.rank is None
        else f"rank {rank.job_position.rank}"
    )
    if item.signal:
        how = f"was killed by {format_signal(item.signal)}"
    else:
        how = f"ended with exit status {item.status}"
    later_exits = "" if not other_count else f", and {other_count} more after it"
    return f"{process_name} on {node} {how}{later_exits}"
