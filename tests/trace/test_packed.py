"""What is left folded for the analysis unfolds to what the reader gives frame by frame."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import numpy as np
from trace_samples import second, spans, write

from clusterprof.trace.blockcolumns import BlockColumns
from clusterprof.trace.reader import NodeReader
from clusterprof.trace.schema import SPAN_FIELDS, Columns, Record, Spans
from clusterprof.trace.spanframes import PackedSpans, unfold

EXTREME = (-(1 << 63), (1 << 63) - 1, -1, 0, 1, 1 << 40)


def backwards() -> Spans:
    """Spans that begin before the one before them ended, of a clock near its ends, of all sizes."""
    rows = [[x, y, 1, y, x, 7, 0] for x in EXTREME for y in EXTREME]
    columns = {name: array("q", column) for name, column in zip(SPAN_FIELDS, zip(*rows))}
    return Spans(1, 2, 3, 0, {}, columns)


def recorded(folder: Path) -> NodeReader:
    draw = random.Random(5)
    some = [spans(number, rows, draw) for number, rows in enumerate((3, 1, 0, 40))]
    write(folder, [second(0), [*some, backwards()], [backwards()], [some[0]], second(1)])
    return NodeReader(folder)


def of_kind(records: list[Record], kind: type) -> list:
    return [record for record in records if isinstance(record, kind)]


def test_spans_unfolded_together_are_those_of_each_frame(tmp_path: Path) -> None:
    reader = recorded(tmp_path / "node")
    plain = of_kind([record for frame in reader.frames() for record in frame], Spans)
    folded = of_kind([one for frame in reader.packed() for one in frame], PackedSpans)
    assert len(folded) == 5  # one frame per second that has spans
    want = [np.concatenate([one.columns[name] for one in plain]) for name in SPAN_FIELDS]
    table = np.full((len(SPAN_FIELDS), sum(one.rows for one in folded)), 99, np.int64)
    for _ in range(2):  # a frame can be unfolded again
        unfold(folded, table)
        assert table.tolist() == np.stack(want).tolist()
    said = [(part.pid, part.first_sequence, part.rows) for one in folded for part in one.parts]
    assert said == [(one.pid, one.first_sequence, len(one.columns["a"])) for one in plain]


def test_columns_are_made_when_asked_for(tmp_path: Path) -> None:
    reader = recorded(tmp_path / "node")
    plain = of_kind([record for frame in reader.frames() for record in frame], Columns)
    folded = of_kind([one for frame in reader.packed() for one in frame], Columns)
    assert len(plain) == len(folded) > 0
    for one, other in zip(plain, folded, strict=True):
        assert isinstance(one.values, tuple)
        assert isinstance(other.values, BlockColumns)
        assert len(one.values) == len(other.values)
        for index, column in enumerate(one.values):
            for got in (other.values[index], list(other.values)[index], other.values[:][index]):
                assert got.dtype == column.dtype
                assert got.tobytes() == column.tobytes()
    assert folded[0].values.places is folded[2].values.places  # seconds alike: found once
