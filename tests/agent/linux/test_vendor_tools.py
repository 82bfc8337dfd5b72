"""Command-line tools that hang, die, print too much or leave something behind: real processes."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from clusterprof.agent.linux import vendor_tools as tools
from clusterprof.errors import Unavailable
from tests.support.accelerators.simulated import wait_until, write_tool
from tests.support.recording_runs import is_alive


def made(folder: Path, script: str) -> list[str]:
    return [str(write_tool(folder / "bin", "the-tool", script) / "the-tool")]


def reason(argv: list[str], seconds: float = 20.0) -> tuple[str, str]:
    with pytest.raises(Unavailable) as raised:
        tools.run_tool(argv, seconds)
    return raised.value.kind, raised.value.message


def test_the_output_of_a_tool_is_returned(tmp_path: Path) -> None:
    assert tools.run_tool(made(tmp_path, 'echo one; echo "$#" >&2; echo two'), 20.0) == "one\ntwo\n"


def test_a_failed_tool_has_a_reason(tmp_path: Path) -> None:
    assert reason([str(tmp_path / "none")]) == ("absent", "none was not found")
    failing = made(tmp_path, "echo; echo no device; exit 3")
    assert reason(failing) == ("failed", "the-tool failed (exit code 3): no device")
    killed = made(tmp_path, "kill -9 $$")
    assert reason(killed) == ("failed", "the-tool failed (signal 9)")


def test_a_tool_without_execute_permission_is_denied(tmp_path: Path) -> None:
    argv = made(tmp_path, "echo")
    os.chmod(argv[0], 0o644)
    assert reason(argv) == ("denied", "the-tool is not executable")


def test_a_hanging_tool_is_ended_with_its_child_processes(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = (
        f"trap '' TERM; sleep 600 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait; sleep 600"
    )
    argv = made(tmp_path, script)
    collected: list[tuple[str, str]] = []
    thread = threading.Thread(target=lambda: collected.append(reason(argv, 1.0)))
    thread.start()
    started = [int(word) for word in wait_until(lambda: pids.exists() and pids.read_text()).split()]
    thread.join()
    assert collected == [("failed", "the-tool has not answered within 1 s")]
    wait_until(lambda: not any(is_alive(pid) for pid in started))


def test_excessive_tool_output_is_cut(tmp_path: Path) -> None:
    flood = made(tmp_path, "exec yes")
    assert reason(flood) == ("failed", "the-tool printed more than 4 MiB")
    with pytest.raises(Unavailable) as raised:
        tools.run_streaming_tool(
            made(tmp_path, "yes | tr -d '\\n'"), lambda line: None, lambda: True
        )
    assert raised.value.message == "the-tool printed 4 MiB without the end of a line"


def test_lines_are_read_until_exit_silence_or_request_to_stop(tmp_path: Path) -> None:
    lines: list[bytes] = []
    with pytest.raises(Unavailable) as raised:
        tools.run_streaming_tool(
            made(tmp_path, "printf 'a\\nb'; printf 'c\\n\\377\\n'; exit 5"),
            lines.append,
            lambda: True,
        )
    assert lines == [b"a", b"bc", b"\xff"]
    assert raised.value.message == "the-tool has ended (exit code 5)"
    endless = made(tmp_path, "echo $$; exec sleep 600")
    lines.clear()
    tools.run_streaming_tool(endless, lines.append, lambda: not lines, look_seconds=0.02)
    wait_until(lambda: not is_alive(int(lines[0])))
    lines.clear()
    with pytest.raises(Unavailable) as raised:
        tools.run_streaming_tool(endless, lines.append, lambda: True, (), 0.02, silent_seconds=0.3)
    assert raised.value.message == "the-tool hangs: 0.3 s of silence"
    wait_until(lambda: not any(is_alive(int(pid)) for pid in lines))


def test_a_tool_ends_when_the_parent_process_is_killed(tmp_path: Path) -> None:
    argv = made(tmp_path, "trap '' TERM HUP INT; echo $$; while :; do sleep 1; done")
    program = (
        "import os, sys; from clusterprof.agent.linux.vendor_tools import run_streaming_tool\n"
        "run_streaming_tool(sys.argv[1:], lambda line: os.write(1, line), lambda: True)"
    )
    reader, writer = os.pipe()
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", program, *argv],
        {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        file_actions=[(os.POSIX_SPAWN_DUP2, writer, 1)],
    )
    os.close(writer)
    below = int(os.read(reader, 100))
    assert is_alive(below)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    wait_until(lambda: not is_alive(below))
    os.close(reader)
