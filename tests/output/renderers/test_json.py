"""The JSON report: valid by its published schema, strict, and with sums that can be redone."""

from __future__ import annotations

import dataclasses
import json
import math
from importlib import resources
from typing import Any

import pytest

from clusterprof.output.renderers.json import Json
from clusterprof.report.model import Evidence, Metric, Report
from tests.support.reports import ALL, make_storage_report
from tests.support.schema_check import list_errors


def schema() -> Any:
    file = resources.files("clusterprof.output.renderers") / "schema" / "report.schema.json"
    return json.loads(file.read_text(encoding="utf-8"))


def parsed(report: Report) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(Json().render(report), parse_constant=refuse)


@pytest.mark.parametrize("name", ALL)
def test_every_report_matches_the_schema(name: str) -> None:
    assert list(list_errors(parsed(ALL[name]()), schema())) == []


def test_the_schema_refuses_invalid_documents() -> None:
    document = parsed(make_storage_report())
    document["ledger"]["lost_ns"] = -1
    document["findings"][0]["grade"] = "E"
    document["ranks"][0]["surprise"] = 1
    del document["emulated"]
    document["metrics"][0]["value"] = "0.6"
    assert sorted(list_errors(document, schema())) == [
        "$.emulated is missing",
        "$.findings[0].grade is not one of ['A', 'B', 'C', 'D']",
        "$.ledger.lost_ns is below 0",
        "$.metrics[0].value is not of type ['number', 'null']",
        "$.ranks[0].surprise is not in the schema",
    ]


def test_every_object_of_the_schema_is_closed_and_complete() -> None:
    """A key that is written must be required, or a reader cannot rely on it.

    `failures` is left out where nothing failed.
    """

    def objects(node: Any) -> list[Any]:
        if isinstance(node, dict):
            inner = [result for value in node.values() for result in objects(value)]
            own = "object" in (node.get("type"), *node.get("type", ()))
            return [node, *inner] if own else inner
        return (
            [result for item in node for result in objects(item)] if isinstance(node, list) else []
        )

    result = objects(schema())
    assert len(result) == 51  # one for each class of the document, and those of the model in it
    for node in result:
        assert node["additionalProperties"] is False
        assert node["required"] == [name for name in node["properties"] if name != "failures"]


def test_what_failed_is_a_key_of_its_own_and_left_out_where_nothing_did() -> None:
    report = make_storage_report()
    assert "failures" not in parsed(report)
    failed = dataclasses.replace(report, failures=("rank 3 is gone",), notes=("rank 3 is gone",))
    assert parsed(failed)["failures"] == parsed(failed)["notes"] == ["rank 3 is gone"]


@pytest.mark.parametrize("name", ALL)
def test_recomputed_sums_match_to_the_nanosecond(name: str) -> None:
    document = parsed(ALL[name]())
    ledger = document["ledger"]
    buckets = {b["cause"]: b["ns"] for b in ledger["buckets"]}
    assert sum(buckets.values()) == ledger["lost_ns"]
    assert buckets["unattributed"] == ledger["unattributed_ns"]
    for finding in document["findings"]:
        assert finding["outside_steps"] or finding["lost_ns"] == buckets[finding["cause"]]
    assert sum(r["ns"] for r in ledger["unattributed_reasons"]) == ledger["unattributed_ns"]
    assert sum(b["ns"] for b in ledger["outside_buckets"]) == ledger["outside_ns"]
    for part in (ledger, *document["ranks"]):
        whole = part["unmeasured_ns"] + part["outside_ns"] + part["in_step_ns"]
        assert whole == part["window_ns"]
        assert part["productive_ns"] + part["lost_ns"] == part["in_step_ns"]
    for rank in document["ranks"]:
        assert sum(b["ns"] for b in rank["buckets"]) == rank["lost_ns"]
    fill = document["underfill"]
    for part in (fill, *fill["ranks"]) if fill else ():
        parts = ("lost_ns", "filled_ns", "underfilled_ns", "unmeasured_ns")
        assert sum(part[name] for name in parts) == part["busy_ns"]
        assert sum(r["ns"] for r in part["unmeasured_reasons"]) == part["unmeasured_ns"]
    assert sum(r["lost_ns"] for r in document["ranks"]) == ledger["lost_ns"]


def test_values_that_are_not_finite_become_null() -> None:
    odd = (Evidence("a", math.nan, "ratio"), Evidence("b", math.inf, "ratio"))
    report = make_storage_report()
    finding = dataclasses.replace(report.findings[0], evidence=odd, share_ratio=math.nan)
    metrics = (Metric("x_ratio", math.nan, "ratio"), Metric("y_ratio", None, "ratio", "why"))
    document = parsed(dataclasses.replace(report, findings=(finding,), metrics=metrics))
    assert [item["value"] for item in document["findings"][0]["evidence"]] == [None, None]
    assert document["findings"][0]["share_ratio"] is None
    assert [metric["value"] for metric in document["metrics"]] == [None, None]
