"""Real processes that register, live and end: what the events say of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.launch.identity import read_start_ticks
from clusterprof.agent.processes import registry as registry_module
from clusterprof.agent.processes.registry import Registry, has_live_process, parse_registration
from clusterprof.trace.schema import Event

NOW_NS = 5_000_000_000


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "register").mkdir()
    return tmp_path


def start(program: str) -> subprocess.Popen[bytes]:
    """Start a program that waits for its standard input to end first."""
    code = f"import os, signal, sys; sys.stdin.read(); {program}"
    return subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE)


def announce(run_dir: Path, pid: int, **more: Any) -> dict[str, Any]:
    content = {
        "pid": pid,
        "started_ticks": read_start_ticks("/proc", pid),
        "role": "command",
        "variables": {},
        "device": "",
        "node_local_rank": None,
        **more,
    }
    temporary = run_dir / "register" / ".new"
    temporary.write_text(json.dumps(content))
    temporary.chmod(0o600)
    os.rename(temporary, run_dir / "register" / f"{pid}.json")
    return content


def settle(registry: Registry) -> list[Event]:
    """Look until nobody lives and every status has come or been given up."""
    events: list[Event] = []
    now_ns = NOW_NS
    for _ in range(200):
        registry.look(now_ns)
        events += [record for record in registry.take(now_ns) if isinstance(record, Event)]
        if not registry.has_processes():
            return events
        time.sleep(0.005)
        now_ns += 10_000_000
    raise AssertionError("the registry never settled")


@pytest.mark.parametrize(
    ("program", "wait_status", "exit_code", "number"),
    [
        ("sys.exit(0)", 0, 0, None),
        ("sys.exit(7)", 7 << 8, 7, None),
        ("os.kill(os.getpid(), signal.SIGKILL)", 9, None, 9),
        ("os.kill(os.getpid(), signal.SIGTERM)", 15, None, 15),
    ],
)
@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "zombie"])
def test_the_exit_status_of_a_process_is_reported(
    run_dir: Path, program: str, wait_status: int, exit_code: int, number: int, reaped: bool
) -> None:
    registry = Registry(run_dir)
    process = start(program)
    content = announce(run_dir, process.pid)
    registry.look(NOW_NS)
    assert registry.job_pids() == [process.pid]
    assert process.stdin is not None
    process.stdin.close()
    if reaped:
        process.wait()
    events = settle(registry)
    process.wait()
    assert [event.kind for event in events] == ["process-registered", "process-exited"]
    assert events[0].attributes == {
        "pid": process.pid,
        "started_ticks": content["started_ticks"],
        "role": "command",
        "variables": {},
        "device": "",
        "node_local_rank": None,
        "rank": None,
        "world_size": None,
        "node_number": None,
        "restart": None,
        "job": None,
    }
    assert events[1].attributes == {
        "pid": process.pid,
        "started_ticks": content["started_ticks"],
        "wait_status": wait_status,
        "exit_code": exit_code,
        "signal": number,
    }
    assert registry.job_pids() == []
    assert not (run_dir / "register" / f"{process.pid}.json").exists()
    registry.close()


@pytest.mark.parametrize(("late", "stated"), [(3, 7 << 8), (1000, None)], ids=["late", "never"])
def test_a_late_exit_status_is_awaited_for_a_while(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, late: int, stated: int | None
) -> None:
    # as on kernels without PIDFD_GET_INFO, or while the parent has not yet reaped
    answers = iter([None] * late + [7 << 8])
    monkeypatch.setattr(registry_module, "read_wait_status", lambda *_: next(answers))
    registry = Registry(run_dir)
    process = start("sys.exit(7)")
    announce(run_dir, process.pid)
    registry.look(NOW_NS)
    process.communicate()
    events = settle(registry)
    assert [event.attributes.get("wait_status", "") for event in events] == ["", stated]
    assert events[1].t_ns == NOW_NS  # when it ended, not when we knew how
    registry.close()


def test_the_poll_descriptor_becomes_readable_at_a_process_exit(run_dir: Path) -> None:
    import select

    registry = Registry(run_dir)
    process = start("pass")
    announce(run_dir, process.pid)
    registry.look(NOW_NS)
    asked = select.poll()  # the process of the tests may have more files than select() takes
    asked.register(registry.descriptor, select.POLLIN)
    assert asked.poll(0) == []
    process.kill()
    assert asked.poll(5000) == [(registry.descriptor, select.POLLIN)]
    process.wait()
    settle(registry)
    assert asked.poll(0) == []  # or the loop would spin
    registry.close()


def test_a_second_registration_of_a_process_adds_its_facts(run_dir: Path) -> None:
    registry = Registry(run_dir)
    announce(run_dir, os.getpid(), variables={"RANK": "3"})
    registry.look(NOW_NS)
    announce(run_dir, os.getpid(), role="python", device="GPU-1", variables={"RANK": "3"})
    registry.look(NOW_NS + 1)
    events = [record.attributes for record in registry.take(NOW_NS) if isinstance(record, Event)]
    assert [(event["role"], event["device"], event["rank"]) for event in events] == [
        ("command", "", 3),
        ("python", "GPU-1", 3),
    ]
    assert registry.job_pids() == [os.getpid()]
    registry.close()


def test_a_process_that_ended_before_registration_has_no_status(run_dir: Path) -> None:
    registry = Registry(run_dir)
    registry.look(NOW_NS)
    process = start("sys.exit(3)")
    announce(run_dir, process.pid)
    process.communicate()
    events = settle(registry)
    assert [event.kind for event in events] == ["process-registered", "process-exited"]
    assert events[1].attributes["wait_status"] is None
    registry.close()


def test_registrations_left_by_an_earlier_recorder_are_removed(run_dir: Path) -> None:
    process = start("pass")
    announce(run_dir, process.pid)
    process.communicate()
    assert not has_live_process(run_dir)
    registry = Registry(run_dir)
    registry.look(NOW_NS)
    assert registry.take(NOW_NS) == []
    assert list((run_dir / "register").iterdir()) == []
    registry.close()


def test_a_registration_with_a_reused_pid_has_exited(run_dir: Path) -> None:
    registry = Registry(run_dir)
    registry.look(NOW_NS)
    announce(run_dir, os.getpid(), started_ticks=1)  # our pid, but somebody who started earlier
    events = settle(registry)
    assert [event.kind for event in events] == ["process-registered", "process-exited"]
    registry.close()


def test_attaching_registers_a_running_process(run_dir: Path) -> None:
    registry = Registry(run_dir)
    assert registry.attach(os.getpid(), {"RANK": "1"}, NOW_NS)
    (event,) = registry.take(NOW_NS)
    assert isinstance(event, Event)
    assert (event.attributes["attached"], event.attributes["rank"]) == (True, 1)
    assert not registry.attach(2**22 + 1, {}, NOW_NS)  # above the highest pid there can be
    registry.close()


def test_only_launcher_variables_and_short_scalars_are_kept() -> None:
    kept = parse_registration(
        {
            "pid": 5,
            "started_ticks": 6,
            "role": "python",
            "variables": {"RANK": "2", "LOCAL_RANK": "1", "API_TOKEN": "secret", "WORLD_SIZE": 4},
            "argv": ["--password", "secret"],
            "problem": "x" * 1000,
            "huge": 1 << 80,
            "deep": {"a": 1},
        }
    )
    assert kept == {
        "pid": 5,
        "started_ticks": 6,
        "role": "python",
        "device": "",
        "node_local_rank": 1,
        "variables": {"RANK": "2", "LOCAL_RANK": "1"},
        "rank": 2,
        "problem": "x" * 256,
        "world_size": None,
        "node_number": None,
        "restart": None,
        "job": None,
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"pid": 1},
        {"pid": "1", "started_ticks": 1},
        {"pid": True, "started_ticks": 1},
        {"pid": -1, "started_ticks": 1},
        {"pid": 1, "started_ticks": 1 << 70},
    ],
)
def test_a_file_without_a_process_is_not_a_registration(wrong: dict[str, Any]) -> None:
    assert parse_registration(wrong) is None


def test_links_pipes_and_foreign_files_are_not_registrations(run_dir: Path, tmp_path: Path) -> None:
    folder = run_dir / "register"
    (folder / "1.json").symlink_to("/etc/passwd")
    os.mkfifo(folder / "2.json")
    (folder / "3.json").write_text("{" + " " * 5000 + "}")
    (folder / "4.json").write_text('{"pid": 5, "started_ticks": 1}')  # says it is somebody else
    (folder / "5.json").mkdir()
    registry = Registry(run_dir)
    registry.look(NOW_NS)
    assert registry.take(NOW_NS) == []
    assert not registry.has_registered
    registry.close()
