"""Stretches and samples of nested calls, each counted by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from clusterprof.analysis.importers.core import stacks
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.core.stacks import (
    ImportedStacks,
    Stretches,
    add_stack_samples,
    build_stretches,
    draw_samples,
)
from clusterprof.analysis.timeline.stacks import StackInterner
from clusterprof.trace.schema import Event, Spans

MS = 1_000_000
WHOLE = (0, 10**12)


def columns(*rows: Sequence[int]) -> list[np.ndarray]:
    """Columns of rows of numbers."""
    return list(np.array(rows, np.int64).reshape(len(rows), -1).T)


def stretches_of(table: ImportedStacks, *calls: Sequence[int]) -> list[tuple[int, ...]]:
    """Stretches of calls (start, end, place) in ms."""
    start, end, place = columns(*calls)
    built = build_stretches(table, start * MS, end * MS, place, WHOLE)
    return list(zip((built.start // MS).tolist(), (built.end // MS).tolist(), built.stack.tolist()))


def table_of(count: int) -> ImportedStacks:
    """A table with some places."""
    table = ImportedStacks()
    for number in range(count):
        assert table.add_place("a.py", number + 1, f"f{number}") == number
    return table


def test_an_interval_lasts_while_the_stack_is_unchanged() -> None:
    table = table_of(3)
    # main 0..10, augment 1..6 in it, resize 2..4 in that, and augment again 6..7, back to back
    calls = ((0, 10, 0), (1, 6, 1), (2, 4, 2), (6, 7, 1), (20, 21, 0))
    assert stretches_of(table, *calls) == [
        (0, 1, 1),
        (1, 2, 2),
        (2, 4, 3),
        (4, 7, 2),
        (7, 10, 1),
        (20, 21, 1),
    ]


def test_calls_are_trimmed_to_the_window_and_unknown_calls_skipped() -> None:
    table = table_of(2)
    start, end, place = columns((0, 10, 0), (2, 8, -1), (3, 5, 1))
    built = build_stretches(table, start, end, place, (1, 4))
    assert list(zip(*(column.tolist() for column in (built.start, built.end, built.stack)))) == [
        (1, 3, 1),
        (3, 4, 2),
    ]
    assert not build_stretches(table, start, end, place, (20, 30)).start.size


def test_a_long_interval_becomes_evenly_spaced_samples() -> None:
    stretches = Stretches(*columns((0, 24 * MS, 7), (30 * MS, 34 * MS, 8)))
    t_ns, stack, interval = draw_samples(stretches)
    assert (t_ns // MS).tolist() == [4, 12, 20, 32]
    assert stack.tolist() == [7, 7, 7, 8]
    assert (interval // MS).tolist() == [8, 8, 8, 4]


def test_short_intervals_keep_their_share_of_the_time() -> None:
    # 10,000 times 30 us in 1, then 10 us in 2: 75 and 25 %; none is as long as 50 us.
    start = np.arange(10_000) * 40_000
    both = np.sort(np.concatenate([start, start + 30_000]))
    stack = np.tile([1, 2], 10_000)
    t_ns, drawn, interval = draw_samples(Stretches(both, np.append(both[1:], 4 * 10**8), stack))
    assert interval.sum() == 4 * 10**8  # nothing is lost
    assert t_ns.size == 8000 and (np.diff(t_ns) >= 0).all()
    assert interval[drawn == 2].sum() / interval.sum() == pytest.approx(0.25, abs=0.02)


def test_the_sample_limit_lengthens_the_sample_interval() -> None:
    stretches = Stretches(*columns((0, 1000 * MS, 1)))
    t_ns, _, interval = draw_samples(stretches, max_samples=30)
    assert t_ns.size == 25 and set(interval.tolist()) == {40 * MS}
    century = Stretches(*columns((0, 36_500 * 86_400 * 1000 * MS, 1)))
    t_ns, _, interval = draw_samples(century)
    assert t_ns.size <= stacks.MAX_SAMPLES and interval.sum() == century.end[0]


def test_a_deep_stack_keeps_its_innermost_frames() -> None:
    table = table_of(100)
    stack = 0
    for place in range(100):
        stack = table.add_stack(stack, place)
    interner = StackInterner()
    for attributes in table.list_definitions(5):
        interner.add(attributes)
    (number,) = interner.translate(5, 1, np.array([stack])).tolist()
    known = interner.build_table()
    names = [known.locations[index].function for index in known.list_locations(number)]
    assert names == [f"f{place}" for place in range(36, 100)]


def test_a_full_stack_table_adds_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "MAX_STACKS", 2)
    table = table_of(3)
    assert [table.add_frames(frames) for frames in ([0], [0, 1], [0, 1, 2], [2], [0, 1])] == [
        1,
        2,
        0,
        0,
        2,
    ]
    assert stretches_of(table, (0, 10, 2), (2, 4, 1)) == [(0, 10, 0)]


def test_definitions_are_split_and_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_ROWS_PER_EVENT", 2)
    table = ImportedStacks()
    places = [table.add_place(f"{name}.py", 3, name) for name in ("main", "augment", "resize")]
    table.add_frames(places)
    node = NodeTables("n", "test")
    node.add_rank(9)
    times = np.array([MS, 2 * MS])
    worker = np.array([5 * MS])
    samples = [(times, np.array([1, 3]), times), (worker, np.array([2]), np.array([MS]))]
    assert add_stack_samples(node, 9, table, samples) == 3
    interner, spans = StackInterner(), []
    for records in node.records():
        for record in records:
            if isinstance(record, Event) and record.kind == "stacks-defined":
                interner.add(record.attributes)
            elif isinstance(record, Spans):
                names = ("start_ns", "end_ns", "a", "b", "c", "d")
                spans += list(zip(*(record.columns[name] for name in names)))
    assert spans == [
        (MS, MS, 1, MS, 0, 0),
        (2 * MS, 2 * MS, 3, 2 * MS, 0, 0),
        (5 * MS, 5 * MS, 2, MS, 1, 0),
    ]
    known = interner.build_table()
    (stack,) = interner.translate(9, 1, np.array([3])).tolist()
    listed = [known.locations[index] for index in known.list_locations(stack)]
    assert [(place.file, place.line, place.function) for place in listed] == [
        ("main.py", 3, "main"),
        ("augment.py", 3, "augment"),
        ("resize.py", 3, "resize"),
    ]


def test_names_that_cannot_be_written_are_repaired() -> None:
    table = ImportedStacks()
    table.add_frames([table.add_place("a\ud800.py", 1, "f" * 5000)])
    (attributes,) = table.list_definitions(1)
    assert attributes["files"] == [0, ["a?.py"]]
    assert len(attributes["places"][1][0][3]) == stacks.MAX_NAME_CHARACTERS
