"""Export a Perfetto trace (ui.perfetto.dev, trace_processor): spans, counters, lost time,
waits.

A trace is a sequence of packets, and so are two concatenated traces: each node can be a
file of its own, and `cat` makes one trace of them, including arrows between nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from clusterprof.errors import UsageError
from clusterprof.output.exporters.base import Output, Run, RunNode
from clusterprof.output.exporters.perfetto import counters as perfetto_counters
from clusterprof.output.exporters.perfetto.counters import CounterWriter
from clusterprof.output.exporters.perfetto.packets import Packets, encode_event, encode_varint
from clusterprof.output.exporters.perfetto.spans import ProcessTracks, SpanWriter
from clusterprof.output.exporters.processes import ProcessDirectory
from clusterprof.output.exporters.tables import GapReasons, format_reason
from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.trace.reader import NodeReader
from clusterprof.trace.schema import Clock, Columns, Event, Gap, Record, Spans

NO_HISTORY_REMARK = "the trace has no lost time and no arrows: the analysis has no history"
_HIDDEN_EVENTS = frozenset({"process-registered", "group-announced"})


class Perfetto:
    """Exports a trace in Perfetto's own format, one packet sequence per node."""

    name: ClassVar[str] = "perfetto"
    suffix: ClassVar[str] = ".pftrace"

    def check(self, output: Output) -> None:
        """Reject a terminal."""
        if output.is_terminal:
            raise UsageError("a trace is not text: give it a file with -o", "-o run.pftrace")

    def export(self, run: Run, output: Output) -> Sequence[str]:
        """Write one file, or one per node into a folder."""
        if output.is_folder:
            for node in run.nodes:
                with output.open_part(node.key, self.suffix) as file:
                    for packets in iterate_node_packets(run, node):
                        file.write(b"".join(packets))
        else:
            with output.open_whole() as file:
                for node in run.nodes:
                    for packets in iterate_node_packets(run, node):
                        file.write(b"".join(packets))
        history = run.report.history
        if history is None:
            return (NO_HISTORY_REMARK,)
        return (history.why_missing,) if history.why_missing else ()


def iterate_node_packets(run: Run, node: RunNode) -> Iterator[list[bytes]]:
    """Yield the packets of one node while its recording is read, frame by frame."""
    packets = Packets(node.key)
    groups, processes, reasons = ProcessTracks(node, packets), ProcessDirectory(node), GapReasons()
    spans = SpanWriter(node, packets, groups, processes)
    counters = CounterWriter(node, packets, groups, reasons)
    first_ns = node.first_ns
    packets.add_clock_snapshot(node.instant_ns(first_ns), first_ns)
    yield _take_pending(packets, [])
    for wait_packets in perfetto_counters.iterate_wait_packets(run, node, packets, groups):
        yield _take_pending(packets, wait_packets)
    for records in NodeReader(node.folder).frames():
        out: list[bytes] = []
        for record in records:
            processes.update(record)
            if isinstance(record, Spans):
                out += spans.encode_record(record)
            elif isinstance(record, Columns):
                out += counters.encode_record(record)
            elif isinstance(record, Clock):
                packets.add_clock_snapshot(
                    node.instant_ns(record.monotonic_ns), record.monotonic_ns
                )
            else:
                out += _encode_instants(record, node, packets, groups, reasons)
        if out or packets.pending:
            yield _take_pending(packets, out)
    yield _take_pending(packets, counters.finish())


def _take_pending(packets: Packets, tail: list[bytes]) -> list[bytes]:
    """Put pending descriptor packets in front of other packets."""
    pending, packets.pending = packets.pending, []
    return pending + tail


def _encode_instants(
    record: Record, node: RunNode, packets: Packets, groups: ProcessTracks, reasons: GapReasons
) -> list[bytes]:
    """Encode events of the node, and gaps in what was observed."""
    if isinstance(record, Gap):
        reasons.add(record)
        track = packets.child(groups.host_track(), "not seen")
        words = (record.collector, record.signal, record.device)
        name = escape_text(" ".join(word for word in words if word), 200)
        why = packets.annotation("why", format_reason(record))
        tail = packets.instant(track, name, why)
        return [encode_event(encode_varint(node.instant_ns(record.t_ns)), tail)]
    if isinstance(record, Event) and record.kind not in _HIDDEN_EVENTS:
        track = packets.child(groups.host_track(), "events")
        notes = [
            packets.annotation(escape_text(key, 60), escape_text(str(value), 300))
            for key, value in list(record.attributes.items())[:20]
        ]
        tail = packets.instant(track, escape_text(record.kind, 100), *notes)
        return [encode_event(encode_varint(node.instant_ns(record.t_ns)), tail)]
    return []
