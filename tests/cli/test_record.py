"""The options of `record`, read without typer and the same in `python -m clusterprof.agent`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.options import RECORD_OPTIONS, RecordOptions, parse_record_arguments
from clusterprof.cli.recording import choose_stacks
from clusterprof.errors import UsageError
from clusterprof.trace.reader import NodeReader, list_node_folders
from clusterprof.trace.schema import Event, Gap, Header, Record
from tests.support.commands import make_environment, run_command
from tests.support.recording_runs import wait_until

PATIENCE_S = 30
RECORD = [sys.executable, "-m", "clusterprof", "record"]
AGENT = [sys.executable, "-m", "clusterprof.agent"]
BOTH = pytest.mark.parametrize("program", [RECORD, AGENT], ids=["record", "agent"])


def clean(**changes: str) -> dict[str, str]:
    """Return an environment in which the recorder's job is this test's own."""
    return {
        **make_environment(**changes),
        "SLURM_JOB_ID": f"options-{os.getpid()}-{time.monotonic_ns()}",
    }


def run(*words: str, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        cwd=cwd,
        env=clean(**changes),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def records_of(out: Path) -> list[Record]:
    """Return the records of a recording, once its recorder has stopped."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        records = [record for folder in list_node_folders(out) for record in NodeReader(folder)]
        if any(
            isinstance(record, Event) and record.kind == "recorder-stopped" for record in records
        ):
            return records
        time.sleep(0.05)
    raise AssertionError(f"the recorder of {out} did not stop")


def event(records: list[Record], kind: str) -> dict[str, Any]:
    (record,) = (record for record in records if isinstance(record, Event) and record.kind == kind)
    return dict(record.attributes)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["/bin/sleep", "60"])
    yield process
    process.kill()
    process.wait()


CMD = ("train", "-o", "y", "--hz", "9")
READ = {
    "nothing": ("", RecordOptions([])),
    "behind two dashes": (f"-o x -- {' '.join(CMD)}", RecordOptions(CMD, Path("x"))),
    "at the first word": (f"--hz 5 {' '.join(CMD)}", RecordOptions(CMD, hz=5.0)),
    "only the first two dashes": ("-- env -- train", RecordOptions(("env", "--", "train"))),
    "help of the command": ("train --help", RecordOptions(("train", "--help"))),
    "a lone dash": ("- x", RecordOptions(("-", "x"))),
    "joined": ("-ox --hz=2.5", RecordOptions([], Path("x"), hz=2.5)),
    "a value like an option": ("--out --hz", RecordOptions([], Path("--hz"))),
    "all": (
        "--out o --profile ci --duration 1m --hz 1 --inject off --pid 7 --no-gpu-events"
        " --keep-free 1GiB --stacks off --mode 0750 --nccl off --on-hang true --hang-after 2m",
        RecordOptions(
            *([], Path("o"), "ci", "1m", 1.0, "off", 7, False, "1GiB", "off", "0750"),
            *(None, "off", "true", "2m"),
        ),
    ),
}


@pytest.mark.parametrize(("words", "asked"), READ.values(), ids=READ.keys())
def test_only_options_before_the_command_are_parsed(words: str, asked: RecordOptions) -> None:
    read = parse_record_arguments(words.split())
    assert read is not None
    assert read._replace(command=tuple(read.command)) == asked._replace(
        command=tuple(asked.command)
    )


@pytest.mark.parametrize(
    ("option", "profile", "stacks"),
    [
        (None, {}, "full"),
        (None, {"enabled": True, "paths": "hash"}, "hash"),
        (None, {"enabled": False, "paths": "hash"}, None),
        ("on", {"enabled": False, "paths": "names"}, "names"),
        ("off", {"enabled": True, "paths": "full"}, None),
    ],
)
def test_the_stacks_option_overrides_the_profile(
    option: str | None, profile: dict[str, Any], stacks: str | None
) -> None:
    assert choose_stacks(option, profile) == stacks


@pytest.mark.parametrize("words", [["--help"], ["-o", "x", "-h"], ["--hz", "x", "--help", "-z"]])
def test_help_requests_are_passed_to_typer(words: list[str]) -> None:
    assert parse_record_arguments(words) is None


