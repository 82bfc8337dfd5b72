"""Announcements of process groups: what enters a recording, and what does not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.launch.election import ensure_run_dir
from clusterprof.agent.processes.registry import ProcessGroupReader, parse_group
from clusterprof.trace.schema import Event

NOW_NS = 5_000_000_000


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    ensure_run_dir(tmp_path / "run")
    return tmp_path / "run"


def announce(run_dir: Path, name: str, content: Any) -> None:
    temporary = run_dir / "groups" / ".new"
    temporary.write_text(json.dumps(content))
    temporary.chmod(0o600)
    os.rename(temporary, run_dir / "groups" / name)


def test_each_group_announcement_becomes_a_single_event(run_dir: Path) -> None:
    groups = ProcessGroupReader(run_dir)
    assert groups.take(NOW_NS) == []
    first = {"pid": 7, "group": 2**63 - 1, "ranks": [0, 3]}
    announce(run_dir, f"7.{2**63 - 1}.json", first)
    assert groups.take(NOW_NS) == [Event(NOW_NS, "group-announced", first)]
    assert groups.take(NOW_NS + 1) == []
    last = {"pid": 8, "group": 0, "ranks": list(range(16_384))}
    announce(run_dir, "8.0.json", last)
    assert groups.finish(NOW_NS + 2) == [Event(NOW_NS + 2, "group-announced", last)]
    assert groups.finish(NOW_NS + 3) == []


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"pid": 7, "group": 5},
        {"pid": 7, "group": 5, "ranks": []},
        {"pid": 7, "group": 5, "ranks": "0,1"},
        {"pid": 7, "group": 5, "ranks": [0, -1]},
        {"pid": 7, "group": 5, "ranks": [0, True]},
        {"pid": 7, "group": 5, "ranks": [0, 2**63]},
        {"pid": "7", "group": 5, "ranks": [0]},
        {"pid": 7, "group": -5, "ranks": [0]},
    ],
)
def test_a_file_without_a_group_is_ignored(run_dir: Path, content: dict[str, Any]) -> None:
    assert parse_group(content) is None
    announce(run_dir, "7.5.json", content)
    assert ProcessGroupReader(run_dir).finish(NOW_NS) == []


def test_an_announcement_with_a_mismatched_file_name_is_ignored(run_dir: Path) -> None:
    announce(run_dir, "8.5.json", {"pid": 7, "group": 5, "ranks": [0]})
    announce(run_dir, "7.6.json", {"pid": 7, "group": 5, "ranks": [0]})
    assert ProcessGroupReader(run_dir).finish(NOW_NS) == []


def test_a_run_directory_without_a_groups_folder_has_no_groups(tmp_path: Path) -> None:
    assert ProcessGroupReader(tmp_path).finish(NOW_NS) == []
