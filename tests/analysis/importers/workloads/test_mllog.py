"""MLPerf logs: staging, epochs, evaluations, cold first epochs and slow instances."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.base import CannotImportError
from clusterprof.analysis.pipeline import analyze
from clusterprof.output.renderers.plain import Plain
from clusterprof.output.renderers.terminal import Terminal
from clusterprof.output.renderers.text.wording import describe_verdict
from tests.support.trace_imports import MS, SEEDS, import_files, list_ranks, list_spans

THREE = sorted((SEEDS / "mllog" / "three").iterdir())
SECOND = 1_000_000_000
ORIGIN = 1_700_000_000_000 * MS
COLD = (
    "the first epoch took 50.0 s, the median 20.0 s: it began with cold caches, or with compilation"
)
STAGED = "staging took 20.0 s before training, 15.4 % of the run"  # of 130 s


def test_epochs_of_a_run_become_its_steps() -> None:
    (node,), (account,) = import_files(THREE[:1])
    assert list_ranks(node) == [(1, None, None, "unseen")]
    assert list_spans(node, 1, ORIGIN) == {
        "init": [(0, 5_000, 0, 0, 0, 0)],
        "staging": [(5_000, 25_000, 0, 0, 0, 0)],
        "epoch": [
            (25_000, 75_000, 0, 0, 0, 0),
            (75_000, 95_000, 0, 0, 0, 0),
            (95_000, 115_000, 0, 0, 0, 0),
            (115_000, 135_000, 0, 0, 0, 0),
        ],
        "step": [
            (25_000, 75_000, 1, 2, -1, -1),
            (75_000, 95_000, 2, 2, -1, -1),
            (95_000, 115_000, 3, 2, -1, -1),
            (115_000, 135_000, 4, 2, -1, -1),
        ],
        "eval": [
            (73_000, 75_000, 0, 0, 0, 0),
            (93_000, 95_000, 0, 0, 0, 0),
            (113_000, 115_000, 0, 0, 0, 0),
            (133_000, 135_000, 0, 0, 0, 0),
        ],
    }
    assert account.notes == [STAGED, COLD]


def test_the_slowest_of_three_instances_is_named() -> None:
    nodes, accounts = import_files(THREE)
    assert [node.job for node in nodes] == [f"three/result_{n}" for n in range(3)]
    assert accounts[0].notes == [STAGED, COLD]
    assert accounts[2].notes == [
        "staging took 20.0 s before training, 14.7 % of the run",
        "the first epoch took 50.0 s, the median 22.0 s: it began with cold caches, or with"
        " compilation",
        "the slowest of 3 instances of made-up: its fastest epoch took 22.0 s, the median 20.0 s",
    ]


def test_the_answers_state_startup_and_size_of_a_run(tmp_path: Path) -> None:
    """Start-up of 25 s of 135 or 136 s; the first line comes at 0, run_start at 5 s."""
    facts = [
        {"time_ms": 1_700_000_000_000, "key": key, "value": value}
        for key, value in (("number_of_nodes", 128), ("accelerators_per_node", 4))
    ]
    log = "\n".join(f":::MLLOG {json.dumps(fact)}" for fact in facts) + "\n"
    path = tmp_path / "run.2.5.txt"
    path.write_text(log + THREE[0].read_text())
    report = analyze(path)
    assert report.job is not None
    assert (report.job.world_size, report.job.gpus) == (512, 0)  # a log measures no device
    assert "1 trace, 1 of 512 ranks" in Terminal().render(report)
    assert report.nodes[0].name == "run.2.5" and not report.nodes[0].has_host_name
    (answer,) = report.answers
    assert "start-up took 25.0 s" in answer and "staging took 20.0 s" in answer
    assert answer in " ".join(Plain().render(report).split("\n")[:4])
    (startup,) = (finding for finding in report.findings if finding.cause.id == "startup")
    assert startup.grade == "B"  # nothing was counted
    several = analyze(THREE)
    assert "of each of 3 runs" in several.answers[0]
    assert several.answers[1] == (
        "Slowest is result_2.txt, of 3 instances of made-up: its fastest epoch took 22.0 s, the"
        " median 20.0 s"
    )


def test_equally_fast_instances_are_reported(tmp_path: Path) -> None:
    paths = [tmp_path / f"r{number}.txt" for number in range(3)]
    for path in paths:
        path.write_bytes(THREE[0].read_bytes())
    _, accounts = import_files(paths)
    assert accounts[0].notes[-1] == (
        "3 instances of made-up: none is slow (fastest epochs within 3 % of 20.0 s)"
    )


def test_broken_lines_and_open_intervals_are_counted(tmp_path: Path) -> None:
    lines = THREE[0].read_bytes().splitlines()
    path = tmp_path / "log.txt"
    bad = [
        b":::MLLOG {",
        b':::MLLOG {"time_ms": NaN, "key": "x"}',
        b':::MLLOG {"time_ms": 1e40}',
        b":::MLLOG []",
        b'x:::MLLOG {"time_ms": 5, "key": "run_stop"}',
        b"\xff" * 2_000_000,
    ]
    path.write_bytes(b"\n".join([*lines[:12], *bad, lines[12]]))
    (node,), (account,) = import_files([path])
    assert [span[:3] for span in list_spans(node, 1, ORIGIN)["step"]] == [(25_000, 75_000, 1)]
    assert account.skipped == {
        "lines without a time or a key": 4,
        "run that stops before it starts": 1,
        "lines of more than 1 MiB": 1,
        "epoch without a stop": 1,
        "lines with a far-off time": 1,
    }


def test_a_log_without_epochs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"\n".join(THREE[0].read_bytes().splitlines()[:7]))
    with pytest.raises(CannotImportError, match="has an epoch or block"):
        import_files([path])


def test_startup_ends_at_the_start_of_a_long_first_epoch(tmp_path: Path) -> None:
    printed = [(0, "init_start"), (100, "init_stop"), (101, "run_start"), (101, "epoch_start")]
    printed += [
        (901, "epoch_stop"),
        (902, "epoch_start"),
        (1_302, "epoch_stop"),
        (1_303, "run_stop"),
    ]
    lines = (
        f':::MLLOG {{"time_ms": {1_700_000_000_000 + 1000 * at}, "key": "{key}"}}\n'
        for at, key in printed
    )
    path = tmp_path / "result_0.txt"
    path.write_text("".join(lines))
    report = analyze(path)
    lost = dict(report.outside_buckets)
    # The first step is logged at 901 s; the few readings before it are kept until then.
    assert lost == {"startup": 101 * SECOND}
    (rank,) = report.ranks
    assert (rank.steps, rank.unmeasured_ns) == (2, 1_201 * SECOND)  # 101 s to 1,302 s
    [startup] = report.findings
    assert (startup.cause.id, startup.lost_ns) == ("startup", 101 * SECOND)
    assert describe_verdict(report) == (
        "No device was measured inside the steps: it is not known how the job used its GPU time."
    )
