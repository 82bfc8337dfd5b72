"""The samples of stacks that an importer made, as plain values."""

from __future__ import annotations

import numpy as np

from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.timeline.stacks import StackInterner
from clusterprof.probe import layout
from clusterprof.trace.schema import Event, Spans

Sample = tuple[float, float, list[str]]
"""Time and interval in ms, and the frames from the outermost: `train.py:30 main`."""


def list_samples(node: NodeTables, pid: int) -> dict[int, list[Sample]]:
    """List the samples of a process by thread, in order of time; [] = the stack is not known."""
    interner, rows = StackInterner(), []
    node.header()
    for records in node.records():
        for record in records:
            if isinstance(record, Event):
                interner.add(record.attributes if record.kind == "stacks-defined" else {})
            elif isinstance(record, Spans) and record.pid == pid:
                names = ("kind", "start_ns", "end_ns", "a", "b", "c", "d")
                rows += list(zip(*(record.columns[name] for name in names)))
    table = interner.build_table()
    listed: dict[int, list[Sample]] = {}
    for kind, start, end, stack, interval, thread, state in sorted(rows):
        if kind == layout.STACK_SAMPLE:
            assert (end, state) == (start, 0)
            (number,) = interner.translate(pid, 1, np.array([stack])).tolist()
            places = [table.locations[index] for index in table.list_locations(number)]
            frames = [f"{place.file}:{place.line} {place.function}" for place in places]
            listed.setdefault(thread, []).append((start / 1e6, interval / 1e6, frames))
    return listed
