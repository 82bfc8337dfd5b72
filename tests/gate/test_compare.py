"""Two runs side by side: the cause that changed is named, and parts add up to the step."""

from __future__ import annotations

import dataclasses
import json

import pytest

from clusterprof.errors import UsageError
from clusterprof.gate import Policy, parse_change
from clusterprof.gate.compare import (
    PRODUCTIVE,
    Comparison,
    ComparisonRow,
    Significance,
    compare_runs,
)
from clusterprof.output.renderers.verdicts.documents import (
    render_comparison_json,
    render_comparison_markdown,
    render_comparison_text,
    write_headline,
    write_legend,
)
from tests.support.gate_runs import MS, draw_step_lengths, make_run
from tests.support.hostile_names import HOSTILE


def slower() -> Comparison:
    """B takes 10 % longer, all of it because it loses more to storage."""
    before = make_run("before", draw_step_lengths(100, 100.0, 0.01, 1), storage=0.05, started=1)
    after = make_run("after", draw_step_lengths(100, 110.0, 0.01, 2), storage=15 / 110, started=2)
    return compare_runs(before, after, [parse_change("step.p50_ns: +5%")], Policy())


def test_the_changed_cause_comes_first_and_parts_sum_up() -> None:
    slower_run = slower()
    assert slower_run.step.significance == "more"
    assert slower_run.step.difference_ns == pytest.approx(10 * MS, rel=0.05)
    first, *rest = slower_run.rows
    assert (first.name, first.significance, first.culprit) == (
        "storage-local",
        "more",
        "node-a rank 1 vda",
    )
    # 5 of 100 ms before, 15 of 110 ms after
    assert first.a_ns == pytest.approx(5 * MS, rel=0.01)
    assert first.b_ns == pytest.approx(15 * MS, rel=0.01)
    assert {row.significance for row in rest} <= {"the same", "within chance"}
    assert sum(row.difference_ns for row in slower_run.rows) == pytest.approx(
        slower_run.step.difference_ns
    )
    assert sum(row.b_ns for row in slower_run.rows) == pytest.approx(slower_run.step.b_ns)
    assert slower_run.verdict is not None and slower_run.verdict.exit_code == 3


def test_similar_runs_show_no_change_beyond_chance() -> None:
    before, after = (
        make_run(name, draw_step_lengths(200, seed=seed), storage=0.05, started=seed)
        for seed, name in ((1, "before"), (2, "after"))
    )
    comparison = compare_runs(before, after, [], Policy())
    assert {row.significance for row in (comparison.step, *comparison.rows)} <= {
        "the same",
        "within chance",
    }
    assert list(write_headline(comparison))[-1] == "No cause changed by more than chance explains."
    assert comparison.verdict is None


def test_a_faster_kernel_does_not_count_as_more_waiting() -> None:
    before = make_run("before", draw_step_lengths(100, 100.0, 0.01, 1), storage=0.1, started=1)
    after = make_run("after", draw_step_lengths(100, 90.0, 0.01, 2), storage=1 / 9, started=2)
    comparison = compare_runs(before, after, [], Policy())
    assert (comparison.rows[0].name, comparison.rows[0].significance) == (PRODUCTIVE, "less")
    (storage,) = (row for row in comparison.rows if row.name == "storage-local")
    assert storage.significance == "within chance"  # 10 ms in both, though its share rose


def test_unlike_runs_are_compared_with_a_warning() -> None:
    before, after = make_run("before", started=1, batch_size=64.0), make_run("after", started=2)
    comparison = compare_runs(before, after, [parse_change("step.p50_ns: +5%")], Policy())
    printed = "Caution: the runs differ in batch-size, see below."
    assert list(write_headline(comparison))[-1] == printed
    assert comparison.verdict is not None and comparison.verdict.exit_code == 4


def test_runs_without_steps_cannot_be_compared() -> None:
    with pytest.raises(UsageError, match="no steps were marked"):
        compare_runs(make_run(), dataclasses.replace(make_run(), steps=None), [], Policy())
    short = make_run("short", draw_step_lengths(9))
    rows = compare_runs(
        short, make_run("short2", draw_step_lengths(9, seed=3), started=2), [], Policy()
    ).rows
    assert {row.significance for row in rows if row.high_ns is None} <= {"cannot tell", "the same"}


def test_text_fits_80_columns_and_begins_with_the_changed_cause() -> None:
    text = render_comparison_text(slower(), 80)
    table = text.split("\ngate ")[0].splitlines()
    assert all(len(line) <= 80 for line in table)
    assert table[0].startswith("A step is ") and " longer in B (+1" in table[0]
    assert table[1].startswith("What changed: storage-local +")
    assert "\x1b" not in text
    assert "\x1b[31mmore\x1b[0m" in render_comparison_text(slower(), 80, color=True)
    assert text.splitlines()[-2].startswith("gate FAILED: 1 of 1 rule")


