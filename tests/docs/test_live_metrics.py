"""What the page of live metrics shows exists: metrics, labels, alerts, dashboards."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from clusterprof.config import load_profile
from clusterprof.output.renderers.live_counters import FAMILIES
from tests.support.dashboards import ADDED, check_layout, list_expressions, load_dashboard
from tests.support.manual_pages import ROOT
from tests.support.prometheus import WHY_NOT, run_promtool

PAGE = ROOT / "docs/live-metrics.md"
ALERTS = ROOT / "docs/grafana/alerts.yml"
BOARDS = ("live-cluster.json", "live-job.json", "live-node.json")
NAMES = {described.sample for families in FAMILIES.values() for described in families}
LABELS = {
    name: set(labels.replace("…", "metric, reason, target").replace(" ", "").split(","))
    for names, labels in re.findall(r"^\| (`clusterprof_.*?) \| (.*?) \|", PAGE.read_text(), re.M)
    for name in re.findall(r"`(\w+)`", names)
}
"""The labels of each metric, by the tables of the page."""


def list_queries() -> dict[str, str]:
    """Return all queries of the page, the alerts and the dashboards by where they stand."""
    out = {
        f"page {i}": text
        for i, text in enumerate(
            re.findall(r"^```promql\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
        )
    }
    for rule in load_rules():
        out[str(rule["alert"])] = str(rule["expr"])
    for name in BOARDS:
        out.update(
            {f"{name} {i}": text for i, text in enumerate(list_expressions(load_dashboard(name)))}
        )
    return out


def load_rules() -> list[dict[str, object]]:
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return list(group["rules"])


def test_the_page_lists_every_metric() -> None:
    assert LABELS.keys() == NAMES


@pytest.mark.parametrize("place", list_queries())
def test_queries_use_existing_metrics_and_labels(place: str) -> None:
    text = list_queries()[place]
    metrics = re.findall(r"\bclusterprof_\w+", text)
    assert metrics and set(metrics) <= NAMES
    for metric, selector in re.findall(r"(\bclusterprof_\w+)\{([^}]*)\}", text):
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) <= LABELS[metric] | ADDED
    by = {
        name.strip() for names in re.findall(r"by \(([^)]*)\)", text) for name in names.split(",")
    }
    assert by <= set().union(*(LABELS[metric] for metric in metrics)) | ADDED


@pytest.mark.parametrize("name", BOARDS)
def test_dashboards_are_well_formed(name: str) -> None:
    check_layout(load_dashboard(name))


def test_documented_alerts_match_the_rules_and_their_runbooks_exist() -> None:
    rules = load_rules()
    listed = re.findall(r"^\| (Clusterprof\w+) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert [rule["alert"] for rule in rules] == listed
    for rule in rules:
        annotations = rule["annotations"]
        assert isinstance(annotations, dict)
        runbook = str(annotations["runbook"]).replace("{{ $labels.cause }}", "storage-local")
        page, _, anchor = runbook.partition("#")
        text = (ROOT / "docs" / page).read_text(encoding="utf-8").lower()
        assert not anchor or re.search(rf"^#+ {anchor}$", text, re.M)


def test_the_documented_profile_loads(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    profile = tmp_path / "site.yaml"
    profile.write_text(next(re.finditer(r"^```yaml\n(extends.*?)^```", text, re.M | re.S))[1])
    values = load_profile(str(profile), environ={}, cwd=tmp_path).effective()["metrics"]
    assert values == {"to": ["9640-9647"], "interval_s": 15}


_OBSERVED = 'clusterprof_job_observed_gpu_seconds_total{job_name="j",state="productive"}'
_LOST = 'clusterprof_job_lost_gpu_seconds_total{job_name="j",cause="storage-remote"}'
_CAUSED = 'clusterprof_job_caused_gpu_seconds_total{job_name="j",node="n",rank="3",cause="cpu-gc"}'
RULE_TESTS = {
    "ClusterprofJobLosesTime": (
        {
            # 8 ranks; from minute 30 to 60 a fourth of their time is lost to storage.
            _OBSERVED: "0+480x120",
            _LOST: "0+0x30 0+120x30 3600+0x60",
        },
        {"job_name": "j", "cause": "storage-remote", "severity": "warning"},
    ),
    "ClusterprofCulprit": (
        {_OBSERVED: "0+480x120", _CAUSED: "0+0x30 0+120x30 3600+0x60"},
        {"job_name": "j", "node": "n", "rank": "3", "cause": "cpu-gc", "severity": "warning"},
    ),
    "ClusterprofNoStep": (
        {'clusterprof_job_since_step_seconds{job_name="j"}': "1x30 900x30 1x60"},
        {"job_name": "j", "severity": "critical"},
    ),
    "ClusterprofGpuNotMeasured": (
        {'clusterprof_live_coverage_ratio{job_name="j",node="n",gpu="g"}': "1x30 0.5x30 1x60"},
        {"job_name": "j", "node": "n", "gpu": "g", "severity": "info"},
    ),
}


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_the_alert_rules_are_valid() -> None:
    assert f"{len(load_rules())} rules found" in run_promtool("check", "rules", str(ALERTS))


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize("alert", RULE_TESTS)
def test_alerts_fire_and_resolve(alert: str, tmp_path: Path) -> None:
    """Minutes 30 to 60 are bad: quiet before, firing at 58, quiet again at 90."""
    series, labels = RULE_TESTS[alert]
    quiet = [{"eval_time": time, "alertname": alert} for time in ("25m", "90m")]
    firing = {"eval_time": "58m", "alertname": alert, "exp_alerts": [{"exp_labels": labels}]}
    test = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": k, "values": v} for k, v in series.items()],
                "alert_rule_test": quiet,
            }
        ],
    }
    path = tmp_path / "quiet.yml"
    path.write_text(json.dumps(test))
    run_promtool("test", "rules", str(path))
    test["tests"][0]["alert_rule_test"] = [firing]  # type: ignore[index]
    path.write_text(json.dumps(test))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True)
    # Annotations are compared, too: only they may differ from what is expected here.
    got = re.search(r"got:\[\s*(.*?)\s*\]\s*$", done.stdout + done.stderr, re.M | re.S)
    assert got and "Labels:{" in got[1], done.stdout + done.stderr
    for key, value in labels.items():
        assert f'{key}="{value}"' in got[1]
