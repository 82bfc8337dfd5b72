"""The exposition, whole, by hand; and what a parser of OpenMetrics insists on."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from clusterprof.output.renderers import openmetrics
from clusterprof.output.renderers.openmetrics import OpenMetrics
from clusterprof.report.impact import CauseImpact, Impact
from clusterprof.report.model import Metric, RankLedger, Report
from tests.support.reports import ALL, S, make_storage_report, make_underused_report

_SAMPLE = re.compile(
    r'([a-zA-Z_:][a-zA-Z0-9_:]*)(\{(?:[a-zA-Z_]+="(?:[^"\\\n]|\\["\\n])*",?)*\})? (\S+)'
)


def tiny() -> Report:
    """One rank: of 10 s, 8 productive, 1 lost, 1 outside."""
    rank = RankLedger(
        'no"de\\a',
        3,
        7,
        "GPU-1",
        "device-samples",
        10 * S,
        0,
        S,
        9 * S,
        8 * S,
        S,
        (("storage-local", S - 1), ("unattributed", 1)),
        (("startup", S),),
        5,
        1.0,
        (("storage-local", 3 * S),),
    )
    metrics = (
        Metric("gpu.busy_ratio", 0.5, "ratio"),
        Metric("gpu.sm_active_ratio", None, "ratio", "no GPM"),
        Metric("stall.storage_ratio", 0.25, "ratio", "", "at most"),
        Metric("step.p95_ns", 1.5 * S, "ns"),
        Metric("step.count", 5.0, "count"),
        Metric("new.thing_bytes", 4.0, "bytes"),
    )
    return Report(
        "run",
        False,
        (),
        (rank,),
        10 * S,
        0,
        S,
        9 * S,
        8 * S,
        S,
        (),
        1,
        (),
        (),
        metrics,
        (),
        impact=Impact(
            2.0, "USD", 0.1, None, (CauseImpact("storage-local", 0.1, None, None, None),)
        ),
    )


WHO = 'node="no\\"de\\\\a",rank="3",device="GPU-1"'
WHOLE = f"""\
# TYPE clusterprof_report info
# HELP clusterprof_report {openmetrics.REPORT.help}
clusterprof_report_info{{title="run",emulated="false"}} 1.0
# TYPE clusterprof_observed_gpu_seconds counter
# UNIT clusterprof_observed_gpu_seconds seconds
# HELP clusterprof_observed_gpu_seconds {openmetrics.OBSERVED.help}
clusterprof_observed_gpu_seconds_total{{state="productive",{WHO}}} 8.0
clusterprof_observed_gpu_seconds_total{{state="lost",{WHO}}} 1.0
clusterprof_observed_gpu_seconds_total{{state="outside_steps",{WHO}}} 1.0
clusterprof_observed_gpu_seconds_total{{state="unmeasured",{WHO}}} 0.0
# TYPE clusterprof_lost_gpu_seconds counter
# UNIT clusterprof_lost_gpu_seconds seconds
# HELP clusterprof_lost_gpu_seconds {openmetrics.LOST.help}
clusterprof_lost_gpu_seconds_total{{cause="storage-local",{WHO}}} 0.999999999
clusterprof_lost_gpu_seconds_total{{cause="unattributed",{WHO}}} 1e-09
# TYPE clusterprof_caused_gpu_seconds counter
# UNIT clusterprof_caused_gpu_seconds seconds
# HELP clusterprof_caused_gpu_seconds {openmetrics.CAUSED.help}
clusterprof_caused_gpu_seconds_total{{cause="storage-local",{WHO}}} 3.0
# TYPE clusterprof_outside_gpu_seconds counter
# UNIT clusterprof_outside_gpu_seconds seconds
# HELP clusterprof_outside_gpu_seconds {openmetrics.OUTSIDE.help}
clusterprof_outside_gpu_seconds_total{{cause="startup",{WHO}}} 1.0
# TYPE clusterprof_steps counter
# HELP clusterprof_steps {openmetrics.STEPS.help}
clusterprof_steps_total{{{WHO}}} 5.0
# TYPE clusterprof_rank_coverage_ratio gauge
# UNIT clusterprof_rank_coverage_ratio ratio
# HELP clusterprof_rank_coverage_ratio {openmetrics.COVERAGE.help}
clusterprof_rank_coverage_ratio{{{WHO}}} 1.0
# TYPE clusterprof_lost_cost gauge
# HELP clusterprof_lost_cost {openmetrics.COST.help}
clusterprof_lost_cost{{cause="storage-local",currency="USD"}} 0.1
# TYPE clusterprof_gpu_busy_ratio gauge
# UNIT clusterprof_gpu_busy_ratio ratio
# HELP clusterprof_gpu_busy_ratio {openmetrics.FAMILY_BY_METRIC["gpu.busy_ratio"].help}
clusterprof_gpu_busy_ratio{{bound="exact"}} 0.5
# TYPE clusterprof_stall_ratio gauge
# UNIT clusterprof_stall_ratio ratio
# HELP clusterprof_stall_ratio {openmetrics.STALL.help}
clusterprof_stall_ratio{{stall="storage",bound="at most"}} 0.25
# TYPE clusterprof_step_seconds gauge
# UNIT clusterprof_step_seconds seconds
# HELP clusterprof_step_seconds {openmetrics.STEP.help}
clusterprof_step_seconds{{percentile="95"}} 1.5
# TYPE clusterprof_metric gauge
# HELP clusterprof_metric {openmetrics.OTHER.help}
clusterprof_metric{{metric="new.thing_bytes",unit="bytes",bound="exact"}} 4.0
# TYPE clusterprof_unknown gauge
# HELP clusterprof_unknown {openmetrics.UNKNOWN.help}
clusterprof_unknown{{metric="gpu.sm_active_ratio",reason="no GPM"}} 1.0
# EOF
"""


def test_the_exposition_matches_the_expected_text() -> None:
    assert OpenMetrics().render(tiny()) == WHOLE


def test_a_textfile_uses_the_older_exposition_format() -> None:
    lines = OpenMetrics(prometheus=True).render(tiny()).splitlines()
    assert lines[:6] == [
        f"# HELP clusterprof_report_info {openmetrics.REPORT.help}",
        "# TYPE clusterprof_report_info gauge",
        'clusterprof_report_info{title="run",emulated="false"} 1.0',
        f"# HELP clusterprof_observed_gpu_seconds_total {openmetrics.OBSERVED.help}",
        "# TYPE clusterprof_observed_gpu_seconds_total counter",
        f'clusterprof_observed_gpu_seconds_total{{state="productive",{WHO}}} 8.0',
    ]
    assert not [line for line in lines if line.startswith(("# EOF", "# UNIT"))]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("prometheus", [False, True])
def test_every_report_follows_the_openmetrics_grammar(name: str, prometheus: bool) -> None:
    text = OpenMetrics(prometheus).render(ALL[name]())
    assert text.endswith("\n")
    lines = text.splitlines()
    if not prometheus:
        assert lines.pop() == "# EOF"
    types: dict[str, str] = {}
    seen = set()
    for line in lines:
        if line.startswith("#"):
            _, word, family, rest = line.split(" ", 3)
            if word == "TYPE":
                assert family not in types, "a family stands in one piece"
                types[family] = rest
            if word == "UNIT":
                assert family.endswith("_" + rest)
            continue
        match = _SAMPLE.fullmatch(line)
        assert match, line
        assert match[1] + (match[2] or "") not in seen, "each set of labels once"
        seen.add(match[1] + (match[2] or ""))
        float(match[3])
        suffix = (
            ""
            if prometheus
            else {"counter": "_total", "info": "_info", "gauge": ""}[rest_of(types)]
        )
        assert match[1] == list(types)[-1] + suffix


def rest_of(types: dict[str, str]) -> str:
    """The type of the family that was declared last."""
    return list(types.values())[-1]


def test_counters_of_a_restarted_rank_are_summed() -> None:
    report = tiny()
    again = replace(report, ranks=(*report.ranks, *report.ranks))
    text = OpenMetrics().render(again)
    assert f"clusterprof_steps_total{{{WHO}}} 10.0\n" in text
    assert f"clusterprof_rank_coverage_ratio{{{WHO}}} 1.0\n" in text


def test_dcgm_names_are_used_only_for_nvidia_devices() -> None:
    text = OpenMetrics().render(make_underused_report())
    assert 'DCGM_FI_DEV_GPU_UTIL{UUID="GPU-1",Hostname="node-a"} 99.0\n' in text
    assert 'DCGM_FI_PROF_SM_ACTIVE{UUID="GPU-0",Hostname="node-a"} 0.297\n' in text
    assert 'DCGM_FI_DEV_FB_USED{UUID="GPU-0",Hostname="node-a"} 21504.0\n' in text
    assert "DCGM" not in OpenMetrics().render(replace(make_underused_report(), emulated=True))
    assert "DCGM" not in OpenMetrics().render(make_storage_report())  # nothing was measured of it


def test_family_names_are_unique_and_end_with_their_unit() -> None:
    names = [described.name for described in openmetrics.ALL_FAMILIES]
    assert len(set(names)) == len(names)
    for described in openmetrics.ALL_FAMILIES:
        assert not described.unit or described.name.endswith("_" + described.unit)
        assert described.help.endswith(".") and "\n" not in described.help
