"""Reports that were stored: read back as they were, and nothing else is a report."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from clusterprof.errors import NoRecording
from clusterprof.gate import Policy, judge_runs, parse_any_rule
from clusterprof.gate.stored_report import is_report, load_report
from clusterprof.output.renderers.json import Json
from tests.support.gate_runs import make_run
from tests.support.reports import ALL

RULES = [parse_any_rule("gpu.busy_ratio >= 70%"), parse_any_rule("step.p90_ns <= 1 s")]


def stored(path: Path, report: object) -> Path:
    path.write_text(Json().render(report))  # type: ignore[arg-type]
    return path


def test_a_stored_report_gives_the_same_verdict(tmp_path: Path) -> None:
    report = make_run(storage=0.1)
    back = load_report(stored(tmp_path / "report.json", report))
    assert is_report(tmp_path / "report.json")
    for name in (
        "ranks",
        "metrics",
        "steps",
        "fingerprint",
        "nodes",
        "job",
        "in_step_ns",
        "emulated",
    ):
        assert getattr(back, name) == getattr(report, name), name
    assert [finding.cause for finding in back.findings] == [
        finding.cause for finding in report.findings
    ]
    named = dataclasses.replace(report, title=back.title)
    assert judge_runs(back, RULES, Policy()) == judge_runs(named, RULES, Policy())


@pytest.mark.parametrize("name", ALL)
def test_every_consistent_report_is_loaded(name: str, tmp_path: Path) -> None:
    report = ALL[name]()
    back = load_report(stored(tmp_path / "report.json", report))
    assert back.metrics == report.metrics


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("", "not a report of this version"),
        ("{", "not a report of this version"),
        ("{}", "missing required field"),
        ("[1]", "Expected `object`"),
        ('{"format": "clusterprof-gate"}', "format"),
        ("nonsense", "not a report of this version"),
        ("{" * 100_000, "not a report of this version"),
    ],
)
def test_files_other_than_reports_are_refused(text: str, printed: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(NoRecording) as caught:
        load_report(path)
    assert printed in caught.value.message
    assert caught.value.exit_code == 5


def test_folders_and_missing_files_are_not_stored_reports(tmp_path: Path) -> None:
    assert not is_report(tmp_path)
    assert not is_report(tmp_path / "nothing.json")
    with pytest.raises(NoRecording, match="no such file"):
        load_report(tmp_path / "nothing.json")


def test_unknown_keys_of_later_versions_are_ignored(tmp_path: Path) -> None:
    path = stored(tmp_path / "report.json", make_run())
    document = json.loads(path.read_text())
    document["history"] = {"stretches": 3}
    document["ranks"][0]["surprise"] = 1
    path.write_text(json.dumps(document))
    assert load_report(path).ranks == make_run().ranks


def test_older_reports_without_optional_keys_give_the_same_verdict(tmp_path: Path) -> None:
    path = stored(tmp_path / "report.json", make_run(storage=0.1))
    document = json.loads(path.read_text())
    for key in ("underfill", "worth", "tail", "history"):
        del document[key]
    for key in ("hosts", "clock_bound_ns", "clock_why"):
        del document["job"][key]
    del document["ledger"]["caused_by_nobody"]
    for rank in document["ranks"]:
        del rank["caused"]
    for finding in document["findings"]:
        for key in ("persistence", "compared", "since", "more_why", "withheld", "evidence"):
            del finding[key]
        del finding["remedies"]
        for culprit in finding["culprits"]:
            for key in ("own_ns", "others_ns", "victims", "recoverable_ns"):
                del culprit[key]
    before = load_report(path)
    path.write_text(json.dumps(document))
    older = load_report(path)
    assert judge_runs(older, RULES, Policy()) == judge_runs(before, RULES, Policy())


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("ranks", 0, "steps"), "60", "Expected `int`, got `str` - at `$.ranks[0].steps`"),
        (("ranks", 0, "rank"), 0.5, "Expected `int | null`, got `float` - at `$.ranks[0].rank`"),
        (("metrics", 0, "bound"), "about", "Invalid enum value 'about' - at `$.metrics[0].bound`"),
        (("ranks", 0, "caused"), 1, "Expected `array`, got `int` - at `$.ranks[0].caused`"),
        (("schema_version",), 2, "Invalid enum value 2 - at `$.schema_version`"),
    ],
)
def test_a_key_of_wrong_type_is_refused_with_its_path(
    place: tuple[str | int, ...], value: object, message: str, tmp_path: Path
) -> None:
    path = stored(tmp_path / "report.json", make_run())
    document = json.loads(path.read_text())
    parent = document
    for key in place[:-1]:
        parent = parent[key]
    parent[place[-1]] = value
    path.write_text(json.dumps(document))
    with pytest.raises(NoRecording) as caught:
        load_report(path)
    assert caught.value.message == f"{path}: is not a report of this version: {message}"
    assert caught.value.remedy == (
        "a report is made by: clusterprof analyze RUN --json -o report.json"
    )
