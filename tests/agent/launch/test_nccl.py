"""Which variables a recorded job gets, and that none of the user's is changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.agent.launch.nccl import find_inspector_plugin, with_nccl_variables

PLUGIN = "libnccl-profiler-inspector.so"


def added(environ: dict[str, str], run_dir: Path, has_end: bool = False) -> dict[str, str]:
    result = with_nccl_variables(environ, run_dir, has_end)
    assert {name: result[name] for name in environ} == environ  # nothing of the user's is changed
    return {name: value for name, value in result.items() if name not in environ}


def with_plugin(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / PLUGIN).write_bytes(b"\x7fELF")
    return {"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}/lib"}


def test_the_flight_recorder_is_enabled_and_dumps_into_the_recording(tmp_path: Path) -> None:
    prefix = f"{tmp_path}/nccl/flight_rank_"
    assert added({}, tmp_path) == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": prefix,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_a_flight_recorder_buffer_set_by_the_user_is_kept(tmp_path: Path, name: str) -> None:
    names = added({name: "0"}, tmp_path)
    assert not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & names.keys()


def test_a_dump_file_set_by_the_user_is_kept(tmp_path: Path) -> None:
    names = added({"TORCH_FR_DUMP_TEMP_FILE": "/mine/trace_"}, tmp_path)
    assert names.keys() == {"TORCH_FR_BUFFER_SIZE"}


def test_an_installed_inspector_plugin_is_enabled(tmp_path: Path) -> None:
    values = added(with_plugin(tmp_path), tmp_path)
    inspector = {name: value for name, value in values.items() if name.startswith("NCCL_")}
    assert inspector == {
        "NCCL_PROFILER_PLUGIN": f"{tmp_path}/lib/{PLUGIN}",
        "NCCL_INSPECTOR_ENABLE": "1",
        "NCCL_INSPECTOR_DUMP_DIR": f"{tmp_path}/nccl",
        "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "10000000",
    }


@pytest.mark.parametrize("own", [{"NCCL_PROFILER_PLUGIN": "mine"}, {"NCCL_INSPECTOR_ENABLE": "0"}])
def test_an_inspector_set_by_the_user_is_kept(tmp_path: Path, own: dict[str, str]) -> None:
    environ = with_plugin(tmp_path) | own
    assert find_inspector_plugin(environ) is None
    assert not any(name.startswith("NCCL_") for name in added(environ, tmp_path))


def test_a_recording_that_ends_before_the_job_uses_no_inspector(tmp_path: Path) -> None:
    environ = with_plugin(tmp_path)
    assert not any(name.startswith("NCCL_") for name in added(environ, tmp_path, has_end=True))


def test_relative_folders_are_not_searched_for_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_plugin(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert find_inspector_plugin({"LD_LIBRARY_PATH": "lib:"}) is None
    assert find_inspector_plugin({}) is None


def test_all_ranks_of_a_node_get_the_same_variables(tmp_path: Path) -> None:
    assert added({}, tmp_path) == added({}, tmp_path)
