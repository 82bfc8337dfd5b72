"""Lines and stacks in the JSON report: keys, limits, sums, and reports that lack them."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from clusterprof.gate.stored_report import load_report
from clusterprof.output.renderers.json import Json
from clusterprof.report.code import CodeProfile, Place, StackTime
from clusterprof.report.model import Report
from tests.support.code_profiles import LINES, S, add_code_profile, make_report_with_code
from tests.support.reports import make_storage_report
from tests.support.schema_check import list_errors


def schema() -> Any:
    file = resources.files("clusterprof.output.renderers") / "schema" / "report.schema.json"
    return json.loads(file.read_text(encoding="utf-8"))


def parsed(report: Report) -> Any:
    return json.loads(Json().render(report))


def test_a_finding_lists_its_source_lines() -> None:
    document = parsed(make_report_with_code())
    finding = document["findings"][0]
    assert finding["lines"][0] == {
        "place": {"file": "/job/train.py", "line": 42, "function": "Images.augment"},
        "library": {
            "file": "/venv/lib/python3/dist-packages/PIL/Image.py",
            "line": 2450,
            "function": "Image.resize",
        },
        "lost_ns": 142 * S,
        "share_ratio": 0.71,
        "error_ratio": 0.042,
        "samples": 460,
        "stage": "transform",
        "transform": "Resize",
        "library_ratio": 1.0,
    }
    assert finding["lines"][1]["library"] is None
    assert finding["lines_compared"] is False
    assert document["findings"][1]["lines"] == []


def test_the_code_section_holds_lines_places_and_stacks() -> None:
    code = parsed(make_report_with_code())["code"]
    assert [line["place"]["line"] for line in code["lines"]] == [42, 7]
    assert code["lines"][0]["cause"] == "storage-local" and code["lines_left_out"] == 0
    assert [place["line"] for place in code["places"]] == [90, 733, 42, 2450, 7]  # in use
    assert code["is_library"] == [False, True, False, True, False]
    assert code["stacks"][2:] == [
        {"cause": "storage-local", "rank": 0, "places": [0, 1, 4], "lost_ns": 2 * S, "samples": 40},
        {"cause": "unattributed", "rank": 0, "places": [], "lost_ns": S, "samples": 20},
    ]
    assert code["samples"] == 1234 and code["notes"] == ["rank 7 was not sampled"]
    assert parsed(make_storage_report())["code"] is None


def large() -> Report:
    """A report with 700 stacks of 80 frames, 1 to 700 ns, largest first, and 25 lines."""
    places = tuple(Place("/t.py", line, "f") for line in range(1, 780))
    stacks = tuple(
        StackTime("a" if at % 2 else "b", at % 3, tuple(range(at, at + 80)), 700 - at, 1)
        for at in range(700)
    )
    profile = CodeProfile(places, (False,) * len(places), stacks, 700)
    return add_code_profile(make_storage_report(), (LINES[0],) * 25, profile)


def test_entry_counts_are_limited_and_sums_kept() -> None:
    document = parsed(large())
    code = document["code"]
    assert len(document["findings"][0]["lines"]) == 20
    assert len(code["stacks"]) == 500 + 6  # two causes, three ranks
    assert sum(stack["lost_ns"] for stack in code["stacks"]) == 700 * 701 // 2
    assert sum(stack["samples"] for stack in code["stacks"]) == 700
    assert {len(stack["places"]) for stack in code["stacks"][:500]} == {64}
    innermost = [code["places"][stack["places"][-1]]["line"] for stack in code["stacks"][:500]]
    assert innermost == list(range(80, 580))
    assert len(code["lines"]) == 30 and code["lines_left_out"] == 670


@pytest.mark.parametrize("report", [make_report_with_code(), large()], ids=["small", "large"])
def test_the_code_section_matches_the_schema(report: Report) -> None:
    assert list(list_errors(parsed(report), schema())) == []


def store(document: Any, folder: Path) -> Path:
    file = folder / "report.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    return file


def test_a_report_of_an_older_version_is_accepted(tmp_path: Path) -> None:
    document = parsed(make_report_with_code())
    del document["code"]
    for finding in document["findings"]:
        del finding["lines"], finding["lines_compared"]
    report = load_report(store(document, tmp_path))
    assert report.code is None and report.findings[0].lines == ()
    assert report.lost_ns == make_storage_report().lost_ns


@pytest.mark.parametrize("hostile", [7, "x", [], {"places": [[]], "stacks": {"rank": -1}}])
def test_invalid_code_sections_are_ignored_when_loading(hostile: Any, tmp_path: Path) -> None:
    document = parsed(make_report_with_code())
    document["code"] = hostile
    document["findings"][0]["lines"] = hostile
    report = load_report(store(document, tmp_path))
    assert dataclasses.replace(report, title="") == dataclasses.replace(
        load_report(store(parsed(make_storage_report()), tmp_path)), title=""
    )