def test_the_help_lists_all_parsed_options() -> None:
    shown = run_command("record", "--help").stdout
    for option in RECORD_OPTIONS:
        assert ", ".join(option.flags) in shown
        assert (option.metavar or "--no-gpu-events") in shown


WRONG = {
    "--durtion 5": "no such option: --durtion; did you mean '--duration'?",
    "--Hz=5": "no such option: --Hz; did you mean '--hz'?",
    "--gpu-event": "no such option: --gpu-event; did you mean '--gpu-events'?",
    "-z": "no such option: -z",
    "--dur 5s": "no such option: --dur; did you mean",
    "--hz fast": "--hz: invalid float value: 'fast'",
    "--stacks no": "--stacks no: choose on or off",
    "--nccl on": "--nccl on: choose auto or off",
    "--hang-after soon": "'soon' is not a duration",
    "--inject off --on-hang true": "--on-hang: progress is seen by the probe alone",
    "--hz 0": "0 Hz is not between 0.01 and 1000",
    "--hz nan": "nan Hz is not between 0.01 and 1000",
    "--pid me": "--pid: invalid int value: 'me'",
    "--pid 1": "--pid attaches to a running process: leave the command out",
    "--duration soon": "'soon' is not a duration",
    "--keep-free much": "--keep-free",
    "--keep-free 5s": "--keep-free '5s' is not a size",
    "--inject sometimes": "--inject sometimes: choose auto, off or strict",
    "--profile cii": "unknown profile 'cii'; did you mean 'ci'?",
}


