"""A Perfetto trace (ui.perfetto.dev, trace_processor): spans, counters, lost time, waits.

A trace is a sequence of packets, and so are two traces behind each other: each node can be a file
of its own, and `cat` makes one trace of them, arrows between nodes included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from clusterprof.errors import UsageError
from clusterprof.exporters import perfetto_waits
from clusterprof.exporters.base import Run, RunNode
from clusterprof.exporters.output import Output
from clusterprof.exporters.perfetto_counters import CounterWriter
from clusterprof.exporters.perfetto_packets import Packets, event
from clusterprof.exporters.perfetto_spans import Groups, SpanWriter
from clusterprof.exporters.protobuf import varint
from clusterprof.exporters.reasons import Reasons, reason_of
from clusterprof.exporters.who import Who
from clusterprof.renderers.text_safety import safe_text
from clusterprof.trace.reader import NodeReader
from clusterprof.trace.schema import Clock, Columns, Event, Gap, Record, Spans

NO_HISTORY = "the trace has no lost time and no arrows: the analysis did not say what happened when"
_UNTOLD_EVENTS = frozenset({"process-registered", "group-announced"})


class Perfetto:
    """A trace in Perfetto's own format, one packet sequence per node."""

    name: ClassVar[str] = "perfetto"
    suffix: ClassVar[str] = ".pftrace"

    def check(self, output: Output) -> None:
        """Refuse a terminal."""
        if output.is_terminal:
            raise UsageError("a trace is not text: give it a file with -o", "-o run.pftrace")

    def export(self, run: Run, output: Output) -> Sequence[str]:
        """Write one file, or one per node into a folder."""
        if output.is_folder:
            for node in run.nodes:
                with output.part(node.key, self.suffix) as file:
                    for packets in packets_of(run, node):
                        file.write(b"".join(packets))
        else:
            with output.whole() as file:
                for node in run.nodes:
                    for packets in packets_of(run, node):
                        file.write(b"".join(packets))
        history = run.report.history
        if history is None:
            return (NO_HISTORY,)
        return (history.why_missing,) if history.why_missing else ()


def packets_of(run: Run, node: RunNode) -> Iterator[list[bytes]]:
    """Yield the packets of one node while its recording is read, a frame at a time."""
    packets = Packets(node.key)
    groups, who, reasons = Groups(node, packets), Who(node), Reasons()
    spans = SpanWriter(node, packets, groups, who)
    counters = CounterWriter(node, packets, groups, reasons)
    first_ns = node.first_ns
    packets.clock(node.instant_ns(first_ns), first_ns)
    yield _with(packets, [])
    for found in perfetto_waits.packets_of(run, node, packets, groups):
        yield _with(packets, found)
    for records in NodeReader(node.folder).frames():
        out: list[bytes] = []
        for record in records:
            who.see(record)
            if isinstance(record, Spans):
                out += spans.packets_of(record)
            elif isinstance(record, Columns):
                out += counters.packets_of(record)
            elif isinstance(record, Clock):
                packets.clock(node.instant_ns(record.monotonic_ns), record.monotonic_ns)
            else:
                out += _instants(record, node, packets, groups, reasons)
        if out or packets.told:
            yield _with(packets, out)
    yield _with(packets, counters.finish())


def _with(packets: Packets, found: list[bytes]) -> list[bytes]:
    """Put what must be told first in front of packets."""
    told, packets.told = packets.told, []
    return told + found


def _instants(
    record: Record, node: RunNode, packets: Packets, groups: Groups, reasons: Reasons
) -> list[bytes]:
    """What happened to the node, and what of it could not be seen."""
    if isinstance(record, Gap):
        reasons.see(record)
        track = packets.child(groups.host(), "not seen")
        words = (record.collector, record.signal, record.device)
        name = safe_text(" ".join(word for word in words if word), 200)
        why = packets.annotated("why", reason_of(record))
        told = packets.instant(track, name, why)
        return [event(varint(node.instant_ns(record.t_ns)), told)]
    if isinstance(record, Event) and record.kind not in _UNTOLD_EVENTS:
        track = packets.child(groups.host(), "events")
        notes = [
            packets.annotated(safe_text(key, 60), safe_text(str(value), 300))
            for key, value in list(record.attributes.items())[:20]
        ]
        told = packets.instant(track, safe_text(record.kind, 100), *notes)
        return [event(varint(node.instant_ns(record.t_ns)), told)]
    return []
