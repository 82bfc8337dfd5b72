"""What is left folded for the analysis unfolds to what the reader gives frame by frame."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import msgspec
import numpy as np
import pytest

from clusterprof.trace.column_decoder import BlockColumns, concat_columns
from clusterprof.trace.decoder import Decoder, PackedSpans, decode_span_frames
from clusterprof.trace.frame import (
    CODEC_NONE,
    KIND_COLUMNS,
    Block,
    ColumnsHeader,
    Frame,
    FrameError,
)
from clusterprof.trace.reader import NodeReader
from clusterprof.trace.schema import SPAN_FIELDS, Columns, Record, Rows, Spans
from tests.support.trace_samples import make_second, make_spans, write_recording

EXTREME = (-(1 << 63), (1 << 63) - 1, -1, 0, 1, 1 << 40)


def backwards() -> Spans:
    """Spans that begin before the one before them ended, of a clock near its ends, of all sizes."""
    rows = [[x, y, 1, y, x, 7, 0] for x in EXTREME for y in EXTREME]
    columns = {name: array("q", column) for name, column in zip(SPAN_FIELDS, zip(*rows))}
    return Spans(1, 2, 3, 0, {}, columns)


def recorded(folder: Path) -> NodeReader:
    draw = random.Random(5)
    values = [make_spans(number, rows, draw) for number, rows in enumerate((3, 1, 0, 40))]
    write_recording(
        folder, [make_second(0), [*values, backwards()], [backwards()], [values[0]], make_second(1)]
    )
    return NodeReader(folder)


def of_kind(records: list[Record], kind: type) -> list:
    return [record for record in records if isinstance(record, kind)]


def test_spans_decoded_together_equal_those_of_each_frame(tmp_path: Path) -> None:
    reader = recorded(tmp_path / "node")
    plain = of_kind([record for frame in reader.frames() for record in frame], Spans)
    folded = of_kind([record for frame in reader.packed() for record in frame], PackedSpans)
    assert len(folded) == 5  # one frame per second that has spans
    want = [np.concatenate([record.columns[name] for record in plain]) for name in SPAN_FIELDS]
    table = np.full((len(SPAN_FIELDS), sum(part.rows for part in folded)), 99, np.int64)
    for _ in range(2):  # a frame can be unfolded again
        decode_span_frames(folded, table)
        assert table.tolist() == np.stack(want).tolist()
    rows = [(part.pid, part.first_sequence, part.rows) for item in folded for part in item.parts]
    assert rows == [
        (record.pid, record.first_sequence, len(record.columns["a"])) for record in plain
    ]


def test_columns_are_decoded_on_demand(tmp_path: Path) -> None:
    reader = recorded(tmp_path / "node")
    plain = of_kind([record for frame in reader.frames() for record in frame], Columns)
    folded = of_kind([record for frame in reader.packed() for record in frame], Columns)
    assert len(plain) == len(folded) > 0
    for first, other in zip(plain, folded, strict=True):
        assert isinstance(first.values, tuple)
        assert isinstance(other.values, BlockColumns)
        assert len(first.values) == len(other.values)
        for index, column in enumerate(first.values):
            for got in (other.values[index], list(other.values)[index], other.values[:][index]):
                assert got.dtype == column.dtype
                assert got.tobytes() == column.tobytes()
    assert folded[0].values.places is folded[2].values.places  # seconds alike: found once


def disk(number: int, rows: int) -> Columns:
    """Readings of a second that has more or fewer of them, some of which go down."""
    draw = random.Random(number)
    t_ns = array("q", [number * 10**9 + 10**8 * row + draw.randrange(999) for row in range(rows)])
    counter = array("q", [draw.choice((1, -1)) * draw.randrange(1 << 40) for _ in t_ns])
    ratio = array("d", [draw.random() for _ in t_ns])
    signals = ("disk.reads_total", "disk.read_ns_total", "disk.busy_ratio")
    ms = array("q", [10**6 * draw.randrange(99) for _ in t_ns])
    return Columns("disk", signals, ("vda",) * 3, t_ns, (counter, ms, ratio), (None,) * 3)


def threads(number: int, tids: int, ticks: int) -> Rows:
    """Ticks of a few threads, as many rows apart as there are threads."""
    draw = random.Random(number)
    t_ns = [number * 10**9 + tick * 10**8 for tick in range(ticks) for _ in range(tids)]
    cpu = [draw.randrange(1 << 50) for _ in t_ns]
    columns = (array("q", t_ns), array("q", list(range(tids)) * ticks), array("q", cpu))
    return Rows("threads", ("t_ns", "tid", "on_cpu_ns_total"), columns, {})


def jittered(folder: Path) -> NodeReader:
    """Frames that look alike, do not, and do again; some hold one row, some many."""
    shapes = [(4, 3, 2), (4, 3, 2), (1, 1, 1), (5, 3, 2), (4, 3, 2), (90, 1, 70), (4, 2, 3)]
    write_recording(folder, [[disk(n, r), threads(n, *of)] for n, (r, *of) in enumerate(shapes)])
    return NodeReader(folder)


def test_joined_columns_equal_those_of_each_frame(tmp_path: Path) -> None:
    reader = jittered(tmp_path / "node")
    records = [record for frame in reader.frames() for record in frame]
    packed = [record for frame in reader.packed() for record in frame]
    for kind, dtype in ((Columns, np.float64), (Rows, np.int64)):
        field = "values" if kind is Columns else "columns"
        plain = [getattr(value, field) for value in of_kind(records, kind)]
        folded = [getattr(value, field) for value in of_kind(packed, kind)]
        assert len(plain) == len(folded) == 7
        folded[3][1]  # one that was unfolded before by itself
        for order in ([0, 1, 2, 3, 4, 5, 6], [6, 4, 1, 0, 5, 3, 2], [1, 4, 0]):
            batch = zip(*(plain[which] for which in order))
            want = [np.concatenate(columns).astype(dtype).tolist() for columns in batch]
            got = concat_columns([folded[which] for which in order], dtype)
            assert [column.tolist() for column in got] == want


def test_the_ends_of_a_column_are_read_without_decoding(tmp_path: Path) -> None:
    reader = jittered(tmp_path / "node")
    plain = [record for frame in reader.frames() for record in frame]
    packed = [record for frame in reader.packed() for record in frame]
    seen = 0
    for first, other in zip(plain, packed, strict=True):
        if isinstance(first, Columns):
            pairs = [(first.t_ns, other.t_ns), (first.values[0], other.values.encoded_column(0))]
            pairs.append((first.values[1], other.values.encoded_column(1)))
        elif isinstance(first, Rows):
            pairs = [
                (column, other.columns.encoded_column(i)) for i, column in enumerate(first.columns)
            ]
        else:
            continue
        for column, folded in pairs:
            assert folded.columns.frame.planes is not None
            assert (len(folded), folded[0], folded[-1]) == (len(column), column[0], column[-1])
            seen += 1
        assert pairs[0][1].decode().tolist() == pairs[0][0].tolist()
        assert pairs[0][1].columns.frame.planes is None
        assert (
            (pairs[0][1].columns.encoded_column(0)[-1]) == pairs[0][0][-1]
        )  # and when it is unfolded
    assert seen == 42


def test_a_block_of_unknown_kind_is_refused_during_frame_read() -> None:
    header = ColumnsHeader(0, 0, [Block(7, 1, 1, 0, 0, 0, 0)], [], [])
    got = Frame(KIND_COLUMNS, 1, CODEC_NONE, msgspec.msgpack.encode(header), b"")
    with pytest.raises(FrameError, match="without a valid shape"):
        Decoder().packed(got)
