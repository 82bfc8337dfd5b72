"""Logs of Megatron-LM: iterations and timers, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.base import CannotImportError
from clusterprof.analysis.inputs.foreign import find_file_importers, import_inputs
from clusterprof.analysis.pipeline import analyze
from clusterprof.output.renderers.plain import Plain
from clusterprof.output.renderers.text.summary import describe_scope
from tests.support.trace_imports import import_files, list_ranks, list_spans

LOG = """using world size: 8, data-parallel size: 4
 [2026-09-20 21:31:05] iteration        1/       6 | consumed samples:  8 | elapsed time per iteration (ms): 4802.3 | lm loss: 1.1 |
 [2026-09-20 21:31:06] iteration        3/       6 | elapsed time per iteration (ms): 291.5 | lm loss: 1.0 |
(min, max) time across ranks (ms):
    forward-backward ...............................: (100.00, 220.00)
    optimizer ......................................: (40.10, 41.20)
 validation loss at iteration 3
 [2026-09-20 21:31:17] iteration        5/       6 | elapsed time per iteration (ms): 286.5 | lm loss: 0.9 |
(min, max) time across ranks (ms):
    forward-backward ...............................: (110.00, 230.00)
"""  # noqa: E501


def write(folder: Path, text: str) -> Path:
    path = folder / "train.log"
    path.write_text(text)
    return path


def test_iterations_are_placed_with_pauses_between_lines(tmp_path: Path) -> None:
    (node,), (account,) = import_files([write(tmp_path, LOG)])
    assert list_ranks(node) == [(1, None, 8, "unseen")]
    # 11 s between two lines, of which two iterations explain 573 ms
    assert list_spans(node, 1) == {
        "step": [
            (0, 4802.3, 1, 2, -1, -1),
            (4802.3, 5093.8, 2, 2, -1, -1),
            (5093.8, 5385.3, 3, 2, -1, -1),
            (15812.3, 16098.8, 4, 2, -1, -1),
            (16098.8, 16385.3, 5, 2, -1, -1),
        ]
    }
    assert account.notes == [
        "a line stands for 2 iterations: each of them gets their mean (--log-interval 1 shows"
        " each)",
        "10.4 s between the lines are not part of an iteration (evaluation, checkpoint, restart)",
        "timers, mean of the slowest rank: forward-backward 225.0 ms (fastest rank 105.0 ms),"
        " optimizer 41.2 ms",
    ]
    assert account.read == {"iterations": 5, "tables of timers": 2}


def test_forked_formats_old_timers_and_restarts_are_read(tmp_path: Path) -> None:
    text = (
        "[INFO] - iteration=       7/  90 | samples= 8 | elapsed_time_per_iteration_ms=20.5 |\n"
        "time (ms) | forward-compute: 12.50 | backward-compute: 7.00\n"
        " iteration        8/      90 | elapsed time per iteration (ms): 10.0 | lm loss: 1 |\n"
        "times across ranks (ms):\n  forward-compute:\n     rank  0: 5.00\n     rank  1: 9.00\n"
        " iteration        8/      90 | elapsed time per iteration (ms): 30.0 | lm loss: 1 |\n"
    )
    (node,), (account,) = import_files([write(tmp_path, text)])
    assert [span[:3] for span in list_spans(node, 1)["step"]] == [
        (0, 20.5, 7),
        (20.5, 30.5, 8),
        (30.5, 60.5, 8),
    ]
    assert account.notes == [
        "iteration numbers go back 1 times: restarts of the job",
        "timers, mean of the slowest rank: forward-compute 10.8 ms (fastest rank 8.8 ms),"
        " backward-compute 7.0 ms",
    ]


def test_a_log_without_iterations_is_refused(tmp_path: Path) -> None:
    text = "------ arguments ------\n  tensor_model_parallel_size ............... 2\n"
    with pytest.raises(CannotImportError) as caught:
        import_files([write(tmp_path, text)])
    assert caught.value.message == (
        "train.log: no line 'iteration N/ M | … | elapsed time per iteration (ms): T'; give the"
        " output of the last rank, and set --log-interval"
    )


def test_the_answer_states_timer_shares_other_than_compute(tmp_path: Path) -> None:
    """Iterations of 4802.3, 2 x 291.5 and 2 x 286.5 ms: 1191.66 ms in the mean."""
    table = (
        "(min, max) time across ranks (ms):\n"
        "    forward-compute ................................: (100.00, 220.00)\n"
        "    backward-send-forward-recv .....................: (10.00, 119.17)\n"
        "    batch-generator ................................: (1.00, 11.92)\n"
    )
    _, (account,) = import_files([write(tmp_path, LOG + table)])
    assert account.answers == [
        "an iteration takes 1.19 s, mean of 5; of it, timers of the slowest rank, not compute:"
        " backward-send-forward-recv 10.0 %, batch-generator 1.0 %"
    ]
    _, (account,) = import_files([write(tmp_path, LOG)])
    assert account.answers[0].endswith("the longest: forward-backward 18.9 %, optimizer 3.5 %")
    _, (account,) = import_files([write(tmp_path, LOG.partition("(min")[0])])
    assert "no timers: --timing-log-level 2" in account.answers[0]
    report = analyze(write(tmp_path, LOG + table))
    screen = Plain().render(report)
    assert "Answer: An iteration takes 1.19 s" in screen and "doctor" not in screen


def test_a_log_is_recognized_by_lines_deep_in_the_file(tmp_path: Path) -> None:
    """The iterations stand behind 200 KB and, in a second file, amid 12 MB of other output."""
    for repeats in (10_000, 300_000):
        path = write(tmp_path, "setting up the job\n" * repeats + LOG * 200)
        with path.open("a") as file:
            file.write("cleaning up\n" * repeats)
        assert [importer.name for importer in find_file_importers(path)] == ["megatron-log"]
        assert analyze(path).answers[0].startswith("An iteration takes")


def test_a_mixed_nccl_and_megatron_log_gives_both_answers(tmp_path: Path) -> None:
    line = "n1:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n"
    path = write(tmp_path, line * 2000 + LOG)
    answers = analyze(path).answers
    assert any("go through TCP sockets" in answer for answer in answers)
    assert any(answer.startswith("An iteration takes") for answer in answers)
    assert len(analyze(path).nodes) == 1
    arguments = "------ arguments ------\n  tensor_model_parallel_size ............... 2\n"
    path = write(tmp_path, line * 2000 + arguments)  # of two formats one gives nothing
    with import_inputs([path], leave_unknown=False) as inputs:
        assert [account.format for account in inputs.accounts] == ["NCCL log or nccl-tests table"]


def test_the_largest_stated_world_size_is_used(tmp_path: Path) -> None:
    text = LOG.replace(
        "using world size: 8, data-parallel size: 4",
        "n1: [INFO] [launch.py:163:main] dist_world_size=16\n"
        "n1:   world_size ...................................... 16\n"
        "n1: [INFO] [config.py:904:print]   world_size ................... 1",
    )
    report = analyze(write(tmp_path, text))
    assert describe_scope(report).startswith("1 trace, 1 of 16 ranks, 5 steps")


def test_timers_before_the_first_iteration_are_ignored(tmp_path: Path) -> None:
    text = (
        "time (ms) | load-checkpoint: 5000.00\n"
        " iteration 1/ 2 | elapsed time per iteration (ms): 100.0 |\n"
        "time (ms) | forward: 30.00 | backward: 60.00 | backward-allreduce: 0.00\n"
    )
    _, (account,) = import_files([write(tmp_path, text)])
    assert account.answers == [
        "an iteration takes 100.0 ms, mean of 1; of it, timers of the slowest rank, not compute:"
        " none of 0.1 % or more; the longest: backward 60.0 %, forward 30.0 %"
    ]
