"""What an imported trace cannot show is not measured: neither 0.0 % nor a gate that passes."""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from clusterprof.analysis.attribution.rank.claims import find_unmeasured_causes
from clusterprof.output.renderers.text.wording import (
    describe_total_loss,
    format_evidence_value,
    format_rank_share,
    is_measured,
)
from clusterprof.probe import layout
from clusterprof.report.model import Evidence
from tests.support.reports import make_clean_report

CAUSES = ("storage-local", "storage-contention", "cpu-gc", "launch-bound", "input-wait")


def rank(*kinds: int, importer: str = "kineto", threads: int = 0) -> Any:
    """A rank whose trace has spans of these kinds."""
    versions = {"importer": importer} if importer else {}
    chunk = SimpleNamespace(header=SimpleNamespace(versions=versions))
    main = SimpleNamespace(spans=dict.fromkeys(kinds), threads=("one",) * threads)
    return SimpleNamespace(chunk=chunk, main=main, workers=())


def measured_causes(document: Any, *claimed: str) -> set[str]:
    by_key = {cause: cause in claimed for cause in CAUSES}
    return set(CAUSES) - set(find_unmeasured_causes(document, MappingProxyType(by_key)))


def test_measured_causes_of_a_trace_follow_its_marks() -> None:
    assert measured_causes(rank(layout.STEP)) == {"input-wait"}
    assert measured_causes(rank(layout.STARVED)) == {"input-wait", "launch-bound"}
    assert measured_causes(rank(layout.LOADING, layout.GC)) == {
        "input-wait",
        "storage-local",
        "cpu-gc",
    }
    assert measured_causes(rank(), "storage-contention") == {
        "input-wait",
        "storage-contention",
    }  # it claimed


def test_recordings_and_sampled_threads_measure_all_causes() -> None:
    assert measured_causes(rank(importer="")) == set(CAUSES)
    assert measured_causes(rank(threads=1)) == set(CAUSES)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (math.nan, "ratio", "not measured"),
        (0.0, "ratio", "0.0 %"),
        (0.0004, "ratio", "below 0.1 %"),
        (0.0005, "ratio", "0.1 %"),
        (0.0, "ns", "0 ns"),
    ],
)
def test_small_and_missing_evidence_values_are_not_printed_as_zero(
    value: float, unit: str, text: str
) -> None:
    assert format_evidence_value(Evidence("x", value, unit)) == text


def test_unmeasured_loss_is_not_printed_as_zero() -> None:
    report = make_clean_report()
    assert describe_total_loss(report).startswith("0.")
    blind = replace(report.ranks[0], device="", lost_ns=0)
    assert not is_measured(blind) and format_rank_share(blind) == "-"
    nobody = replace(report, ranks=(blind,), lost_ns=0)
    assert describe_total_loss(nobody) == "Not measured: neither an accelerator nor a host wait."
    waited = replace(blind, lost_ns=5)  # the host waited: a bound is known
    assert is_measured(waited) and format_rank_share(waited).endswith(" %")
