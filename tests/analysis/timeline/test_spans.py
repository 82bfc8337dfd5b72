"""The columns of spans by name: one view for each kind, as the layout of the ring defines them."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from clusterprof.analysis.timeline import spans
from clusterprof.analysis.timeline.spans import SpanTimes, SpanView, StepSpans
from clusterprof.probe import layout
from tests.support.builders import make_process
from tests.support.builders import make_spans as table_of

VIEWS = [
    member
    for member in vars(spans).values()
    if isinstance(member, type) and issubclass(member, SpanView) and member is not SpanView
]
FORMAT = Path(__file__).resolve().parents[3] / "docs/design/recording-format.md"


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_a_view_has_the_arguments_of_its_kind(view: type[SpanView]) -> None:
    names = tuple(field.name for field in fields(view))
    times = tuple(field.name for field in fields(SpanTimes))
    assert names == (*times, *layout.ARGUMENTS[view.kind])


def test_each_span_kind_has_a_single_view() -> None:
    kinds = [view.kind for view in VIEWS]
    assert len(set(kinds)) == len(kinds) > 10


def test_a_view_shares_the_columns_in_their_order() -> None:
    table = table_of((0, 1, 7, 2, 32, 4096), (1, 3, 8, 2, 33, 4097))
    main = make_process(100, spans={layout.STEP: table})
    steps = main.get_spans(StepSpans)
    assert steps is not None
    assert steps.step is table.a and steps.marked_by is table.b
    assert steps.samples is table.c and steps.tokens is table.d
    assert steps.start_ns is table.start_ns and steps.sequence is table.sequence
    assert steps.select(steps.step == 8).tokens.tolist() == [4097]
    assert steps.select(np.array([1, 0])).step.tolist() == [8, 7]
    assert make_process(101).get_spans(StepSpans) is None


def test_the_specification_describes_as_many_values_as_each_kind_has() -> None:
    text = FORMAT.read_text(encoding="utf-8").partition("## Span kinds")[2]
    rows = re.findall(r"^\| ([\d, ]+) \| ([^|]+) \|(.*)\|$", text.partition("* A `step`")[0], re.M)
    described = {
        int(kind): (name.strip().removesuffix(" (imported)"), values.split("|"))
        for kinds, names, values in rows
        for kind, name in zip(kinds.split(","), names.split(","))
    }
    assert {kind: name for kind, (name, _) in described.items()} == layout.KIND_NAMES
    for kind, (name, values) in described.items():
        given = [bool(value.strip()) for value in values]
        expected = len(layout.ARGUMENTS.get(kind, ()))
        assert given == [True] * expected + [False] * (4 - expected), name