@pytest.mark.parametrize(("options", "message"), WRONG.items(), ids=WRONG.keys())
def test_invalid_record_options_exit_with_2_without_starting_the_command(
    options: str, message: str, tmp_path: Path
) -> None:
    done = run(*RECORD, *options.split(), "--", "/bin/touch", "trained", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("clusterprof: ") and message in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", ["-o", "--hz"])
def test_an_option_without_its_value_exits_with_2(options: str, tmp_path: Path) -> None:
    done = run(*RECORD, options, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"option {options} needs a value" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--durtion 5s", "no such option: --durtion; did you mean '--duration'?"),
        ("train", "unexpected argument: 'train'"),
        ("--hz 0", "0 Hz is not between 0.01 and 1000"),
        ("--hz", "--hz: expected one argument"),
        ("--duration soon", "'soon' is not a duration"),
        ("--profile-json missing", "missing: no such file or directory"),
    ],
)
def test_the_agent_suggests_the_nearest_option(options: str, message: str, tmp_path: Path) -> None:
    done = run(*AGENT, *options.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("clusterprof: ") and message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_invalid_profile_in_the_folder_stops_record(tmp_path: Path) -> None:
    (tmp_path / "clusterprof.yaml").write_text("samplng: {hz: 5}\n")
    done = run(*RECORD, "--", "/bin/touch", "trained", cwd=tmp_path)
    assert done.returncode == 2
    assert "samplng" in done.stderr and "'sampling'" in done.stderr
    assert not (tmp_path / "trained").exists()


def test_record_imports_no_command_line_or_analysis_packages(tmp_path: Path) -> None:
    program = [sys.executable, "-X", "importtime", *RECORD[1:]]
    done = run(*program, "-o", "out", "--inject", "off", "--", "/bin/true", cwd=tmp_path)
    assert done.returncode == 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    names = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert "msgspec" in names  # the list is a list
    assert names & {"typer", "click", "rich", "pydantic", "numpy", "yaml"} == set()
    records_of(tmp_path / "out")


@BOTH
def test_without_a_command_the_duration_ends_the_recording(
    program: list[str], tmp_path: Path
) -> None:
    done = run(*program, "-o", "out", "--duration", "500ms", "--hz", "5", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith(f"clusterprof: recording to {tmp_path}/out/")
    records = records_of(tmp_path / "out")
    assert event(records, "recorder-stopped")["reason"] == "the duration is over"
    header = records[0]
    assert isinstance(header, Header)
    intervals_ms = {
        collector["name"]: collector["interval_ns"] // 1_000_000 for collector in header.collectors
    }
    # 5 Hz moves the fast tier; what was slower than that keeps its own pace
    assert (intervals_ms["cpu"], intervals_ms["threads"]) == (200, 200)
    assert (intervals_ms["memory"], intervals_ms["processes"]) == (1000, 500)


@BOTH
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_without_a_command_a_signal_ends_the_recording(
    program: list[str], number: signal.Signals, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [*program, "-o", "out"], cwd=tmp_path, env=clean(), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("clusterprof: recording to ")
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (128 + number, "")
    stopped = event(records_of(tmp_path / "out"), "recorder-stopped")
    assert stopped == {"reason": number.name, "pid": process.pid}


@BOTH
def test_a_recording_of_a_pid_ends_with_the_process(
    program: list[str], sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    words = [*program, "-o", "out", "--pid", str(sleeper.pid)]
    process = subprocess.Popen(words, cwd=tmp_path, env=clean(), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("clusterprof: recording to ")
    sleeper.kill()
    sleeper.wait()
    assert process.wait(PATIENCE_S) == 0
    process.stderr.close()
    records = records_of(tmp_path / "out")
    assert event(records, "process-registered")["pid"] == sleeper.pid
    assert event(records, "process-exited")["pid"] == sleeper.pid
    assert event(records, "recorder-stopped")["reason"] == "no process is left"


@BOTH
def test_a_recording_of_a_missing_pid_is_refused(program: list[str], tmp_path: Path) -> None:
    gone = subprocess.Popen(["/bin/true"])
    gone.wait()
    done = run(*program, "-o", "out", "--pid", str(gone.pid), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (125, "")
    assert f"process {gone.pid} does not exist" in done.stderr


def test_the_duration_ends_the_recording_and_not_the_job(tmp_path: Path) -> None:
    job = "until test -e over; do sleep 0.05; done; echo trained; exit 9"
    process = subprocess.Popen(
        [*RECORD, "-o", "out", "--duration", "500ms", "--", "/bin/sh", "-c", job],
        cwd=tmp_path,
        env=clean(),
        stdout=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "out").exists():
        assert process.poll() is None
        time.sleep(0.05)
    stopped = event(records_of(tmp_path / "out"), "recorder-stopped")
    (tmp_path / "over").touch()
    assert process.communicate(timeout=PATIENCE_S)[0] == "trained\n"
    assert (process.returncode, stopped["reason"]) == (9, "the duration is over")


def test_inject_strict_fails_without_spans_and_auto_warns(tmp_path: Path) -> None:
    job = ["--", sys.executable, "-I", "-c", "open('trained', 'w')"]
    strict = run(*RECORD, "-o", "strict", "--inject", "strict", *job, cwd=tmp_path)
    assert (strict.returncode, strict.stdout) == (125, "")
    assert "no spans: python -I ignores PYTHONPATH" in strict.stderr
    assert not (tmp_path / "trained").exists()
    auto = run(*RECORD, "-o", "auto", *job, cwd=tmp_path)
    assert auto.returncode == 0
    assert "no spans: python -I ignores PYTHONPATH" in auto.stderr
    assert (tmp_path / "trained").exists()
    records_of(tmp_path / "auto")


def test_an_option_is_not_taken_as_another_options_value() -> None:
    with pytest.raises(UsageError, match="no such option: --no-gpu-event"):
        parse_record_arguments(["-o", "x", "--no-gpu-event", "--", "train"])


@pytest.mark.parametrize("umask", [0o022, 0o077], ids=oct)
@BOTH
def test_the_mode_option_sets_permissions_of_the_recording(
    tmp_path: Path, program: list[str], umask: int
) -> None:
    words = [*program, "-o", "runs/one", "--mode", "0750"]
    job = ["true"] if program is RECORD else ["--duration", "1s"]
    subprocess.run(
        [*words, *job], cwd=tmp_path, env=clean(), umask=umask, check=True, timeout=PATIENCE_S
    )
    out = tmp_path / "runs" / "one"
    records_of(out)
    (node,) = list_node_folders(out)
    wait_until((node / "SHA256SUMS").exists)
    modes = {path.name: path.stat().st_mode & 0o7777 for path in (out, node, *node.iterdir())}
    files = ("000001.cpf", "SHA256SUMS", "agent.log")
    assert modes == {out.name: 0o750, node.name: 0o750} | dict.fromkeys(files, 0o640)


def test_by_default_only_the_owner_may_read_a_recording(tmp_path: Path) -> None:
    subprocess.run([*RECORD, "true"], cwd=tmp_path, env=clean(), umask=0o002, check=True)
    (out,) = (tmp_path / "clusterprof-out").iterdir()
    records_of(out)
    (node,) = list_node_folders(out)
    wait_until((node / "SHA256SUMS").exists)
    modes = [path.stat().st_mode & 0o7777 for path in (out.parent, out, node, *node.iterdir())]
    assert modes == [0o755, 0o700, 0o700, *[0o600] * 3]


@pytest.mark.parametrize("mode", ["0770", "rwx", "0077", "7777", "0640"])
def test_an_invalid_mode_is_refused_with_the_valid_modes(mode: str) -> None:
    done = run_command("record", "--mode", mode, "true")
    assert done.returncode == 2
    assert done.stderr == (
        f"clusterprof: --mode {mode}: not a mode in which you have all rights and others may"
        " only read\n"
        "  write 0700 (only you), 0750 (your group too) or 0755 (everybody)\n"
    )


def test_job_options_after_the_command_are_not_parsed() -> None:
    words = ["-o", "runs", "python", "train.py", "-o", "model", "--duration", "3", "--", "--hz"]
    options = parse_record_arguments(words)
    assert options is not None
    assert options.out == Path("runs") and options.duration is None and options.hz is None
    assert list(options.command) == words[2:]


def test_record_without_two_dashes_runs_the_job_with_its_own_options(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:])")
    words = ["train.py", "--mode", "0", "--help", "-o", "x", "--version"]
    done = run(*RECORD, sys.executable, *words, cwd=tmp_path)
    assert done.stdout == f"{words[1:]}\n"
    plain = run(*RECORD, "--", sys.executable, *words, cwd=tmp_path)
    assert plain.stdout == done.stdout


def test_a_deleted_run_directory_is_reported_with_its_reason(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, shutil, time\nshutil.rmtree(os.environ['CLUSTERPROF_RUN_DIR'])\ntime.sleep(3)\n"
    )
    done = run(*RECORD, "-o", "out", sys.executable, "train.py", cwd=tmp_path)
    assert done.returncode == 0
    gaps = [
        record
        for record in records_of(tmp_path / "out")
        if isinstance(record, Gap) and record.collector == "probe"
    ]
    assert len(gaps) == 1
    assert gaps[0].message.startswith("another program deleted the run directory ")
    assert "exclude clusterprof-* in /dev/shm" in gaps[0].remedy
    (log,) = (tmp_path / "out").glob("*/agent.log")
    assert gaps[0].message in log.read_text()
    report = run_command("analyze", "out", "--format", "plain", "--width", "100", cwd=tmp_path)
    assert "another program deleted the run directory" in " ".join(report.stdout.split())


def test_a_report_of_an_attached_recording_advises_no_probe(tmp_path: Path) -> None:
    job = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        words = ["--pid", str(job.pid), "--duration", "2s", "-o", "out"]
        done = run(*RECORD, *words, cwd=tmp_path)
    finally:
        job.kill()
        job.wait()
    assert done.returncode == 0
    assert done.stderr.splitlines()[1].startswith(
        "clusterprof: attached. Recorded: thread states, CPU, files, network, accelerators."
    )
    shown = run_command("analyze", "out", "--full", "--format", "plain", cwd=tmp_path)
    report = " ".join(shown.stdout.split())
    assert (
        "1 of 1 training processes marked no steps: the recorder attached to them while they ran."
        " What to do: start the job with `clusterprof record` to see steps and causes."
    ) in report
    assert "--inject auto" not in report
