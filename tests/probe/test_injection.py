"""Putting the probe in place: the files, the environment, and who will not look."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterprof.agent.launch import launcher
from clusterprof.errors import CannotStart
from tests.support.probe_jobs import install_probe


def test_the_probe_is_installed_in_the_run_directory(tmp_path: Path) -> None:
    run_dir = install_probe(tmp_path / "run")
    probe = run_dir / "probe"
    assert sorted(path.name for path in probe.iterdir() if path.name != "__pycache__") == [
        "_clusterprof_probe",
        "config.json",
        "sitecustomize.py",
    ]
    assert (probe / "_clusterprof_probe/hooks/dataloader.py").is_file()
    assert not list(run_dir.glob("*.tmp"))


def test_an_existing_probe_is_not_replaced(tmp_path: Path) -> None:
    run_dir = install_probe(tmp_path / "run", gpu_events=False)
    (run_dir / "probe/mark").write_text("")
    launcher.install_probe(run_dir, gpu_events=True, strict=True)
    assert (run_dir / "probe/mark").exists()
    assert '"gpu_events": false' in (run_dir / "probe/config.json").read_text()


def test_an_empty_probe_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "run/probe").mkdir(parents=True)
    launcher.install_probe(tmp_path / "run", gpu_events=True, strict=False)
    assert (tmp_path / "run/probe/sitecustomize.py").is_file()


def test_an_unwritable_run_directory_prevents_the_start(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(CannotStart, match="the probe cannot be put into"):
        launcher.install_probe(tmp_path / "run", gpu_events=True, strict=False)


@pytest.mark.parametrize(
    ("stacks", "lines"),
    [
        (None, ['"stacks": false', '"stack_paths": 0']),
        ("full", ['"stacks": true', '"stack_paths": 0']),
        ("hash", ['"stacks": true', '"stack_paths": 1']),
        ("names", ['"stacks": true', '"stack_paths": 2']),
    ],
)
def test_the_configuration_has_the_stack_sampling_mode(
    tmp_path: Path, stacks: launcher.StackPaths | None, lines: list[str]
) -> None:
    content = (install_probe(tmp_path / "run", stacks=stacks) / "probe/config.json").read_text()
    assert [line.strip(",") for line in content.splitlines() if "stack" in line] == lines


@pytest.mark.parametrize(
    "before, after",
    [
        ({}, "/run/probe"),
        ({"PYTHONPATH": ""}, "/run/probe"),
        ({"PYTHONPATH": "/a:/b"}, "/run/probe:/a:/b"),
        ({"PYTHONPATH": "/a:/run/probe"}, "/a:/run/probe"),
    ],
)
def test_pythonpath_keeps_its_earlier_entries(before: dict[str, str], after: str) -> None:
    result = launcher.with_probe_path(Path("/run"), {**before, "HOME": "/home"})
    assert result == {"HOME": "/home", "PYTHONPATH": after, "CLUSTERPROF_RUN_DIR": "/run"}


@pytest.mark.parametrize(
    "command, letter",
    [
        ("python train.py", ""),
        ("python3.12 -u -m torch.distributed.run -I", ""),
        ("python -c pass -S", ""),
        ("python -X dev -W error -I train.py", "I"),
        ("/usr/bin/python3 -uE train.py", "E"),
        ("python -S train.py", "S"),
        ("pypy3 -I train.py", "I"),
        ("python -WI train.py", ""),
        ("python - -I", ""),
        ("env A=1 nice -n 5 python -I train.py", "I"),
        ("srun --ntasks=8 python train.py -I", ""),
        ("bash -lc python", ""),
        ("torchrun --nproc-per-node 8 train.py", ""),
        ("pythonic -I", ""),
        ("", ""),
    ],
)
def test_python_options_that_prevent_injection_are_named(command: str, letter: str) -> None:
    reason = launcher.find_injection_obstacle(command.split())
    assert (reason or "").startswith(f"python -{letter}" if letter else "")
    assert (reason is None) == (not letter)


@pytest.mark.parametrize("line, reason", [("python3 -I", "python -I"), ("env python3", None)])
def test_options_in_the_shebang_line_prevent_injection(
    tmp_path: Path, line: str, reason: str | None
) -> None:
    script = tmp_path / "train"
    script.write_text(f"#!/usr/bin/{line}\n")
    os.chmod(script, 0o755)
    injection_obstacle = launcher.find_injection_obstacle([str(script), "-E"])
    assert (
        injection_obstacle is None
        if reason is None
        else injection_obstacle is not None and injection_obstacle.startswith(reason)
    )
