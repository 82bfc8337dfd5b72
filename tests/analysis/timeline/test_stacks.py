"""Definitions of stacks: merged over processes, late ones, and ones meant to do harm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clusterprof.analysis.timeline.stacks import MAX_DEPTH, StackInterner
from clusterprof.report.code import CodeLocation
from clusterprof.trace.schema import Event, Spans
from tests.support.builders import SECOND, build_chunks, make_header

FILES = [0, ["/job/train.py", "/job/data.py"]]
PLACES = [0, [[0, 1, 10, "main"], [1, 5, 42, "augment"], [1, 5, 43, "augment"]]]


def _define(pid: int = 7, ticks: int = 70, **lists: Any) -> dict[str, Any]:
    return {"pid": pid, "started_ticks": ticks, **lists}


def test_processes_with_the_same_code_share_numbers() -> None:
    interner = StackInterner()
    interner.add(_define(files=FILES, places=PLACES, stacks=[1, [[0, 0], [1, 1], [1, 2]]]))
    # The worker defined its places in another order.
    interner.add(
        _define(
            8,
            80,
            files=[0, ["/job/data.py", "/job/train.py"]],
            places=[0, [[0, 5, 42, "augment"], [1, 1, 10, "main"]]],
            stacks=[1, [[0, 1], [1, 0]]],
        )
    )
    table = interner.build_table()
    assert interner.translate(7, 70, np.array([1, 2, 3, 2, 9, 0])).tolist() == [1, 2, 3, 2, 0, 0]
    assert interner.translate(8, 80, np.array([2, 1])).tolist() == [2, 1]
    assert interner.translate(8, 81, np.array([2, 1])).tolist() == [0, 0]  # another process
    assert [table.locations[index] for index in table.list_locations(3)] == [
        CodeLocation("/job/train.py", 10, "main"),
        CodeLocation("/job/data.py", 43, "augment"),
    ]
    assert table.list_locations(0) == []


def test_definitions_come_in_parts_and_may_be_repeated() -> None:
    interner = StackInterner()
    interner.add(_define(files=[0, ["a.py"]], places=[0, [[0, 1, 1, "f"]]], stacks=[1, [[0, 0]]]))
    interner.add(_define(files=[1, ["b.py"]], places=[1, [[1, 1, 2, "g"]]], stacks=[2, [[1, 1]]]))
    interner.add(_define(files=[0, ["a.py"]], places=[0, [[0, 1, 1, "f"]]], stacks=[1, [[0, 0]]]))
    table = interner.build_table()
    assert table.parent.tolist() == [0, 0, 1]
    assert table.location.tolist() == [-1, 0, 1]


@pytest.mark.parametrize(
    "lists",
    [
        {"files": "abc", "places": 7, "stacks": None},
        {"files": [0, [3, None]], "places": [0, [[0, 1, 1, "f"]]], "stacks": [1, [[0, 0]]]},
        {"files": FILES, "places": [0, [[9, 1, 1, "f"], "x", []]], "stacks": [1, [[0, 0]]]},
        {"files": FILES, "places": [-1, [[0, 1, 1, "f"]]], "stacks": [1, [[0, -1]]]},
        {"files": FILES, "places": PLACES, "stacks": [0, [[0, 0]]]},
        {"files": FILES, "places": PLACES, "stacks": [1, [[1, 0]]]},  # its own parent
        {"files": FILES, "places": PLACES, "stacks": [1, [[5, 0], [True, 0], ["0", 0], [0]]]},
        {"files": FILES, "places": [0, [[0, 1, 1, 5]]], "stacks": [1, [[0, 0]]]},
    ],
)
def test_malformed_definitions_define_nothing(lists: dict[str, Any]) -> None:
    interner = StackInterner()
    interner.add(_define(**lists))
    interner.add({"pid": "7", "started_ticks": 70})
    assert interner.translate(7, 70, np.array([0, 1, 2])).tolist() == [0, 0, 0]


def test_depth_and_names_are_limited() -> None:
    interner = StackInterner()
    chain = [[number, 0] for number in range(1000)]
    interner.add(
        _define(
            files=[0, ["a" * 5000]], places=[0, [[0, 1, 1 << 40, "f" * 5000]]], stacks=[1, chain]
        )
    )
    table = interner.build_table()
    assert table.parent.size == MAX_DEPTH + 1
    (place,) = table.locations
    assert (len(place.file), place.line, len(place.function)) == (1024, (1 << 31) - 1, 1024)


def test_stack_samples_reach_their_process_apart_from_spans() -> None:
    def column(*values: int) -> np.ndarray:
        return np.array(values, np.int64)

    samples = Spans(
        7,
        70,
        1,
        0,
        {},
        {
            "start_ns": column(SECOND, 2 * SECOND, 0),
            "end_ns": column(SECOND, 2 * SECOND, SECOND),
            "kind": column(25, 25, 3),
            "a": column(1, 2, 0),
            "b": column(50, 50, 0),
            "c": column(0, 0, 0),
            "d": column(ord("R"), 0, 0),
        },
    )
    defined = Event(
        90 * SECOND,  # written late
        "stacks-defined",
        _define(files=FILES, places=PLACES, stacks=[1, [[0, 0]]]),
    )
    (chunk,) = build_chunks([make_header(), samples, defined])
    process = chunk.processes[7]
    assert list(process.spans) == [3]
    assert process.stacks is not None
    assert process.stacks.stack.tolist() == [1, 0]  # the second one was never defined
    assert chunk.events == () and chunk.end_ns < 90 * SECOND
