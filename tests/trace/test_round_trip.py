"""What was written is what is read: to the last bit, whatever the numbers are."""

from __future__ import annotations

import struct
import tempfile
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterprof.trace import column_codec as packing
from clusterprof.trace.reader import NodeReader
from clusterprof.trace.schema import SPAN_FIELDS, Clock, Columns, Event, Record, Rows, Spans
from clusterprof.trace.writer import RecordingWriter
from tests.support.builders import is_whole
from tests.support.trace_samples import (
    HEADER,
    ManualClock,
    make_canonical,
    make_second,
    make_simple_records,
    write_recording,
)

EXTREMES = [-(2**63), 2**63 - 1, -1, 0, 1, 2**53 + 1, 10**7, -(10**7), 1024]
NAN_PAYLOADS = [0x7FF8000000000001, 0xFFF800000000BEEF, 0x7FF0000000000001]  # the last signals
MINUS_ZERO, INFINITY, SUBNORMAL = 0x8000000000000000, 0x7FF0000000000000, 1
FLOAT_BITS = [*NAN_PAYLOADS, MINUS_ZERO, INFINITY, SUBNORMAL]


def lists(of: st.SearchStrategy[Any], rows: int) -> st.SearchStrategy[list[Any]]:
    return st.lists(of, min_size=rows, max_size=rows)


def raw(code: str, rows: int) -> st.SearchStrategy[array]:
    """Any bits at all."""
    return st.binary(min_size=8 * rows, max_size=8 * rows).map(lambda data: array(code, data))


def ints(rows: int) -> st.SearchStrategy[array]:
    factor = st.sampled_from([1, 1_000, 1_000_000, 10_000_000, 1024])
    small = lists(st.integers(-(2**39), 2**39), rows)
    multiples = st.builds(lambda f, values: array("q", [f * v for v in values]), factor, small)
    extremes = lists(st.sampled_from(EXTREMES), rows).map(lambda values: array("q", values))
    return st.one_of(multiples, extremes, raw("q", rows))


def floats(rows: int) -> st.SearchStrategy[array]:
    decimals = lists(st.integers(-(10**16), 10**16), rows)
    strange = lists(st.sampled_from(FLOAT_BITS), rows)
    return st.one_of(
        decimals.map(lambda values: array("d", [value / 1000 for value in values])),
        strange.map(lambda values: array("d", struct.pack(f"<{rows}Q", *values))),
        raw("d", rows),
    )


def masks(rows: int) -> st.SearchStrategy[bytes | None]:
    if not rows:
        return st.none()
    batch = st.lists(st.integers(0, 1), min_size=rows, max_size=rows).map(bytes)
    return st.one_of(st.none(), st.just(b"\x01" * rows), batch)


NAMES = st.text(st.characters(blacklist_categories=["Cs"]), max_size=12)


@st.composite
def columns_records(draw: Any) -> Columns:
    rows, n = draw(st.integers(0, 14)), draw(st.integers(0, 6))
    values = [draw(st.one_of(ints(rows), floats(rows))) for _ in range(n)]
    names = st.lists(NAMES, min_size=n, max_size=n).map(tuple)
    return Columns(
        draw(st.sampled_from(["cpu", "gpu"])),
        draw(names),
        draw(names),
        draw(ints(rows)),
        tuple(values),
        tuple(draw(masks(rows)) for _ in range(n)),
    )


@st.composite
def rows_records(draw: Any) -> Rows:
    rows, n = draw(st.integers(0, 14)), draw(st.integers(0, 4))
    columns = [draw(st.one_of(ints(rows), floats(rows))) for _ in range(n)]
    tids = array("q", [row % draw(st.integers(1, 5)) for row in range(rows)])
    strings = draw(st.dictionaries(NAMES, st.lists(NAMES, max_size=3).map(tuple), max_size=2))
    return Rows("threads", ("tid", *(f"c{index}" for index in range(n))), (tids, *columns), strings)


@st.composite
def spans_records(draw: Any) -> Spans:
    rows = draw(st.integers(0, 20))
    columns = {name: draw(ints(rows)) for name in SPAN_FIELDS}
    names = draw(st.dictionaries(st.integers(64, 127), NAMES, max_size=3))
    pid, count = st.integers(0, 2**31 - 1), st.integers(0, 2**62 - 1)  # others are refused
    return Spans(draw(pid), draw(count), draw(count), draw(count), names, columns)


