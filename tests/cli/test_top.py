"""`clusterprof top`: which recording, screen and keys, and a terminal put back as it was."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path
from struct import pack

import pytest

from clusterprof.cli import top
from clusterprof.cli.app import main
from clusterprof.cli.common import find_newest_recording
from clusterprof.errors import NoRecording, UsageError
from clusterprof.output.renderers.top_screen import View
from clusterprof.trace.encoder import Encoder
from clusterprof.trace.reader import NodeReader
from clusterprof.trace.schema import Columns, Spans
from tests.scenarios.fuzz.forge import convert_arrays
from tests.support.commands import TESTS, make_environment

RECORDING = TESTS / "recordings" / "dlrm-8rank"


def recording_at(path: Path, age_s: float) -> Path:
    segment = path / "node" / "000001.cpf"
    segment.parent.mkdir(parents=True)
    segment.write_bytes(b"")
    os.utime(segment, (time.time() - age_s,) * 2)
    return path


def test_top_reads_the_newest_recording_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(NoRecording, match="none is in this folder"):
        find_newest_recording(tmp_path)
    recording_at(tmp_path / "run", 300)
    assert find_newest_recording(tmp_path) == Path("run")
    recording_at(tmp_path / "clusterprof-out" / "job-1", 200)
    recording_at(tmp_path / "clusterprof-out" / "job-2", 100)
    assert find_newest_recording(tmp_path) == Path("clusterprof-out/job-2")
    assert find_newest_recording(tmp_path / "run") == tmp_path / "run"


def test_once_prints_a_single_screen_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(RECORDING), "--once", "--width", "100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 nodes, 8 ranks" in lines[0] + lines[1]
    assert any(line.startswith("*   7 gpu-b") for line in lines), "the culprit is marked"
    assert max(map(len, lines)) <= 100 and "\x1b" not in "".join(lines)
    assert main(["top", str(RECORDING), "--once", "--format", "plain"]) == 0
    assert capsys.readouterr().out.startswith("Recording: ")


@pytest.mark.parametrize("far_ns", [30 * 86_400 * 10**9, 1 << 62])
def test_a_sample_with_a_far_future_time_is_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], far_ns: int
) -> None:
    run = tmp_path / "run"
    shutil.copytree(RECORDING, run)
    screens = []
    far = Columns(
        "cpu", ("cpu.busy_ratio",), ("",), array("q", [far_ns]), (array("d", [1.0]),), (None,)
    )
    for data in (b"", b"".join(Encoder().frames([far]))):
        for segment in run.glob("*/*.cpf"):
            segment.write_bytes(segment.read_bytes() + data)
        assert main(["top", str(run), "--once", "--width", "100"]) == 0
        screens.append(capsys.readouterr().out)
    assert "2 nodes, 8 ranks" in screens[0]
    assert screens[0].splitlines() == screens[1].splitlines()


def test_spans_with_a_far_future_end_are_tolerated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(RECORDING, run)
    for segment in run.glob("*/*.cpf"):
        records = [convert_arrays(record) for record in NodeReader(segment)]
        for record in records:
            if isinstance(record, Spans):
                kinds = record.columns["kind"]
                for kind in set(kinds):  # a span of every kind
                    record.columns["end_ns"][kinds.index(kind)] = 1 << 62
        segment.write_bytes(b"".join(b"".join(Encoder().frames([r])) for r in records))
    assert main(["top", str(run), "--once", "--width", "100"]) == 0
    assert "2 nodes, 8 ranks" in capsys.readouterr().out


def test_colour_follows_force_color_and_no_color(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["top", str(RECORDING), "--once"]) == 0
    assert "\x1b[1m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["top", str(RECORDING), "--once"]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--interval", "0"], "--interval '0' is not a time from 0.2 s to 1 h"),
        (["--interval", "5 GiB"], "--interval '5 GiB' is not a time"),
        (["--window", "1s"], "--window '1s' is not a time from 10 s to 1 h"),
        (["--sort", "size"], "--sort size: choose lost, caused, busy, step, name"),
        (["--by", "rack"], "--by rack: choose auto, node, rank"),
        (["--format", "html"], "unknown format 'html'"),
    ],
)
def test_invalid_top_options_are_a_usage_error(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", str(RECORDING), *options]) == UsageError.exit_code
    assert message in capsys.readouterr().err


def test_keys_change_order_grouping_and_position() -> None:
    view = View(80, 24, "lost", "auto", 5)
    assert top.update_view(view, "c") == View(80, 24, "caused", "auto", 0)
    assert top.update_view(view, "v").by == "node"
    assert top.update_view(top.update_view(view, "v"), "v").by == "rank"
    assert [top.update_view(view, key).first for key in ("up", "j", "page down", "home")] == [
        4,
        6,
        17,
        0,
    ]
    assert top.update_view(View(first=0), "up").first == 0
    assert top.update_view(view, "x") == view


@contextmanager
def on_a_terminal(*options: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run `top` on a terminal of 24 lines by 80 columns."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, pack("HHHH", 24, 80, 0, 0))
    run = [sys.executable, "-m", "clusterprof", "top", str(RECORDING), "--interval", "0.2s"]
    process = subprocess.Popen(
        [*run, *options],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=make_environment(TERM="xterm"),
        preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),
    )
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        for end in (ours, theirs):
            os.close(end)


def read_until(terminal: int, wanted: bytes, within_s: float = 60) -> bytes:
    """Read what was printed until something is there."""
    data, end = b"", time.monotonic() + within_s
    while wanted not in data and time.monotonic() < end:
        if select.select([terminal], [], [], 1)[0]:
            data += os.read(terminal, 65536)
    assert wanted in data, data[-2000:]
    return data


def read_screen(terminal: int, lines: int, within_s: float = 60) -> None:
    """Read until a whole screen of this many lines came: each begins at home."""
    data, end = b"", time.monotonic() + within_s
    while time.monotonic() < end:
        if any(whole.count(b"\r\n") == lines - 1 for whole in data.split(b"\x1b[H")[1:-1]):
            return
        if select.select([terminal], [], [], 1)[0]:
            data += os.read(terminal, 65536)
    raise AssertionError(data[-2000:])


def test_a_question_mark_shows_the_keys_until_the_next_key() -> None:
    with on_a_terminal() as (process, terminal):
        read_until(terminal, b"RECORDER")
        os.write(terminal, b"?")
        shown = read_until(terminal, b"quit; the job continues")
        for line in top._KEY_LINES:
            assert line.encode() in shown
        os.write(terminal, b"?")
        read_until(terminal, b"RECORDER")
        os.write(terminal, b"q")
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("\x03", 130),
        pytest.param("q", 0, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long),
    ],
    ids=["ctrl-C", "q", "SIGTERM"],
)
def test_the_terminal_state_is_restored_at_exit(ending: str | signal.Signals, code: int) -> None:
    with on_a_terminal() as (process, terminal):
        before = termios.tcgetattr(terminal)
        shown = read_until(terminal, b"RECORDER")
        assert shown.startswith(b"\x1b[?1049h") and b"\x1b[?25l" in shown
        assert termios.tcgetattr(terminal) != before
        ioctl(terminal, termios.TIOCSWINSZ, pack("HHHH", 12, 60, 0, 0))
        os.kill(process.pid, signal.SIGWINCH)
        os.write(terminal, b"n")
        read_screen(terminal, 12)
        if isinstance(ending, str):
            os.write(terminal, ending.encode())
        else:
            os.kill(process.pid, ending)
        read_until(terminal, b"\x1b[?25h\x1b[?1049l")
        assert process.wait(timeout=60) == code
        assert termios.tcgetattr(terminal) == before
