"""Series of a running job: bounded, never going back, the same after a restart."""

from __future__ import annotations

import json
import re

import pytest

from clusterprof.output.renderers.live_counters import (
    FAMILIES,
    MAX_CULPRITS,
    MAX_LABEL_CHARACTERS,
    MAX_RANKS,
    LiveSeries,
    decode_series,
    shorten_label,
)
from clusterprof.output.renderers.openmetrics import render_families
from clusterprof.report.live import WAIT_FOR_RANKS, JobPart, NodePart, RankPart, RankStatus

S = 1_000_000_000
STATUS = RankStatus("node", 0.75, None, 250_000_000, 3 * S)
START_NS = 1_700_000_000 * S


def rank(number: int, cause: str = "storage-local", ns: int = 2 * S, node: str = "a") -> RankPart:
    """A rank that worked for 3 s, lost `ns`, and was outside its steps for 1 s."""
    return RankPart(
        node=node,
        rank=number,
        device=f"GPU-{number}",
        source="device-samples",
        is_emulated=False,
        productive_ns=3 * S,
        lost_ns=ns,
        outside_ns=S,
        lost={cause: ns},
        caused={cause: ns},
        steps=4,
        status=STATUS,
    )


def part(*ranks: RankPart, node: str = "a", skipped_ns: int = 0) -> JobPart:
    state = NodePart(node, "recording", START_NS + 60 * S, 0, skipped_ns, {"recorder": 5 * S})
    return JobPart("slurm-42", (state,), ranks, {})


def render(series: LiveSeries) -> dict[str, float]:
    """Return the value of each series by its name and labels."""
    lines = render_families(series.build_families()).splitlines()
    assert lines[-1] == "# EOF"
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def test_counters_add_up_and_gauges_keep_the_latest_value() -> None:
    series = LiveSeries("node", START_NS)
    series.add(part(rank(3)))
    series.add(part(rank(3, WAIT_FOR_RANKS)))
    values = render(series)
    who = 'job_name="slurm-42",node="a",gpu="GPU-3",rank="3"'
    lost = "clusterprof_live_lost_gpu_seconds_total"
    assert values[f'{lost}{{{who},cause="storage-local"}}'] == 2
    assert values[f'{lost}{{{who},cause="wait-for-ranks"}}'] == 2
    observed = "clusterprof_live_observed_gpu_seconds_total"
    assert values[f'{observed}{{{who},state="productive"}}'] == 6
    assert values[f'{observed}{{{who},state="unmeasured"}}'] == 0
    assert values[f"clusterprof_live_steps_total{{{who}}}"] == 8
    assert values[f"clusterprof_live_step_seconds{{{who}}}"] == 0.25
    assert values[f"clusterprof_live_since_step_seconds{{{who}}}"] == 3
    assert values[f"clusterprof_live_gpu_busy_ratio{{{who}}}"] == 0.75
    job = 'job_name="slurm-42"'
    assert values[f"clusterprof_live_start_timestamp_seconds{{{job}}}"] == 1_700_000_000
    assert values[f'clusterprof_live_settled_timestamp_seconds{{{job},node="a"}}'] == 1_700_000_060
    cpu = "clusterprof_live_recorder_cpu_seconds_total"
    assert values[f'{cpu}{{{job},node="a",process="recorder"}}'] == 5


def test_unknown_metrics_have_a_reason_and_no_value() -> None:
    series = LiveSeries("node", START_NS)
    series.add(part(rank(3)))
    (unknown,) = [name for name in render(series) if name.startswith("clusterprof_live_unknown")]
    assert 'metric="clusterprof_live_gpu_sm_active_ratio"' in unknown
    assert 'reason="it is not recorded for this device"' in unknown
    assert not any("sm_active_ratio{" in name for name in render(series))