PLACES = {"Columns": 1, "Rows": 2, "Spans": 3}


def expected(batches: list[list[Record]]) -> list[dict[str, Any]]:
    """Records of one call come back kind by kind, in their order within a kind."""
    return [
        make_canonical(record)
        for batch in batches
        for record in sorted(batch, key=lambda record: PLACES.get(type(record).__name__, 0))
    ]


RECORDS = st.one_of(
    columns_records(), rows_records(), spans_records(), st.sampled_from(make_simple_records())
)


@given(st.lists(st.lists(RECORDS, max_size=5), max_size=4))
def test_reading_returns_the_written_records(batches: list[list[Record]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        node = Path(folder) / "node"
        write_recording(node, batches)
        reader = NodeReader(node, accepts_implausible_times=True)
        header, clock, *rest = [make_canonical(record) for record in reader]
    assert header == make_canonical(HEADER)
    assert clock == make_canonical(ManualClock()())
    assert rest == expected(batches)
    assert is_whole(reader.damage)


def test_a_recording_is_read_across_its_segments(tmp_path: Path) -> None:
    batches = [make_second(n) for n in range(30)]
    write_recording(tmp_path / "node", batches, segment_bytes=4_000)
    assert len(list((tmp_path / "node").iterdir())) > 3
    reader = NodeReader(tmp_path / "node")
    records = [make_canonical(r) for r in reader if type(r).__name__ not in ("Header", "Clock")]
    assert records == expected(batches)
    assert is_whole(reader.damage)


def test_byte_planes_of_a_column_match_the_format_description() -> None:
    # 1000, 1003, 1001: the first value, then +3 -> 6 and -2 -> 3 in zigzag, one byte plane each.
    # 1000 = 0x03e8: planes e8 and 03. Codes, two bits a plane: 01 01 = 5 and 01 = 1.
    sink = packing.PlaneSink()
    data = array("q", [1000, 1003, 1001]).tobytes()
    block = packing.pack_block(sink, packing.INT, data, columns=1, lag=1)
    assert (block.rows, block.lag, block.zigzag, block.firsts, block.planes) == (3, 1, 1, 5, 1)
    assert sink.packed == [b"\x03", b"\xe8", b"\x06\x03"]
    assert sink.raw == []


def test_lanes_are_scaled_only_if_each_value_is_a_multiple() -> None:
    # 8 + 2**64 * other is a multiple of 1000 for some number below 1000, and 8 is none: stored as
    # quotients, the two lanes would come back as two others.
    other = next(n for n in range(1000) if (8 + (n << 64)) % 1000 == 0)
    assert packing.scale_integers(array("q", [8, other]).tobytes(), 1000) is None
    assert packing.scale_integers(array("q", [8000, -1000]).tobytes(), 1000) is None
    eight_and_nine = array("q", [8, 9]).tobytes()
    assert packing.scale_integers(array("q", [8000, 9000]).tobytes(), 1000) == eight_and_nine


def test_invalid_utf8_names_and_huge_numbers_are_written_as_text(tmp_path: Path) -> None:
    strange = {"name": "a\udcffb", "huge": 1 << 70, "path": Path("/x")}
    write_recording(tmp_path / "node", [[Event(1, "e", strange)]])
    *_, read = NodeReader(tmp_path / "node")
    text = {"name": "a\\udcffb", "huge": "1180591620717411303424", "path": "/x"}
    assert read == Event(1, "e", text)


@pytest.mark.parametrize(
    "wrong",
    [
        Columns("c", ("s",), ("",), array("q", [1, 2]), (array("q", [1]),), (None,)),
        Columns("c", ("s",), ("",), array("q", [1]), (array("i", [1]),), (None,)),
        Columns("c", ("s", "t"), ("",), array("q", [1]), (array("q", [1]),), (None,)),
        Rows("t", ("a", "b"), (array("q", [1]),)),
        Spans(1, 2, 3, 4, {}, {name: array("q", [1] * (name == "a")) for name in SPAN_FIELDS}),
    ],
)
def test_inconsistent_columns_are_refused_without_writing(tmp_path: Path, wrong: Record) -> None:
    writer = RecordingWriter(tmp_path / "node", HEADER, ManualClock(), keep_free_bytes=0)
    with pytest.raises(ValueError):
        writer.append(Clock(1, 2, 3), wrong)
    writer.close()
    assert len(list(NodeReader(tmp_path / "node"))) == 2  # the header and the clock of the start
