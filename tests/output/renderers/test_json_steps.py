"""Blocks of steps and likeness in the JSON report: as the schema says, and nothing is lost."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources

from clusterprof.output.renderers.json import Json, build_document
from clusterprof.report.history import StepStats
from clusterprof.report.model import RunFingerprint
from tests.support.reports import make_clean_report
from tests.support.schema_check import list_errors

STEPS = StepStats(
    2,
    (4, 2),
    (400, 200),
    (410, 220),
    (410, 220),
    (300, 210),
    (110, 10),
    (("storage-local", "storage", (100, 0)), ("unattributed", "unattributed", (10, 10))),
    (((850, 3), (853, 1)), ((851, 2),)),
)


def test_step_blocks_and_likeness_are_written_as_columns() -> None:
    assert build_document(dataclasses.replace(make_clean_report(), steps=STEPS))["steps"] == {
        "width": 2,
        "steps": [4, 2],
        "step_ns": [400, 200],
        "in_step_ns": [410, 220],
        "measured_ns": [410, 220],
        "busy_ns": [300, 210],
        "lost_ns": [110, 10],
        "lost": [
            {"cause": "storage-local", "family": "storage", "ns": [100, 0]},
            {"cause": "unattributed", "family": "unattributed", "ns": [10, 10]},
        ],
        "lengths": ["850:3 853:1", "851:2"],
    }
    document = build_document(
        dataclasses.replace(make_clean_report(), steps=None, fingerprint=None)
    )
    assert document["steps"] is None and document["likeness"] is None


def test_the_schema_describes_steps_and_likeness() -> None:
    file = resources.files("clusterprof.output.renderers") / "schema" / "report.schema.json"
    schema = json.loads(file.read_text(encoding="utf-8"))
    alike = RunFingerprint(
        5,
        ("n-1",),
        (("H100", 8),),
        1,
        8,
        32.0,
        4096.0,
        ("device-samples",),
        (("torch", "2.13"),),
        ("580",),
        ("0.1",),
        1,
    )
    report = dataclasses.replace(make_clean_report(), steps=STEPS, fingerprint=alike)
    document = json.loads(Json().render(report))
    assert list(list_errors(document, schema)) == []
    assert document["likeness"]["gpu_models"] == [{"model": "H100", "gpus": 8}]
    document["steps"]["lengths"] = [1]
    document["likeness"]["restarts"] = -1
    assert sorted(list_errors(document, schema)) == [
        "$.likeness.restarts is below 0",
        "$.steps.lengths[0] is not of type ['string']",
    ]
