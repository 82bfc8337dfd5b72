"""The corpus: complete, readable, and consistent with its own taxonomy."""

from __future__ import annotations

from collections import Counter

from clusterprof_lab.families import FAMILY_OF
from clusterprof_lab.scenario import CORPUS, SEVERITIES, load_corpus
from clusterprof_lab.synth.simulate_faults import KINDS


def test_there_are_42_faults_and_6_nulls() -> None:
    groups = Counter(scenario.group for scenario in load_corpus())
    assert groups == {
        "storage": 8,
        "cpu": 9,
        "h2d-launch": 6,
        "network": 6,
        "sync": 7,
        "phase-device": 6,
        "null": 6,
    }


def test_every_scenario_says_what_it_must() -> None:
    for one in load_corpus():
        assert one.title and len(one.what) > 60, one.id
        assert one.synth is not None, one.id
        specs = [one.synth, *one.synth.get("also", ())]
        assert all(s.get("fault", "none") in KINDS for s in specs), one.id
        if one.group == "null":
            assert (one.wanted.family, one.wanted.leaves) == ("", ())
            assert set(one.lost.values()) == {(0.0, 0.0)}
            continue
        assert one.wanted.leaves and FAMILY_OF[one.wanted.leaves[0]] == one.wanted.family
        lows = [one.lost[severity] for severity in SEVERITIES]
        assert all(0 < low < high < 1 for low, high in lows), one.id
        assert [high for _, high in lows[:2]] < [low for low, _ in lows[1:]], one.id


def test_the_time_of_outside_faults_is_aimed_outside() -> None:
    outside = {one.id for one in load_corpus() if one.wanted.outside_steps}
    assert outside == {"phase-startup", "phase-restart", "phase-hang"}
    assert outside == {one.id for one in load_corpus() if (one.synth or {}).get("outside")}


def test_files_are_named_after_their_ids() -> None:
    assert [path.stem for path in sorted(CORPUS.glob("*.yaml"))] == [s.id for s in load_corpus()]
