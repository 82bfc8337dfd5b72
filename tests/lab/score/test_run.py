"""The scorer from end to end on small runs: what it counts, stores, prints, keeps and catches."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from clusterprof_lab.answer import Answer, NamedCause, dump, load
from clusterprof_lab.scenario import ExpectedVerdict, Scenario, load_corpus
from clusterprof_lab.score import attribution_mutations, sizes, work
from clusterprof_lab.score.attribution_mutations import (
    FAULTS,
    GAPS,
    apply_mutation,
    list_worse_figures,
)
from clusterprof_lab.score.clusterprof_answer import analyze_recording
from clusterprof_lab.score.figures import compute_wilson
from clusterprof_lab.score.page import load_results, make_pages, store_score
from clusterprof_lab.score.plan import LARGE, NOT_RECORDED, ScoredRun, plan_runs, select_recorded
from clusterprof_lab.score.progress import Progress
from clusterprof_lab.score.run import main
from clusterprof_lab.score.work import Settings, score_run
from clusterprof_lab.truth import Truth, read_truth, write_truth
from tests.support.score_runs import write_two_ranks

CORPUS = {scenario.id: scenario for scenario in load_corpus()}
FAULT = CORPUS["storage-io-cap"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_two_ranks(folder, "one")
    write_two_ranks(folder, "two", seed=1)
    return folder


@pytest.fixture(scope="module")
def out(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    answers = folder / "answers"
    (answers / "one").mkdir(parents=True)
    dump(
        Answer("rival 3", (NamedCause("cpu", None, 0.4),), culprits=(0,), leaves=False),
        answers / "one" / "answer.json",
    )
    arguments = [
        "--runs",
        str(runs),
        "--answers",
        f"rival={answers}",
        "--out",
        str(folder),
        "--no-rules",
    ]
    assert main([*arguments, "--modes", "M0,M4", "--jobs", "1"]) == 0
    return folder


def score(out: Path, tool: str, mode: str = "M0") -> dict:
    document = json.loads((out / "score.json").read_text(encoding="utf-8"))
    [result] = [
        entry for entry in document["scores"] if (entry["tool"], entry["mode"]) == (tool, mode)
    ]
    return result["figures"]


def test_the_score_compares_clusterprof_with_another_tool(out: Path) -> None:
    mine, rival = score(out, "clusterprof"), score(out, "rival")
    assert (mine["family_top1"]["hits"], mine["family_top1"]["n"]) == (2, 2)
    assert (mine["culprit_top1"]["hits"], mine["conserved"]["hits"]) == (2, 2)
    # each run: storage 25 points by truth and so said, cpu 8.3, network 16.7
    assert round(mine["bucket_error_active_mean"]["value"], 3) == 0
    assert (rival["family_top1"]["hits"], rival["family_top1"]["n"]) == (0, 1)
    assert (rival["culprit_top1"]["hits"], rival["inversions"]["hits"]) == (0, 1)
    assert (
        rival["leaf_top1"]
        == rival["bucket_error_mean"]
        == {"value": None, "low": None, "high": None, "n": 0, "hits": None}
    )
    page = (out / "score.md").read_text(encoding="utf-8")
    line = next(line for line in page.splitlines() if line.startswith("| rival | 0 % (0–79; 1) |"))
    assert line.split(" | ")[2:4] == ["not claimed", "not claimed"]
    assert "| **clusterprof** | 100 % (34–100; 2) | - |" in page  # culprits
    assert "Scored versions: rival 3." in page


def test_a_single_visible_rank_is_judged_by_visible_facts(out: Path) -> None:
    alone = score(out, "clusterprof", "M4")
    assert (alone["family_top1"]["hits"], alone["family_top1"]["n"]) == (2, 2)


def test_a_folder_without_runs_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--runs", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "no run under" in capsys.readouterr().err


def test_a_run_that_cannot_be_made_states_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    [first, *_] = plan_runs([FAULT], "dev", "ci", ["synth"])
    monkeypatch.setitem(work.MAKERS, "synth", ("clusterprof_lab.nowhere", "make"))
    done = score_run(first, Settings(scenarios=CORPUS))
    assert done.rows == () and done.not_run.startswith("clusterprof_lab.nowhere is not there")
    only_real = replace(FAULT, synth=None)
    [first, *_] = plan_runs([only_real], "dev", "ci", ["synth"])
    assert score_run(first, Settings(scenarios=CORPUS)).not_run == "synth cannot make it"


def test_a_wrongly_judged_run_keeps_its_folder(runs: Path, tmp_path: Path) -> None:
    truth = read_truth(runs / "one")
    blamed = replace(truth, injected=(replace(truth.injected[0], culprits=(0,)),))
    folder = tmp_path / "wrong"
    folder.mkdir()
    (folder / "recording").symlink_to(runs / "one" / "recording")
    write_truth(blamed, folder)
    done = score_run(ScoredRun("", None, folder), Settings(rules=False, scenarios=CORPUS))
    assert [(row.judged.culprit_right, row.folder) for row in done.rows] == [(False, str(folder))]


def test_a_failed_analysis_counts_as_an_empty_answer(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(recording: Path, truth: Truth) -> Answer:
        raise RuntimeError("out of order")

    def slowest(recording: Path, truth: Truth) -> Answer:
        return Answer("slowest", None, culprits=(1,))

    both = {"a rule": fails, "slowest total compute": slowest}
    monkeypatch.setattr(work, "load_rules", lambda: both)
    done = score_run(ScoredRun("", None, runs / "one"), Settings(scenarios=CORPUS))
    rows = {row.tool: row for row in done.rows}
    assert rows["a rule"].judged.family_right is False
    assert rows["a rule"].judged.culprit_right is False
    assert rows["clusterprof"].easy is True  # slowest total compute is right as well
    assert rows["slowest total compute"].judged.family_right is None


def test_baseline_rules_are_found_from_any_working_directory(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = score_run(ScoredRun("", None, runs / "one"), Settings(scenarios=CORPUS))
    tools = [row.tool for row in done.rows]
    assert len(tools) == 1 + len(work.load_rules()) and "xprof" in tools
    assert all(row.easy is False for row in done.rows)  # who is slow computes no longer


def test_stored_answers_apply_only_to_their_testbed(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [first, *_] = plan_runs([replace(FAULT, real={"fault": "disk-cap"})], "dev", "ci", ["real"])
    monkeypatch.setattr(work, "make_run", lambda *given: (runs / "one", ""))
    dump(
        Answer("rival 3", (NamedCause("cpu", None, 0.4),)),
        tmp_path / f"real.{first.trial.name}.json",
    )  # type: ignore[union-attr]
    settings = Settings(rules=False, answers={"rival": tmp_path}, scenarios=CORPUS)
    assert [row.tool for row in score_run(first, settings).rows][-1] == "rival"
    synthetic = score_run(replace(first, testbed="synth", modes=("M0",)), settings)
    assert [row.tool for row in synthetic.rows] == ["clusterprof"]


def test_a_disturbed_run_is_scored_separately(runs: Path, tmp_path: Path) -> None:
    write_truth(replace(read_truth(runs / "one"), disturbed_ratio=0.08), tmp_path)
    (tmp_path / "recording").symlink_to(runs / "one" / "recording")
    done = score_run(ScoredRun("", None, tmp_path), Settings(rules=False, scenarios=CORPUS))
    assert [row.testbed for row in done.rows] == ["synth, disturbed"]


def test_progress_names_errors_of_the_dev_split_only(runs: Path) -> None:
    done = score_run(ScoredRun("", None, runs / "one"), Settings(rules=False, scenarios=CORPUS))
    bad = replace(done.rows[0], judged=replace(done.rows[0].judged, culprit_right=False))
    hidden = replace(bad, split="test")
    stream = io.StringIO()
    progress = Progress(4, stream)
    for rows in ((bad,), (hidden,), done.rows):
        progress.report(replace(done, rows=rows))
    progress.report(replace(done, rows=(), not_run="no disk here"))
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if " runs" not in line] == [
        "one: culprit",
        "one: not run: no disk here",
    ]
    assert lines[-1].startswith("4 of 4 runs, 1 not run; ") and lines[-1].endswith("0:00 min left")


def test_slices_select_the_planned_runs() -> None:
    null = Scenario(
        "null-clean", "null", "", "", ExpectedVerdict("", (), "nobody"), FAULT.lost, {}, {}
    )
    corpus = [FAULT, null]
    ci = plan_runs(corpus, "dev", "ci", ["synth", "real"])
    assert Counter((item.testbed, item.trial.scenario.id) for item in ci if item.trial) == {
        ("synth", "storage-io-cap"): 2,
        ("synth", "null-clean"): 4,
        ("real", "storage-io-cap"): 1,
        ("real", "null-clean"): 1,
    }
    assert [item.ablate for item in ci].count(True) == 2  # the first of each group
    full = plan_runs(corpus, "test", "full", ["synth", "real"])
    assert Counter(
        (record.testbed, record.trial.scenario.id) for record in full if record.trial
    ) == {
        ("synth", "storage-io-cap"): 9 + len(LARGE),
        ("synth", "null-clean"): 64,
        ("real", "storage-io-cap"): 3,
        ("real", "null-clean"): 3,
    }
    assert {record.trial.split for record in full if record.trial} == {"test"}
    assert len({record.name for record in full}) == len(full)


def test_recorded_real_jobs_are_not_run_again(runs: Path, tmp_path: Path) -> None:
    both = plan_runs([replace(FAULT, real={"fault": "disk-cap"})], "dev", "ci", ["synth", "real"])
    for name in ("storage-io-cap.medium.dev0", "storage-io-cap.medium.dev1"):
        (tmp_path / name).symlink_to(runs / "one")
    assert [item.folder for item in select_recorded(both, tmp_path)] == [
        None,
        None,
        tmp_path / "storage-io-cap.medium.dev0",
    ]
    assert select_recorded(both, tmp_path / "none") == both
    *_, missing = select_recorded(both, tmp_path / "none", others=False)
    done = score_run(missing, Settings(rules=False, scenarios=CORPUS))
    assert (done.rows, done.not_run) == ((), NOT_RECORDED)


def test_the_accuracy_page_and_its_figure_are_generated(out: Path, tmp_path: Path) -> None:
    path = store_score(out / "score.json", tmp_path)
    assert path.name == "dev-runs.json"
    assert load_results(tmp_path)[0]["claims"] == []
    made = make_pages(tmp_path)
    assert set(made) == {"docs/accuracy.md", "docs/accuracy-reliability.svg"}
    page = made["docs/accuracy.md"]
    assert "| synth | dev | runs | " in page and "not tuned on" not in page
    assert "| true \\ said | storage |" in page
    assert "| storage-io-cap | 2/2 · 2/2 · 2/2 · 0.0 |" in page
    picture = ElementTree.fromstring(made["docs/accuracy-reliability.svg"])
    dots = [part for part in picture.iter() if part.tag.endswith("circle")]
    curves = [score["reliability"] for score in load_results(tmp_path)[0]["scores"]]
    assert len(dots) == sum(1 + len(bins) for bins in curves if bins)  # one each of the key
    assert "No score has been stored yet" in make_pages(tmp_path / "none")["docs/accuracy.md"]
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="not a score"):
        make_pages(tmp_path)


def test_injected_attribution_errors_worsen_the_score(tmp_path: Path) -> None:
    item = [write_two_ranks(tmp_path, "three", ranks=3)]
    sound = attribution_mutations.compute_figures(item, CORPUS, "", gaps=False)
    assert sound["family_top1"].hits == 1
    swapped = attribution_mutations.compute_figures(item, CORPUS, "swap-causes", gaps=False)
    assert (swapped["family_top1"].hits, swapped["leaf_top1"].hits) == (0, 0)
    waiter = attribution_mutations.compute_figures(item, CORPUS, "longest-waiter", gaps=False)
    assert (waiter["culprit_top1"].hits, waiter["inversions"].hits) == (0, 1)
    again = attribution_mutations.compute_figures(item, CORPUS, "", gaps=False)
    assert again == sound  # nothing stays behind


def test_filling_gaps_with_zero_worsens_the_score(tmp_path: Path) -> None:
    from tests.support.score_runs import recordings

    recordings.write_recording(
        recordings.make_training([(0.1, 0.4)] * 60), tmp_path / "whole" / "node"
    )
    gaps = attribution_mutations.rewrite_recording(tmp_path / "whole", tmp_path / "gaps", GAPS)
    true = analyze_recording(tmp_path / "whole").lost_ratio
    assert true is not None and round(true, 3) == 0.2
    assert analyze_recording(gaps).lost_ratio == pytest.approx(true, abs=0.01)
    with apply_mutation("zero-gap"):
        filled = analyze_recording(gaps).lost_ratio
    assert filled is not None and filled > true + 0.1


def test_a_score_is_worse_only_beyond_both_intervals() -> None:
    def figures(hits: int, inverted: int, n: int = 20) -> dict:
        none = dict.fromkeys(attribution_mutations.WATCHED, compute_wilson(0, 0))
        return {
            **none,
            "family_top1": compute_wilson(hits, n),
            "inversions": compute_wilson(inverted, n),
        }

    assert list_worse_figures(figures(20, 0), figures(20, 0)) == []
    assert list_worse_figures(figures(20, 0), figures(17, 2)) == []  # within the intervals
    assert list_worse_figures(figures(20, 0), figures(5, 12)) == [
        "family_top1 1 -> 0.25",
        "inversions 0 -> 0.6",
    ]
    assert list_worse_figures(figures(5, 12), figures(20, 0)) == []  # better
    with pytest.raises(ValueError, match="no such fault"), apply_mutation("typo"):
        pass
    assert len(FAULTS) == 3


def test_results_of_the_test_split_stay_hidden(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "runs" / "one").mkdir(parents=True)
    truth = replace(read_truth(runs / "one"), split="test", injected=())
    write_truth(replace(truth, lost=()), tmp_path / "runs" / "one")
    (tmp_path / "runs" / "one" / "recording").symlink_to(runs / "one" / "recording")
    arguments = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path), "--modes", "M0"]
    assert main([*arguments, "--no-rules", "--jobs", "1"]) == 0
    document = json.loads((tmp_path / "score.json").read_text(encoding="utf-8"))
    values = [document[key] for key in ("split", "claims", "wrong", "wrong_count")]
    assert values == ["test", [], [], 1]
    assert "not shown" in (tmp_path / "score.md").read_text(encoding="utf-8")
    assert sizes.main([str(tmp_path / "runs")]) == 2  # nor is confidence learnt from it


def test_documented_example_answers_are_read(tmp_path: Path) -> None:
    manual = Path(__file__).resolve().parents[3] / "lab" / "README.md"
    blocks = re.findall(r"```json\n(.*?)```", manual.read_text(encoding="utf-8"), re.DOTALL)
    texts = {json.loads(block)["format"]: block for block in blocks}
    (tmp_path / "answer.json").write_text(texts["clusterprof-answer"], encoding="utf-8")
    (tmp_path / "truth.json").write_text(texts["clusterprof-truth"], encoding="utf-8")
    answer, truth = load(tmp_path / "answer.json"), read_truth(tmp_path)
    assert answer.causes == (NamedCause("storage", "storage-local", 0.31, 0.9, (5,)),)
    assert (truth.sum_caused_ns(), truth.clocks["n1"]) == (
        {1: 25_500_000_000, 0: 400_000_000},
        (31_000_000, 0.00002),
    )