WHOLE = """\
A step is 10.0 ms longer in B (+10.0 %).
What changed: storage-local +10.5 ms.

  A, the baseline:  before
  B, the candidate: after

ms per step                 A       B   B - A     95 % interval
a step                 100.00  110.00  +10.00   +8.00 to +12.00  more
storage-local            5.00   15.50  +10.50   +8.50 to +12.50  more
cpu-preprocess           1.00    1.10   +0.10    -0.20 to +0.40  the same
productive              94.00   93.40   -0.60    -2.60 to +1.40  within chance
more, less: beyond what chance explains. within chance: possibly no difference
at all. the same: apart by less than 1 % of a step.

storage-local: The data path waits for a local disk (node-a rank 1 vda)
"""


def by_hand() -> Comparison:
    """10 ms longer, by rows that add up."""

    def row(
        name: str, title: str, *ms: float, significance: Significance, whose: str = ""
    ) -> ComparisonRow:
        a, b, low, high = (value * MS for value in ms)
        return ComparisonRow(name, title, a, b, b - a, low, high, significance, whose)

    local = "The data path waits for a local disk"
    rows = (
        row(
            "storage-local",
            local,
            5,
            15.5,
            8.5,
            12.5,
            significance="more",
            whose="node-a rank 1 vda",
        ),
        row("cpu-preprocess", "", 1, 1.1, -0.2, 0.4, significance="the same"),
        row(PRODUCTIVE, "", 94, 93.4, -2.6, 1.4, significance="within chance"),
    )
    step = row("a step", "", 100, 110, 8, 12, significance="more")
    return Comparison(make_run("before"), make_run("after"), step, rows, (), (), None)


def test_the_comparison_text_matches_the_expected_output() -> None:
    assert render_comparison_text(by_hand(), 80) == WHOLE


def test_columns_of_large_numbers_stay_separated() -> None:
    step = ComparisonRow(
        "a step", "", 1622.24 * MS, 43.69 * MS, -1578.55 * MS, -1794.78 * MS, -1362.32 * MS, "less"
    )
    whole = dataclasses.replace(by_hand(), step=step, rows=())
    lines = render_comparison_text(whole, 80).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("ms per step"))
    assert lines[at : at + 2] == [
        "ms per step                 A       B    B - A        95 % interval",
        "a step                1622.24   43.69 -1578.55 -1794.78 to -1362.32  less",
    ]


def test_the_legend_explains_only_words_in_use() -> None:
    result = by_hand()
    assert write_legend(dataclasses.replace(result, rows=())) == (
        "more, less: beyond what chance explains."
    )
    step = dataclasses.replace(result.step, significance="cannot tell")
    assert write_legend(dataclasses.replace(result, step=step, rows=())) == (
        "cannot tell: too few steps to estimate chance."
    )


def test_markdown_and_json_show_the_same_numbers() -> None:
    slower_run = slower()
    lines = render_comparison_markdown(slower_run).splitlines()
    assert lines[:2] == ["<!-- clusterprof:compare -->", "### clusterprof: what changed"]
    assert any(line.startswith("| **storage-local** | 5.0 ms | 15.0 ms |") for line in lines)
    document = json.loads(render_comparison_json(slower_run))
    assert (document["format"], document["exit_code"]) == ("clusterprof-compare", 3)
    assert document["parts"][0]["name"] == "storage-local"
    assert document["parts"][0]["says"] == "more"
    parts = sum(part["difference_ns"] for part in document["parts"])
    assert parts == pytest.approx(document["step"]["difference_ns"])


def test_hostile_names_are_escaped() -> None:
    slower_run = slower()
    for text in HOSTILE[::3]:
        row = dataclasses.replace(slower_run.rows[0], name=text, title=text, culprit=text)
        a = dataclasses.replace(slower_run.a, title=text)
        bad = dataclasses.replace(slower_run, a=a, rows=(row,), unmet_preconditions=(text,))
        for out in (
            render_comparison_text(bad),
            render_comparison_markdown(bad),
            render_comparison_json(bad),
        ):
            assert "\x1b" not in out and "\x9b" not in out and "\u202e" not in out
            out.encode("utf-8")
            assert not any(line.lstrip().startswith("::") for line in out.splitlines()), repr(text)
        assert "<script" not in render_comparison_markdown(bad)
