"""What must not change a ledger: how it is cut, repeated or ordered; and what less sight may do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterprof.analysis.attribution.ledger import RankResult
from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.node.analyze import analyze_node
from clusterprof.trace.schema import Clock
from clusterprof.trace.writer import RecordingWriter
from tests.support.builders import make_header
from tests.support.random_jobs import LIMITS, SLOW, analyze_script, check_conservation, draw_scripts
from tests.support.recordings import MAIN, Script, iterate_seconds, make_training


@SLOW
@given(draw_scripts(), st.sampled_from([400, 900, 2_000, 7_000]))
def test_the_ledger_is_the_same_for_any_chunk_size(script: Script, chunk_ms: int) -> None:
    whole = analyze_script(script, 10**15)
    cut = analyze_script(script, chunk_ms * 1_000_000)
    assert len(whole) == 1
    for first, other in zip(whole, cut, strict=True):
        check_conservation(first)
        check_conservation(other)
        assert dataclasses.replace(first.ledger, buckets=()) == dataclasses.replace(
            other.ledger, buckets=()
        )
        # The split of a fetch leans on the other fetches of its chunk, so causes may differ a bit.
        mine, theirs = dict(first.ledger.buckets), dict(other.ledger.buckets)
        for id_ in {*mine, *theirs}:
            assert abs(mine.get(id_, 0) - theirs.get(id_, 0)) <= 0.02 * first.ledger.lost_ns + 2


def written(records: list, folder: Path) -> list[RankResult]:
    now = [0]
    plain = make_header()
    device = {"id": "emulated-0", "emulated": True, "pid": MAIN}
    head = dataclasses.replace(plain, node={**plain.node, "key": folder.name}, devices=[device])
    writer = RecordingWriter(folder, head, lambda: Clock(now[0], now[0], now[0]), keep_free_bytes=0)
    for number, batch in enumerate(records):
        now[0] = number
        writer.append(*batch)
    writer.close()
    return list(analyze_node(folder, LIMITS).ranks)


@pytest.mark.parametrize("again", [1, 2])
def test_repeated_and_reordered_records_leave_the_ledger_unchanged(
    tmp_path: Path, again: int
) -> None:
    batches = list(iterate_seconds(make_training([(0.2, 0.3)] * 20)))
    plain = written(batches, tmp_path / "plain")
    mixed = [batch for i in range(0, len(batches), 3) for batch in batches[i : i + 3][::-1]]
    twice = [batch for batch in mixed for _ in range(again)]
    assert [rank_result.ledger for rank_result in written(twice, tmp_path / "mixed")] == [
        record.ledger for record in plain
    ]


def without_threads(script: Script) -> Script:
    script.main = script.worker = ""
    script.sampled = False
    return script


def without_worker_spans(script: Script) -> Script:
    script.worker_spans = []
    return script


def without_all_spans(script: Script) -> Script:
    script.worker_spans, script.main_spans = [], []
    return script


@pytest.mark.parametrize("blinded", [without_threads, without_worker_spans, without_all_spans])
@pytest.mark.parametrize("wait", [0.2, 2.0])
def test_missing_signals_never_move_time_to_another_cause(
    blinded: Callable[[Script], Script], wait: float
) -> None:
    steps = [(wait, 0.3)] * 8 + [(wait, 0.9)] * 8
    [full] = analyze_script(make_training(steps), 10**15)
    [less] = analyze_script(blinded(make_training(steps)), 10**15)
    check_conservation(less)
    before, after = dict(full.ledger.buckets), dict(less.ledger.buckets)
    slack = 0.03 * full.ledger.lost_ns  # samples are ten a second, marks are exact
    for id_ in set(after) - {"unattributed"}:
        family = {value for value in before if value in CAUSES and CAUSES[value].family == id_}
        assert id_ in before or family, f"{id_} was not there before"
        allowed = before.get(id_, 0) + sum(before[value] for value in family if value != id_)
        assert after[id_] <= allowed + slack, id_
    assert after["unattributed"] >= before["unattributed"] - slack
