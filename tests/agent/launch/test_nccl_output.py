"""The files of NCCL's Inspector plugin stay bounded while a process writes them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from clusterprof.agent.launch import launcher, nccl
from clusterprof.agent.launch.nccl import (
    CHECK_NS,
    MAX_FILE_BYTES,
    InspectorOutput,
    remove_first_bytes,
    with_nccl_variables,
)
from clusterprof.agent.options import Plan

LINE = b'{"header": {"id": "0x1", "rank": 0}, "coll_perf": {"coll_sn": %09d}}\n'


def fail(name: str, error: BaseException) -> None:
    raise AssertionError(name) from error


def output_of(tmp_path: Path) -> InspectorOutput:
    run_dir, folder = tmp_path / "run-dir", tmp_path / "node"
    run_dir.mkdir()
    folder.mkdir(mode=0o700)
    with_nccl_variables({}, run_dir)
    return InspectorOutput(run_dir, folder, fail)


def test_plugins_cannot_write_before_the_recording_exists(tmp_path: Path) -> None:
    with_nccl_variables({}, tmp_path)
    with pytest.raises(OSError):  # as the plugin does
        os.mkdir(tmp_path / "nccl")
    assert not (tmp_path / "nccl").exists()


@pytest.mark.parametrize("wanted", [True, False])
def test_output_is_reserved_before_the_recorder_starts(
    wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorder that is quick must find it: it looks once, when it starts."""
    seen = []

    def start_agent(arguments: Sequence[str], run_dir: Path, *_: object) -> dict[str, str]:
        seen.append((os.path.islink(run_dir / "nccl"), (run_dir / "dumps").is_dir()))
        return {}

    monkeypatch.setattr(launcher, "start_detached_agent", start_agent)
    request = launcher.LaunchRequest(("true",), tmp_path / "out", Plan, nccl=wanted)
    launcher.start_recording(request, "job", tmp_path / "run-dir", {}, lambda line: None)
    assert seen == [(wanted, wanted)]


def test_plugin_output_is_kept_in_the_recording(tmp_path: Path) -> None:
    output_of(tmp_path)
    (tmp_path / "run-dir" / "nccl" / "host-pid1.log").write_bytes(LINE % 1)
    assert (tmp_path / "node" / "nccl" / "host-pid1.log").read_bytes() == LINE % 1


def test_without_nccl_variables_no_folder_is_created(tmp_path: Path) -> None:
    output = InspectorOutput(tmp_path, tmp_path, fail)
    output.take(0)
    output.finish(0)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_output_folder_is_removed(tmp_path: Path) -> None:
    output_of(tmp_path).finish(0)
    assert list((tmp_path / "node").iterdir()) == []


@pytest.mark.parametrize("can_punch", [True, False])
def test_excessive_plugin_output_is_limited_to_the_newest_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_punch: bool
) -> None:
    if not can_punch:
        monkeypatch.setattr(nccl, "_punch_hole", lambda *_: False)
    output = output_of(tmp_path)
    path = tmp_path / "node" / "nccl" / "host-pid1.log"
    number, now_ns = 0, 0
    with path.open("wb") as plugin:  # "w", as json.cc opens it: it keeps its own position
        for _ in range(10):
            for _ in range(MAX_FILE_BYTES // 4 // len(LINE % 0)):
                plugin.write(LINE % number)
                number += 1
            plugin.flush()
            now_ns += CHECK_NS
            output.take(now_ns)
            assert os.stat(path).st_blocks * 512 <= 2 * MAX_FILE_BYTES
        plugin.write(LINE % number)
    # 10 x 4 MiB were written; the newest line is there, what is gone reads as zeros.
    assert os.stat(path).st_size > 2 * MAX_FILE_BYTES
    kept = path.read_bytes().lstrip(b"\0")
    assert kept.endswith(LINE % number)
    assert 0 < len(kept) <= 2 * MAX_FILE_BYTES


def test_symbolic_links_in_the_folder_are_not_truncated(tmp_path: Path) -> None:
    output = output_of(tmp_path)
    secret = tmp_path / "secret"
    with secret.open("wb") as file:
        file.truncate(2 * MAX_FILE_BYTES)
        file.seek(0)
        file.write(b"mine")
    (tmp_path / "node" / "nccl" / "host-pid1.log").symlink_to(secret)
    output.take(CHECK_NS)
    assert secret.read_bytes()[:4] == b"mine"
    with pytest.raises(OSError):
        remove_first_bytes(str(tmp_path / "node" / "nccl" / "host-pid1.log"), 0, 4096)