def test_culprit_time_of_a_job_adds_up_to_its_lost_time() -> None:
    series = LiveSeries("job", START_NS)
    late = rank(1, "cpu-gc", 0, "b")
    victim = JobPart(
        "slurm-42",
        part().nodes,
        (
            # Rank 0 lost 2 s, of which 1.5 s waiting for rank 1, and 0.5 s in a transfer.
            RankPart(
                "a",
                0,
                "GPU-0",
                "device-samples",
                False,
                lost_ns=2 * S,
                steps=1,
                lost={"cpu-gc": 3 * S // 2, "net-transfer": S // 2},
            ),
            RankPart(
                "b",
                1,
                "GPU-1",
                "device-samples",
                False,
                lost_ns=S,
                steps=1,
                lost={"cpu-gc": S},
                caused={"cpu-gc": 5 * S // 2},
            ),
        ),
        {"net-transfer": S // 2},
    )
    assert late.lost == {"cpu-gc": 0}
    series.add(victim)
    values = render(series)
    caused = {name: value for name, value in values.items() if "job_caused" in name}
    lost = {name: value for name, value in values.items() if "job_lost" in name}
    assert sum(caused.values()) == sum(lost.values()) == 3
    who = 'job_name="slurm-42",node="b",gpu="GPU-1",rank="1",cause="cpu-gc"'
    assert caused[f"clusterprof_job_caused_gpu_seconds_total{{{who}}}"] == 2.5
    nobody = 'job_name="slurm-42",node="",gpu="",rank="",cause="net-transfer"'
    assert caused[f"clusterprof_job_caused_gpu_seconds_total{{{nobody}}}"] == 0.5


@pytest.mark.parametrize("scope", ["node", "job"])
def test_series_are_bounded_and_never_go_back(scope: str) -> None:
    series = LiveSeries(scope, START_NS)  # type: ignore[arg-type]
    before: dict[str, float] = {}
    for number in range(0, 3000, 50):
        ranks = [rank(number + i, node=f"n{number}") for i in range(50)]
        series.add(part(*ranks))
        values = render(series)
        counters = {name: value for name, value in values.items() if "_total{" in name}
        assert all(counters[name] >= value for name, value in before.items())
        before = counters
    lost = [value for name, value in before.items() if "_lost_gpu_seconds_total" in name]
    assert sum(lost) == 3000 * 2, "what has no series of its own is in another"
    caused = [name for name in before if "_caused_gpu_seconds_total" in name]
    assert len(caused) <= MAX_CULPRITS + 1
    assert len({name for name in before if "live_steps_total" in name}) <= MAX_RANKS + 60
    assert not any("pid" in name or "/" in name for name in values)


def test_a_node_of_many_ranks_and_causes_stays_below_64_kb() -> None:
    series = LiveSeries("node", START_NS)
    causes = ["storage-local", "storage-remote", "cpu-preprocess", "cpu-gil", "net-transfer"]
    for number in range(200):
        for cause in (*causes, WAIT_FOR_RANKS, "unattributed"):
            series.add(part(rank(number % 16, cause)))
    assert len(render_families(series.build_families()).encode()) < 64 << 10


def test_a_job_of_a_thousand_ranks_stays_below_64_kb() -> None:
    series = LiveSeries("job", START_NS)
    causes = ["storage-local", "storage-remote", "cpu-preprocess", "cpu-gil", "net-transfer"]
    for cause in causes * 3:
        series.add(part(*[rank(number, cause, ns=S * number) for number in range(1024)]))
    assert len(render_families(series.build_families()).encode()) < 64 << 10


def test_counters_survive_a_restart() -> None:
    series = LiveSeries("node", START_NS)
    series.add(part(*[rank(number) for number in range(MAX_RANKS + 2)]))
    again = decode_series(json.loads(json.dumps(series.encode())))
    for one_more in (series, again):
        one_more.add(part(*[rank(number) for number in range(MAX_RANKS + 2)], skipped_ns=S))
    assert render(series) == render(again)


@pytest.mark.parametrize("damage", ["scope", "started_at_ns", "counters", "ranks", "job"])
def test_a_damaged_state_is_refused(damage: str) -> None:
    values = LiveSeries("node", START_NS).encode()
    del values[damage]
    with pytest.raises(ValueError, match="no series"):
        decode_series(values)


def test_external_labels_are_escaped_truncated_and_kept_unique() -> None:
    assert shorten_label('a"b\\c') == 'a"b\\c', "quotes are the renderer's"
    assert "\n" not in shorten_label("a\nb") and "\x1b" not in shorten_label("a\x1b[2Jb")
    long = [shorten_label("x" * 500 + end) for end in "ab"]
    assert len(set(long)) == 2 and {len(text) for text in long} == {MAX_LABEL_CHARACTERS}
    series = LiveSeries("node", START_NS)
    series.add(part(rank(0, node='evil"} 1\nfake{x="')))
    for line in render_families(series.build_families()).splitlines():
        assert line.startswith(("#", "clusterprof_live_")), line


def test_names_follow_the_conventions_of_prometheus() -> None:
    for families in FAMILIES.values():
        for described in families:
            assert re.fullmatch(r"clusterprof_(live|job)_[a-z_]+", described.name)
            if described.unit:
                assert described.name.endswith(described.unit)
            assert described.help.endswith(".")
