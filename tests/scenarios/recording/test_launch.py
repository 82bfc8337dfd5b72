"""`record -- CMD` is CMD: exit status, signals, pid, descriptors; and the recorder is no child."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterprof.trace.schema import Clock, Columns, Header, Rows
from tests.support.recording_runs import (
    PYTHON,
    RECORD,
    find_recorder_pid,
    get_run_dir,
    is_alive,
    list_events,
    make_environment,
    make_job_id,
    read_records,
    record,
    run_launcher,
    wait_for_end,
    wait_for_recording,
    wait_until,
)


@pytest.fixture
def job() -> Iterator[str]:
    name = make_job_id("launch")
    yield name
    wait_until(lambda: not get_run_dir(name).exists())  # every recorder left, and tidied up


def test_every_exit_code_of_the_command_is_returned(tmp_path: Path, job: str) -> None:
    printed = run_launcher(
        tmp_path / "out",
        job,
        """
        statuses = [status_of("/bin/sh", "-c", f"exit {code}") for code in range(256)]
        print(statuses)
        """,
    )
    assert printed.strip() == str([code << 8 for code in range(256)])


def test_every_fatal_signal_of_the_command_is_returned(tmp_path: Path, job: str) -> None:
    harmless = {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH}
    stopping = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
    fatal = sorted(set(range(1, 32)) - {int(n) for n in harmless | stopping})
    printed = run_launcher(
        tmp_path / "out",
        job,
        f"""
        import resource, signal
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # nohup and background jobs of a shell ignore these, and every child would inherit that
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        print([status_of("/bin/sh", "-c", f"kill -{{n}} $$; sleep 9") & 0x7F for n in {fatal}])
        """,
    )
    assert printed.strip() == str(fatal)


def test_the_record_command_exits_with_the_code_of_its_command(tmp_path: Path) -> None:
    for code in (0, 1, 7, 255):
        done = record(tmp_path / str(code), "/bin/sh", "-c", f"exit {code}", env=make_environment())
        assert done.returncode == code
    killed = record(tmp_path / "killed", "/bin/sh", "-c", "kill -9 $$", env=make_environment())
    assert killed.returncode == -9


def test_record_adds_only_a_single_line_to_stderr(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = record(out, "/bin/sh", "-c", "cat; echo err >&2", env=make_environment())
    assert done.stdout == ""
    ours, theirs = done.stderr.splitlines()
    assert ours.startswith(f"clusterprof: recording to {out}; ")
    assert ours.endswith(f"then: clusterprof analyze {out}")
    assert theirs == "err"


@pytest.mark.parametrize("words", ['exec "$@" 2>/dev/full', 'exec "$@" 2>&-'])
def test_the_command_runs_despite_an_unwritable_stderr(tmp_path: Path, words: str) -> None:
    out = tmp_path / "out"
    command = ["/bin/sh", "-c", words, "sh", *RECORD, "-o", str(out), "--", "/bin/sh", "-c"]
    done = subprocess.run(
        [*command, "echo trained; exit 7"],
        env=make_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, "trained\n")
    wait_for_end(out)


def test_the_command_keeps_the_pid_and_the_recorder_is_detached(tmp_path: Path, job: str) -> None:
    out = tmp_path / "out"
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(30)"
    process = subprocess.Popen(
        [*RECORD, "-o", str(out), "--", PYTHON, "-c", program],
        env=make_environment(job),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    agent = find_recorder_pid(job)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children == []
    assert os.getsid(agent) not in (os.getsid(process.pid), process.pid)
    assert os.readlink(f"/proc/{agent}/cwd") == "/"
    for number in (0, 1):
        assert os.readlink(f"/proc/{agent}/fd/{number}") == "/dev/null"
    process.kill()
    process.wait()
    wait_for_end(out)
    (exited,) = list_events(out, "process-exited")
    assert exited.attributes["signal"] == signal.SIGKILL
    assert exited.attributes["pid"] == process.pid
    wait_until(lambda: not is_alive(agent))


def test_the_command_inherits_no_descriptor_of_the_recorder(tmp_path: Path) -> None:
    program = "import os; print(sorted(os.listdir('/proc/self/fd'), key=int))"
    plain = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, check=True)
    done = record(
        tmp_path / "out", PYTHON, "-c", program, options=("--inject", "off"), env=make_environment()
    )
    assert done.stdout == plain.stdout


def test_signal_dispositions_and_mask_are_untouched(tmp_path: Path) -> None:
    program = ["/bin/grep", "^Sig[BIC]", "/proc/self/status"]

    def ignore_hangup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

    plain = subprocess.run(
        program, capture_output=True, text=True, check=True, preexec_fn=ignore_hangup
    )
    done = subprocess.run(
        [*RECORD, "-o", str(tmp_path / "out"), "--", *program],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=ignore_hangup,
        env=make_environment(),
    )
    ignored = next(line for line in plain.stdout.splitlines() if line.startswith("SigIgn"))
    assert int(ignored.split()[1], 16) & 1  # SIGHUP is signal 1; others may come from our parent
    assert done.stdout == plain.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_is_delivered_once(tmp_path: Path, job: str, number: signal.Signals) -> None:
    program = textwrap.dedent(f"""
        import signal, time
        count = []
        signal.signal({int(number)}, lambda *_: count.append(1))
        print("ready", flush=True)
        while not count:
            time.sleep(0.05)
        end = time.monotonic() + 0.5  # in which a second one would come
        while time.monotonic() < end:
            time.sleep(0.05)
        print(len(count))
        """)
    process = subprocess.Popen(
        [*RECORD, "-o", str(tmp_path / "out"), "--", PYTHON, "-c", program],
        env=make_environment(job),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, number)  # as a terminal or a resource manager does: to the whole group
    assert process.stdout.read() == "1\n"
    assert process.wait() == 0
    wait_for_end(tmp_path / "out")


def test_a_recording_has_header_clock_samples_and_an_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    burn = "import time\nend = time.monotonic() + 1.2\nwhile time.monotonic() < end: pass"
    record(out, PYTHON, "-c", burn, env=make_environment(), options=("--inject", "off"))
    records = read_records(out)
    assert isinstance(records[0], Header)
    assert isinstance(records[1], Clock)
    names = {item.collector for item in records if isinstance(item, Columns)}
    assert {"cpu", "memory", "disk", "self"} <= names
    cpu = [
        t
        for item in records
        if isinstance(item, Columns) and item.collector == "cpu"
        for t in item.t_ns
    ]
    missed = [
        values[-1]
        for item in records
        if isinstance(item, Columns)
        for signal, values in zip(item.signals, item.values)
        if signal == "self.ticks_missed_total"
    ]
    # 1.2 s at 10 Hz, with the launch before and the end after; a busy machine's misses are counted.
    assert len(cpu) + max(missed) >= 10
    threads = [item for item in records if isinstance(item, Rows) and item.table == "threads"]
    command = list_events(out, "process-registered")[0].attributes["pid"]
    assert any(command in thread.columns[thread.names.index("tid")] for thread in threads)
    (stopped,) = list_events(out, "recorder-stopped")
    assert stopped.attributes["reason"] == "no process is left"


def test_the_first_frame_is_on_disk_before_the_command_starts(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = record(out, "/bin/sh", "-c", f"cat {out}/*/000001.cpf | wc -c", env=make_environment())
    assert int(done.stdout) > 1000


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["no-such-command"], 127, "no-such-command: command not found"),
        (["/no/such/command"], 127, "/no/such/command: command not found"),
        (["/etc/passwd"], 126, "/etc/passwd: permission denied"),
        (["/etc"], 126, "/etc: is a directory"),
    ],
)
def test_an_unexecutable_command_is_reported_like_in_a_shell(
    tmp_path: Path, command: list[str], code: int, words: str
) -> None:
    done = subprocess.run(
        [*RECORD, "-o", str(tmp_path / "out"), "--", *command],
        capture_output=True,
        text=True,
        env=make_environment(),
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, f"clusterprof: {words}\n")
    assert not (tmp_path / "out").exists()


def test_a_script_without_a_shebang_is_run_by_a_shell(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("exit 9\n")
    script.chmod(0o755)
    assert record(tmp_path / "out", str(script), env=make_environment()).returncode == 9


def test_a_failed_recorder_start_does_not_stop_the_command(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    command = ["--", "/bin/echo", "trained"]
    env = make_environment()
    done = subprocess.run(
        [*RECORD, "-o", str(file), *command], capture_output=True, text=True, env=env, check=False
    )
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.startswith("clusterprof: not recording: ")
    assert len(done.stderr.splitlines()) == 1
    strict = subprocess.run(
        [*RECORD, "-o", str(file), "--inject", "strict", *command],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert (strict.returncode, strict.stdout) == (125, "")


def test_the_recorder_exits_within_two_seconds_after_the_job(tmp_path: Path, job: str) -> None:
    process = subprocess.Popen(
        [*RECORD, "-o", str(tmp_path / "out"), "--", "/bin/sleep", "60"], env=make_environment(job)
    )
    wait_for_recording(tmp_path / "out")
    agent = find_recorder_pid(job)
    wait_until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
    waited_ns = [read_run_delay_ns(agent)]

    def has_ended() -> bool:
        waited_ns.append(read_run_delay_ns(agent) or waited_ns[-1])
        return not is_alive(agent)

    process.terminate()
    process.wait()
    wait_until(has_ended)
    (exited,), (stopped,) = (
        list_events(tmp_path / "out", kind) for kind in ("process-exited", "recorder-stopped")
    )
    # On a busy machine it also waits for a CPU, which is not its own time.
    took_ns = stopped.t_ns - exited.t_ns
    assert 0 <= took_ns <= 2_000_000_000 + waited_ns[-1] - waited_ns[0]


def read_run_delay_ns(pid: int) -> int:
    """Read how long the first thread of a process has waited for a CPU; 0 when it has ended."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    except OSError:
        return 0
