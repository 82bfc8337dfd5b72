"""The corpus: complete, readable, and consistent with its own taxonomy."""

from __future__ import annotations

from collections import Counter

from clusterprof_lab.families import FAMILY_OF
from clusterprof_lab.scenario import CORPUS, SEVERITIES, load_corpus
from clusterprof_lab.synth.simulate_faults import KINDS


def test_the_corpus_has_45_faults_and_6_nulls() -> None:
    groups = Counter(scenario.group for scenario in load_corpus())
    assert groups == {
        "storage": 8,
        "cpu": 9,
        "h2d-launch": 8,
        "network": 6,
        "sync": 7,
        "phase-device": 7,
        "null": 6,
    }


def test_every_scenario_has_its_required_fields() -> None:
    for scenario in load_corpus():
        assert scenario.title and len(scenario.what) > 60, scenario.id
        assert scenario.synth is not None, scenario.id
        specs = [scenario.synth, *scenario.synth.get("also", ())]
        assert all(s.get("fault", "none") in KINDS for s in specs), scenario.id
        if scenario.group == "null":
            assert (scenario.wanted.family, scenario.wanted.leaves) == ("", ())
            assert set(scenario.lost.values()) == {(0.0, 0.0)}
            continue
        assert (
            scenario.wanted.leaves
            and FAMILY_OF[scenario.wanted.leaves[0]] == scenario.wanted.family
        )
        lows = [scenario.lost[severity] for severity in SEVERITIES]
        assert all(0 < low < high < 1 for low, high in lows), scenario.id
        assert [high for _, high in lows[:2]] < [low for low, _ in lows[1:]], scenario.id


def test_faults_outside_steps_aim_at_time_outside_steps() -> None:
    outside = {scenario.id for scenario in load_corpus() if scenario.wanted.outside_steps}
    assert outside == {"phase-startup", "phase-restart", "phase-hang"}
    assert outside == {
        scenario.id for scenario in load_corpus() if (scenario.synth or {}).get("outside")
    }


def test_scenario_files_are_named_after_their_ids() -> None:
    assert [path.stem for path in sorted(CORPUS.glob("*.yaml"))] == [s.id for s in load_corpus()]
