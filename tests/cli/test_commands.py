"""The door of every command: exit codes, messages, and what goes to which stream."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterprof import __version__
from clusterprof.cli.commands import COMMANDS
from tests.support.commands import make_environment, run_command, run_with_report


def test_version_option_prints_the_version() -> None:
    done = run_command("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"clusterprof {__version__}\n", "")


def test_help_lists_every_command_with_a_whole_sentence() -> None:
    done = run_command("--help")
    assert done.returncode == 0
    listed = done.stdout.split("Commands:\n")[1].splitlines()
    assert [line.split()[0] for line in listed] == list(COMMANDS)
    assert run_command("-h").stdout == done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    done = run_command(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: clusterprof {name} [OPTIONS]")


def test_without_a_command_the_help_is_an_error() -> None:
    done = run_command()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: clusterprof")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["analyse", "x"], "clusterprof: no such command: 'analyse'; did you mean 'analyze'?"),
        (["gat"], "clusterprof: no such command: 'gat'; did you mean 'gate'?"),
        (["\x1b[2J"], "clusterprof: no such command: '\\x1b[2J'; choose from"),
        (["analyze", "x", "--widht", "80"], "--widht"),
        (["analyze", "x", "--format", "jsn"], "unknown format 'jsn'; did you mean 'json'?"),
        (["analyze", "x", "--jobs", "0"], "--jobs"),
        (["analyze", "x", "--profile", "cii"], "unknown profile 'cii'; did you mean 'ci'?"),
        (["gate", "x"], "the gate has no rules"),
        (["gate", "x", "--assert", "gpu.busy_ratio"], "is not METRIC OPERATOR LIMIT"),
        (["gate", "x", "--profile", "ci", "--on-inconclusive", "wran"], "did you mean 'warn'?"),
        (["gate", "x", "--format", "html"], "unknown format 'html'"),
        (["explain", "storge-local"], "did you mean 'storage-local'?"),
        (["demo", "--scenario", "storge"], "storge"),
        (["record", "--inject", "sometimes", "--", "true"], "sometimes"),
    ],
)
def test_an_invalid_command_line_exits_with_2(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    done = run_command(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_option_suggests_the_nearest_option() -> None:
    assert "--width" in run_command("analyze", "x", "--widht", "80").stderr


@pytest.mark.parametrize("name", ["analyze", pytest.param("gate", marks=pytest.mark.long), "dump"])
@pytest.mark.parametrize(
    "what", ["missing", pytest.param("empty", marks=pytest.mark.long), "foreign"]
)
def test_a_missing_recording_exits_with_5(name: str, what: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    if what != "missing":
        run.mkdir()
    if what == "foreign":
        (run / "notes.txt").write_text("not a recording", encoding="utf-8")
    rules = ["--assert", "gpu.busy_ratio >= 1%"] if name == "gate" else []
    done = run_command(name, str(run), *rules)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr.startswith("clusterprof: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["analyze", "gate"])
def test_a_failed_command_prints_a_json_error_document(name: str, tmp_path: Path) -> None:
    rules = ["--profile", "ci"] if name == "gate" else []
    done = run_command(name, str(tmp_path / "missing"), "--json", *rules)
    document = json.loads(done.stdout)
    assert done.returncode == 5
    assert document["format"] == "clusterprof-error"
    assert document["exit_code"] == 5
    assert document["message"] in done.stderr


# storage: 61 % busy; clean: 99.8 %; damaged-emulated: too poor; see tests/support/reports.py
@pytest.mark.parametrize(
    ("report", "rule", "code", "first"),
    [
        ("clean", "gpu.busy_ratio >= 70%", 0, "gate PASSED: 1 rule"),
        ("storage", "gpu.busy_ratio >= 70%", 3, "gate FAILED: 1 of 1 rule"),
        (
            "damaged-emulated",
            "gpu.busy_ratio >= 10%",
            4,
            "gate CANNOT TELL: 1 of 1 rule · EMULATED",
        ),
        ("nothing", "gpu.busy_ratio >= 0%", 4, "gate CANNOT TELL: 1 of 1 rule"),
    ],
)
def test_the_gate_exit_code_follows_its_verdict(
    report: str, rule: str, code: int, first: str
) -> None:
    done = run_with_report("gate", report, "--assert", rule)
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.startswith(first)
    document = json.loads(run_with_report("gate", report, "--assert", rule, "--json").stdout)
    assert document["exit_code"] == code
    assert document["rules"][0]["rule"] == rule


def test_gate_options_reach_the_policy() -> None:
    rule = ("--assert", "gpu.busy_ratio >= 10%")
    enough = ("--min-coverage", "0.8", "--min-steps", "90")
    poor = "gate", "damaged-emulated", *rule
    assert run_with_report(*poor, *enough).returncode == 4  # the damage is left
    assert run_with_report(*poor, "--on-inconclusive", "warn").returncode == 0
    assert run_with_report("gate", "clean", *rule, "--min-steps", "1001").returncode == 4
    assert run_with_report("gate", "clean", *rule, "--min-steps", "1000").returncode == 0


def test_the_gate_applies_rules_of_profile_and_command_line(tmp_path: Path) -> None:
    profile = "limits: {}\ngate:\n  assertions: ['gpu.busy_ratio >= 99%']\n  min_steps: 5\n"
    (tmp_path / "clusterprof.yaml").write_text(profile, encoding="utf-8")
    assert run_with_report("gate", "clean", cwd=tmp_path).returncode == 0
    done = run_with_report("gate", "clean", "--assert", "stall.storage >= 1%", cwd=tmp_path)
    assert done.returncode == 3
    assert done.stdout.startswith("gate FAILED: 1 of 2 rules")
    (tmp_path / "clusterprof.yaml").write_text("gate: {assertions: [nonsense]}", encoding="utf-8")
    done = run_with_report("gate", "clean", cwd=tmp_path)
    assert done.returncode == 2
    assert "clusterprof.yaml:1: the rule 'nonsense'" in done.stderr


def test_strict_exits_with_6_after_the_report() -> None:
    relaxed = run_with_report("analyze", "damaged-emulated")
    strict = run_with_report("analyze", "damaged-emulated", "--strict")
    assert (relaxed.returncode, strict.returncode) == (0, 6)
    assert strict.stdout == relaxed.stdout
    assert "123,456 bytes unreadable, 17 spans dropped" in strict.stderr
    assert run_with_report("analyze", "clean", "--strict").returncode == 0


def test_analyze_writes_every_format_to_stdout_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = run_with_report("analyze", "storage", "--json", "-o", str(file))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    text = run_with_report("analyze", "storage", "--format", "json").stdout
    assert file.read_text(encoding="utf-8") == text
    assert json.loads(text)["format"] == "clusterprof-report"
    assert run_with_report("analyze", "storage", "--format", "plain").stdout.startswith(
        "Recording: "
    )
    assert run_with_report("analyze", "storage", "--format", "markdown").stdout.startswith("## ")
    done = run_with_report("analyze", "storage", "-o", str(tmp_path / "no" / "file"))
    assert done.returncode == 2
    assert "cannot write" in done.stderr


@pytest.mark.parametrize(
    ("variables", "options", "colored"),
    [
        ({}, [], False),  # a pipe
        ({"FORCE_COLOR": "1"}, [], True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, [], False),
        pytest.param({"FORCE_COLOR": "1", "NO_COLOR": ""}, [], True, marks=pytest.mark.long),
        pytest.param({"FORCE_COLOR": "1", "TERM": "dumb"}, [], False, marks=pytest.mark.long),
        pytest.param({"FORCE_COLOR": "1"}, ["--no-color"], False, marks=pytest.mark.long),
        pytest.param({"FORCE_COLOR": "1"}, ["--format", "plain"], False, marks=pytest.mark.long),
    ],
)
def test_colour_follows_variables_and_options(
    variables: dict[str, str], options: list[str], colored: bool
) -> None:
    done = run_with_report("analyze", "storage", *options, **({"TERM": "xterm"} | variables))
    assert ("\x1b[" in done.stdout) == colored
    assert done.returncode == 0


def test_the_price_of_the_profile_appears_in_the_report(tmp_path: Path) -> None:
    text = "facts: {gpu_price_per_hour: 36, currency: EUR}"
    (tmp_path / "p.yaml").write_text(text, encoding="utf-8")
    done = run_with_report("analyze", "storage", "--profile", "p.yaml", cwd=tmp_path)
    assert "That is about 2.26 EUR at 36.00 EUR per GPU-hour." in " ".join(done.stdout.split())


def test_an_ascii_stdout_gets_ascii_output() -> None:
    done = run_with_report("analyze", "storage", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0
    assert " Lost           39.0 %" in done.stdout and done.stdout.isascii()


@pytest.mark.parametrize("topic", ["where", "flame-graph", "life", "WHERE"])
def test_explain_describes_parts_of_a_report(topic: str) -> None:
    done = run_command("explain", topic)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"# {topic.lower()}: the ")
    listed = run_command("explain").stdout
    assert f"  {topic.lower():<21} the " in listed.split("parts of a report:\n")[1]


@pytest.mark.parametrize("arguments", [["explain"], ["--version"], ["--help"]])
def test_a_closed_stdout_pipe_exits_with_1_without_an_error(arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "clusterprof", *arguments],
        env=make_environment(),
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")


def test_dump_into_head_prints_a_line_and_exits_with_1() -> None:
    """More than a pipe holds (64 KiB), so that the writer meets the closed end for certain."""
    code = (
        "import sys, clusterprof.cli.export, clusterprof.trace.dump as dump\n"
        "dump.export_records = lambda *paths: ('x' * 100 for _ in range(10_000))\n"
        "from clusterprof.cli.app import main\n"
        "sys.exit(main(['dump', 'x']))\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code],
        env=make_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert writer.stdout is not None and writer.stderr is not None
    assert writer.stdout.readline() == b"x" * 100 + b"\n"
    writer.stdout.close()
    assert writer.wait(timeout=60) == 1
    assert writer.stderr.read() == b""
    writer.stderr.close()


def test_an_interrupt_exits_with_130() -> None:
    code = (
        "import time, clusterprof.trace.dump as dump\n"
        "def slow(*paths):\n"
        "    yield 'begun'\n"
        "    time.sleep(60)\n"
        "dump.export_records = slow\n"
        "import sys\n"
        "import clusterprof.cli.common as common\n"
        "from clusterprof.cli.app import main\n"
        "sys.stdout.reconfigure(line_buffering=True)\n"
        "sys.exit(main(['dump', 'x']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=make_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors


def test_recording_commands_do_not_import_the_analysis() -> None:
    """What `--help` and `record` import must stay light (pydantic is typer's own, since 0.29)."""
    code = (
        "import sys\n"
        "from clusterprof.cli.app import main\n"
        "main(['record', '--help'])\n"
        "heavy = {'numpy', 'rich', 'yaml', 'msgspec', 'psutil', 'pynvml', 'torch'}\n"
        "ours = {'clusterprof.analysis', 'clusterprof.output'}\n"
        "print(sorted((heavy | ours) & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=make_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == "[]\n"


def test_a_crash_prints_the_traceback_without_values_of_variables() -> None:
    code = (
        "import clusterprof.trace.dump as dump\n"
        "def crash(*paths):\n"
        "    token = 'se' + 'cret'\n"
        "    raise RuntimeError('a bug')\n"
        "dump.export_records = crash\n"
        "import sys\n"
        "from clusterprof.cli.app import main\n"
        "sys.exit(main(['dump', 'x']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=make_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "RuntimeError: a bug" in done.stderr and "secret" not in done.stderr
