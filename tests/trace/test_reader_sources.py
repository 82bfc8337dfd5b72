"""Recordings brought together from several places: each node once, and what is left out is said."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from clusterprof.errors import NoRecording
from clusterprof.trace.reader import NodeSources, SkippedInput, find_nodes
from clusterprof.trace.writer import RecordingWriter
from tests.support.trace_samples import HEADER, ManualClock, make_second

GIVE = "give the folder that `clusterprof record` wrote"


def node(folder: Path, key: str = "", seconds: int = 2, boot: str = "b") -> Path:
    """Write the recording of one node, with a key of its own."""
    header = replace(HEADER, node={**HEADER.node, "key": key or folder.name, "boot_id": boot})
    clock = ManualClock()
    writer = RecordingWriter(folder, header, clock, keep_free_bytes=0)
    for number in range(seconds):
        clock.now_ns += 1_000_000_000
        writer.append(*make_second(number))
    writer.close()
    return folder


def test_runs_node_folders_and_segments_are_joined(tmp_path: Path) -> None:
    run = tmp_path / "shared"
    a, b = node(run / "a"), node(run / "b")
    c, d = node(tmp_path / "host-c" / "c"), node(tmp_path / "host-d" / "d")
    nodes_found = find_nodes([run, tmp_path / "host-c", d / "000001.cpf"])
    assert nodes_found == NodeSources((a, b, c, d / "000001.cpf"))
    assert find_nodes([d, run]) == NodeSources((d, a, b))


def test_the_longer_of_two_copies_of_a_node_is_used(tmp_path: Path) -> None:
    short, other = node(tmp_path / "x" / "a", seconds=2), node(tmp_path / "x" / "b")
    long = node(tmp_path / "y" / "copy-of-a", key="a", seconds=5)
    nodes_found = find_nodes([tmp_path / "x", tmp_path / "y"])
    assert nodes_found.folders == (long, other)
    [left] = nodes_found.skipped
    assert (left.path, left.is_copy) == (short, True)
    assert left.why == f"a copy of the recording in {long}, which was used instead"


def test_a_copy_of_a_node_inside_a_recording_is_ignored(tmp_path: Path) -> None:
    first = node(tmp_path / "a")
    shutil.copytree(first, tmp_path / "a.bak")
    assert find_nodes([tmp_path]).folders == (first,)


def test_another_boot_or_start_is_a_separate_recording(tmp_path: Path) -> None:
    first, second_ = node(tmp_path / "1" / "a"), node(tmp_path / "2" / "a", boot="c")
    third = node(tmp_path / "3" / "a-later")
    nodes_found = find_nodes([tmp_path / "1", tmp_path / "2", tmp_path / "3"])
    assert nodes_found == NodeSources((first, second_, third))


def test_a_repeated_path_is_read_once_without_a_note(tmp_path: Path) -> None:
    run = tmp_path / "run"
    a = node(run / "a")
    (tmp_path / "link").symlink_to(run)
    assert find_nodes([run, a, tmp_path / "link"]) == NodeSources((a,))


def test_segments_given_individually_are_joined_to_their_node(tmp_path: Path) -> None:
    a = node(tmp_path / "a")
    (a / "000002.cpf").write_bytes((a / "000001.cpf").read_bytes())
    b = node(tmp_path / "b")
    nodes_found = find_nodes([a / "000001.cpf", a / "000002.cpf", b / "000001.cpf"])
    assert nodes_found == NodeSources((a, b / "000001.cpf"))


def test_an_input_without_a_recording_is_skipped_with_a_reason(tmp_path: Path) -> None:
    a = node(tmp_path / "run" / "a")
    empty, notes = tmp_path / "empty", tmp_path / "notes.txt"
    empty.mkdir()
    notes.write_text("hello")
    assert find_nodes([empty, tmp_path / "run", notes]) == NodeSources(
        (a,),
        (
            SkippedInput(empty, "no recording in this folder (no .cpf files)", GIVE, is_copy=False),
            SkippedInput(notes, "not a recording (no .cpf file)", GIVE, is_copy=False),
        ),
    )


def test_an_error_without_readable_inputs_lists_all_reasons(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
    with pytest.raises(NoRecording) as caught:
        find_nodes([tmp_path / "x", tmp_path / "y"])
    why = "no recording in this folder (no .cpf files)"
    assert caught.value.message == f"{tmp_path}/x: {why}; {tmp_path}/y: {why}"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("gone", GIVE), ("host*", "no file matches this pattern; give the folders of the nodes")],
)
def test_a_missing_path_among_valid_paths_is_an_error(
    tmp_path: Path, name: str, remedy: str
) -> None:
    node(tmp_path / "run" / "a")
    with pytest.raises(NoRecording) as caught:
        find_nodes([tmp_path / "run", tmp_path / name])
    assert caught.value.message == f"{tmp_path}/{name}: no such file or directory"
    assert caught.value.remedy == remedy


def test_an_unreadable_node_of_another_user_is_skipped_and_reported(
    as_nobody: Callable[[], AbstractContextManager[None]],
) -> None:
    with tempfile.TemporaryDirectory() as name:  # a folder of pytest's lets nobody else through
        run = Path(name)
        a, shut = node(run / "a"), node(run / "b")
        for path in (run, a, a / "000001.cpf"):
            path.chmod(0o755)
        shut.chmod(0o700 if os.geteuid() == 0 else 0o000)
        with as_nobody():
            nodes_found = find_nodes([run])
        shut.chmod(0o700)
    assert nodes_found.folders == (a,)
    assert [(item.path, item.why, item.is_copy) for item in nodes_found.skipped] == [
        (shut, "permission denied", False)
    ]
