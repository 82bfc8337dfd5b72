"""What a shell completes: commands, options and known values, through the real command."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from clusterprof.cli import demo, runs
from clusterprof.demo.scenarios import SCENARIOS
from clusterprof.output.renderers.terminal_tables import SECTION_NAMES
from clusterprof.output.renderers.text.tables import TABLE_NAMES


def complete(line: str) -> list[str]:
    """Return what bash would offer at the end of a line."""
    words = line.split(" ")
    environment = {
        **os.environ,
        "_CLUSTERPROF_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "clusterprof"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("clusterprof an", ["analyze"]),
        ("clusterprof analyze --for", ["--format"]),
        ("clusterprof analyze --format p", ["plain"]),
        ("clusterprof analyze --section n", ["not-seen", "notes"]),
        ("clusterprof analyze --by ", ["node", "rank", "cause", "line", "step", "time"]),
        ("clusterprof record --inject ", ["auto", "off", "strict"]),
        ("clusterprof demo --scenario st", ["storage", "straggler"]),
        ("clusterprof export --to per", ["perfetto"]),
        ("clusterprof gate --format ju", ["junit"]),
        ("clusterprof explain host-", ["host-asleep"]),
    ],
)
def test_bash_completes_commands_options_and_values(line: str, words: list[str]) -> None:
    assert complete(line) == words


def test_the_script_for_bash_is_printed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "clusterprof"],
        env={**os.environ, "_CLUSTERPROF_COMPLETE": "source_bash"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "complete -o default -F" in done.stdout


def test_completion_words_match_those_of_the_commands() -> None:
    assert tuple(scenario.name for scenario in SCENARIOS) == demo._SCENARIOS
    assert set(runs.SECTION.words) == set(SECTION_NAMES)
    assert set(runs.BY.words) == set(TABLE_NAMES)
