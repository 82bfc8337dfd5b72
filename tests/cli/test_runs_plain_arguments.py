"""`analyze` reads plain words without typer: what it then asks for is what typer would have."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterprof.cli import app, commands, runs
from clusterprof.cli.analyze import analyze
from tests.tools.command_pages import iterate_options

PLAIN = [
    ["a"],
    ["a", "b/", "--json"],
    ["--format", "html", "a", "-o", "x.html"],
    ["a", "--format=json", "--output", "y.json", "--strict", "--no-color"],
    ["a", "--jobs", "3", "--width=0", "--top", "007"],
    ["a", "--by", "rank,step", "--by", "cause", "--profile", "ci"],
    ["a", "--since", "1m", "--until=2m", "--steps", "4:"],
    ["a", "--width", "1", "b", "--width", "2"],
]
LEFT_TO_TYPER = [
    ["a", "--help"],
    ["a", "-h"],
    ["a", "--widht", "80"],
    ["a", "--wid", "80"],
    ["a", "--jobs", "0"],
    ["a", "--jobs", "-1"],
    ["a", "--jobs", "1.5"],
    ["a", "--jobs", "٣"],
    ["a", "--top", "0"],
    ["a", "--format"],
    ["a", "--format="],
    ["a", "--json=1"],
    ["a", "-ox.html"],
    ["a", "-o=x.html"],
    ["a", "--output", "-"],
    ["--", "a"],
    ["-"],
    ["a", ""],
]


@pytest.mark.parametrize("words", PLAIN, ids=" ".join)
def test_plain_arguments_parse_to_the_same_options_as_with_typer(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    signature = inspect.signature(runs.run_analysis)
    asked: list[dict[str, Any]] = []

    def note(*given: Any, **named: Any) -> None:
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        asked.append(bound.arguments)

    monkeypatch.setattr(runs, "run_analysis", note)
    plain = runs.parse_plain_arguments(words)
    assert plain is not None
    runs.run_analysis(**plain)
    commands.run_command(["analyze", *words])
    ours, theirs = asked
    assert ours == theirs


@pytest.mark.parametrize("words", LEFT_TO_TYPER, ids=" ".join)
def test_other_arguments_are_left_to_typer(words: list[str]) -> None:
    assert runs.parse_plain_arguments(words) is None


def test_both_parsers_declare_the_same_options() -> None:
    declared = {
        name
        for option in iterate_options(analyze)
        if not option.is_argument
        for name in option.names
    }
    assert declared == {flag for option in runs.ANALYZE_OPTIONS for flag in option.flags}


def test_plain_arguments_do_not_import_typer(tmp_path: Path) -> None:
    code = "import sys; from clusterprof.cli.app import main; main(); print('typer' in sys.modules)"
    run = [sys.executable, "-c", code, "analyze", str(tmp_path / "nothing")]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr.partition(":")[0]) == ("False\n", "clusterprof")


def test_analyze_limits_numpy_threads_and_record_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    app.main(["record", "--hz", "none", "--", "true"])
    assert "OPENBLAS_NUM_THREADS" not in os.environ
    app.main(["analyze", str(tmp_path / "nothing")])
    assert os.environ.pop("OPENBLAS_NUM_THREADS") == "1"
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")  # an explicit setting wins
    app.main(["analyze", str(tmp_path / "nothing")])
    assert os.environ["OPENBLAS_NUM_THREADS"] == "2"
