"""Ranks that wait for each other: whose books the time stands in, and whose cause it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clusterprof.analysis.cross_rank.waits import CATEGORIES
from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.node.analyze import analyze_node
from clusterprof.analysis.pipeline import analyze
from clusterprof.analysis.timeline.collectives.rows import HEAD_ROWS, read_block
from clusterprof.probe import layout
from clusterprof.report.model import Report
from tests.analysis.test_pipeline import check_books, metrics
from tests.support.recordings import MAIN, SECOND, WORKER, Script, write

GROUP = 7
STEPS = 60
TRANSFER_S = 0.1


def job(*ranks: tuple[float, float], steps: int = STEPS) -> list[Script]:
    """One script per rank (wait_s, compute_s); every step ends with an all-reduce of all.

    For half of a wait a worker reads, then it decodes. All leave together, 0.1 s after the last
    has come.
    """
    step_s = max(wait + compute for wait, compute in ranks) + TRANSFER_S
    return [_script(number, one, step_s, steps) for number, one in enumerate(ranks)]


def _script(rank: int, one: tuple[float, float], step_s: float, steps: int) -> Script:
    wait, compute = one
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a job"}
    script = Script(end=round(2.0 + steps * step_s, 6), variables=variables)
    main, worker = ["U1.0"], ["I1.0"]
    script.worker_spans.append((layout.WORKER_START, 0.5, 0.5, 0, 1, MAIN))
    for number in range(steps):
        at = round(1.0 + number * step_s, 6)
        leave = round(at + step_s, 6)
        come = round(at + wait + compute, 6)
        half = wait / 2
        if wait:
            cpu = [round((wait - half) * SECOND), 0]
            script.worker_spans.append((layout.FETCH, at, at + wait, 8, *cpu, 1 << 20))
            first = number == 0
            script.main_spans.append((layout.DATA_WAIT, at, at + wait, number, WORKER, 1, first))
            main.append(f"I{wait}")
            worker += [f"D{half}", f"U{half}"]
        reduce = (layout.COLLECTIVE, come, leave, GROUP, number, 1000, layout.ALL_REDUCE)
        script.main_spans += [reduce, (layout.STEP, at, leave, number)]
        main += [f"U{compute}", f"I{round(leave - come, 6)}"]
        worker.append(f"I{round(step_s - wait, 6)}")
    script.main, script.worker = " ".join(main), " ".join(worker)
    return script


def recorded(scripts: list[Script], folder: Path) -> Report:
    for number, script in enumerate(scripts):
        write(script, folder / f"node-{number}")
    report = analyze(folder)
    check_books(report)
    return report


def seconds_of(report: Report, rank: int) -> dict[str, float]:
    return {id_: round(ns / SECOND, 3) for id_, ns in report.ranks[rank].buckets if ns}


def test_the_wait_for_a_slow_loader_is_charged_to_what_it_waited_for(tmp_path: Path) -> None:
    # Rank 1 waits 0.2 s for data (half disk, half CPU) before its 0.3 s of work; rank 0 does not,
    # and so waits 0.2 s in the all-reduce; then both transfer for 0.1 s. The step takes 0.6 s.
    # In the first step it is what each lost since its steps began that is compared.
    report = recorded(job((0.0, 0.3), (0.2, 0.3)), tmp_path)
    assert [one.in_step_ns for one in report.ranks] == [36 * SECOND, 36 * SECOND]
    assert seconds_of(report, 0) == {
        "net-transfer": 6.0,
        "storage-local": 6.0,
        "cpu-preprocess": 6.0,
    }
    assert seconds_of(report, 1) == {
        "net-transfer": 6.0,
        "storage-local": 6.0,
        "cpu-preprocess": 6.0,
    }
    whose = {f.cause.id: [c.rank for c in f.culprits] for f in report.findings}
    assert whose["storage-local"] == whose["cpu-preprocess"] == [1]
    assert whose["net-transfer"] == []
    assert report.unattributed_reasons == ()
    assert metrics(report)["stall.storage_ratio"] == pytest.approx(12 / 72)
    assert metrics(report)["stall.network_ratio"] == pytest.approx(12 / 72)
    assert metrics(report)["stall.synchronization_ratio"] == 0.0


def test_a_rank_with_more_work_in_every_step_is_an_imbalance(tmp_path: Path) -> None:
    # 0.2 s of work more than the other, every time.
    report = recorded(job((0.0, 0.3), (0.0, 0.5)), tmp_path)
    found = seconds_of(report, 0)
    assert found["net-transfer"] == 6.0
    blamed = found.get("sync-imbalance", 0) + found.get("sync-slow-compute", 0)
    assert blamed + found.get("unattributed", 0) == pytest.approx(12.0, abs=0.001)
    assert found["sync-imbalance"] > 10
    assert seconds_of(report, 1) == {"net-transfer": 6.0}
    [imbalance] = [f for f in report.findings if f.cause.id == "sync-imbalance"]
    assert [culprit.rank for culprit in imbalance.culprits] == [1]


def test_all_ranks_with_the_same_wait_blame_nobody_else(tmp_path: Path) -> None:
    report = recorded(job((0.2, 0.3), (0.2, 0.3)), tmp_path)
    for rank in (0, 1):
        assert seconds_of(report, rank) == {
            "net-transfer": 6.0,
            "storage-local": 6.0,
            "cpu-preprocess": 6.0,
        }
    [storage] = [f for f in report.findings if f.cause.id == "storage-local"]
    assert sorted(culprit.rank for culprit in storage.culprits) == [0, 1]


def test_a_rank_alone_says_that_it_cannot_know(tmp_path: Path) -> None:
    report = recorded(job((0.0, 0.3), (0.2, 0.3))[:1], tmp_path)
    # 0.3 s of every step inside the all-reduce; the other member was not recorded
    assert seconds_of(report, 0) == {"sync-unknown-peer": 18.0}


def test_ranks_of_different_jobs_do_not_wait_for_each_other(tmp_path: Path) -> None:
    first, second = job((0.0, 0.3), (0.2, 0.3))
    second.variables["TORCHELASTIC_RUN_ID"] = "another job"
    report = recorded([first, second], tmp_path)
    assert seconds_of(report, 0) == {"sync-unknown-peer": 18.0}


def test_a_life_before_a_restart_is_not_waited_for(tmp_path: Path) -> None:
    first, second = job((0.0, 0.3), (0.2, 0.3))
    second.variables["TORCHELASTIC_RESTART_COUNT"] = "1"
    report = recorded([first, second], tmp_path)
    assert seconds_of(report, 0) == {"sync-unknown-peer": 18.0}


def test_the_cut_into_chunks_changes_no_sum(tmp_path: Path) -> None:
    folder = write(job((0.0, 0.3), (0.2, 0.3))[1], tmp_path / "node-1")
    whole, cut = (
        analyze_node(folder, build_limits({}), chunk_ns=ns) for ns in (10**12, 7 * SECOND)
    )
    tables = []
    for [one] in (whole.ranks, cut.ranks):
        [block] = one.operations.blocks
        table = np.zeros((HEAD_ROWS + 2 * len(CATEGORIES), STEPS), np.int64)
        read_block(block.location, block, np.arange(len(CATEGORIES)), table)
        tables.append(table)
    assert np.abs(tables[0] - tables[1]).max() <= 2
    assert np.array_equal(tables[0][[0, 1, 3, 4, 5, 6]], tables[1][[0, 1, 3, 4, 5, 6]])
    # by the end of step 10 rank 1 had waited 10 * 0.2 s for data and worked 10 * 0.3 s
    expected = dict(zip(("storage-local", "cpu-preprocess"), (1.0, 1.0)), work=3.0)
    row = tables[0][HEAD_ROWS + len(CATEGORIES) :, 9] / SECOND
    found = dict(zip(CATEGORIES, row.tolist()))
    assert {name: s for name, s in found.items() if s > 1e-6} == pytest.approx(expected)


def test_operations_that_touch_each_share_what_was_waited(tmp_path: Path) -> None:
    # The all-reduce of each step becomes two, of which the second begins as the first ends.
    scripts = job((0.0, 0.3), (0.0, 0.3))
    for script in scripts:
        whole = [span for span in script.main_spans if span[0] == layout.COLLECTIVE]
        for kind, come, leave, group, number, *rest in whole:
            script.main_spans.remove((kind, come, leave, group, number, *rest))
            middle = round(come + TRANSFER_S / 2, 6)
            script.main_spans += [
                (kind, come, middle, group, 2 * number, *rest),
                (kind, middle, leave, group, 2 * number + 1, *rest),
            ]
    report = recorded(scripts, tmp_path)
    assert [seconds_of(report, rank) for rank in (0, 1)] == [{"net-transfer": 6.0}] * 2
    assert [blind for blind in report.blinds if blind.what == "operations between ranks"] == []
