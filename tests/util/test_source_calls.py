"""Which functions a source line calls, and of which files nothing is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterprof.util import source_calls
from clusterprof.util.source_calls import SourceReader

TEXT = """import time

def train(loader):
    for batch in loader:
        loss = model(batch)
        total += loss.item()  # time.sleep(1)
        print(
            "loss", total, model(batch).mean().tolist()
        )

class Data:
    def __getitem__(self, index):
        def wait():
            time.sleep(0.1)
        return wait()

print("done")
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A file changed at 10 s."""
    file = tmp_path / "train.py"
    file.write_text(TEXT)
    os.utime(file, (10, 10))
    return str(file)


def test_calls_on_a_source_line_are_listed(path: str) -> None:
    reader = SourceReader(11 * 10**9)
    assert reader.list_calls(path, 6, "train") == ("loss.item",)  # no comment
    assert reader.list_calls(path, 8, "train") == ("print", "().tolist", "().mean", "model")
    assert reader.list_calls(path, 14, "Data.__getitem__.<locals>.wait") == ("time.sleep",)
    assert reader.list_calls(path, 17, "<module>") == ("print",)
    assert reader.list_calls(path, 2, "<module>") == ()
    assert reader.list_calls(path, 999, "train") == ()


def test_a_changed_or_missing_source_file_gives_no_calls(path: str, tmp_path: Path) -> None:
    reader = SourceReader(11 * 10**9)
    assert reader.list_calls(path, 6, "validate") == ()  # another function stands there
    assert SourceReader(10 * 10**9).list_calls(path, 6, "train") == ()  # changed since
    assert SourceReader(0).list_calls(path, 6, "train") == ()
    assert reader.list_calls(str(tmp_path / "no.py"), 6, "train") == ()
    assert reader.list_calls("train.py", 6, "train") == ()
    assert reader.list_calls("<string>", 6, "train") == ()


@pytest.mark.parametrize(
    "content",
    [b"\0", b"def (", b"x = " + b"(" * 500, b"\xff\xfe", b"# coding: nonsense\n"],
    ids=["null", "syntax", "nested", "bytes", "coding"],
)
def test_files_without_valid_code_give_no_calls(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_bytes(content)
    os.utime(file, (10, 10))
    assert SourceReader(11 * 10**9).list_calls(str(file), 1, "<module>") == ()


def test_pipes_folders_and_large_files_are_not_read(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, folder = tmp_path / "pipe.py", tmp_path / "folder.py"
    os.mkfifo(pipe)
    folder.mkdir()
    for odd in (pipe, folder):
        assert SourceReader(10**20).list_calls(str(odd), 1, "<module>") == ()
    monkeypatch.setattr(source_calls, "MAX_FILE_BYTES", 10)
    assert SourceReader(10**20).list_calls(path, 6, "train") == ()


def test_the_number_of_read_source_files_is_limited(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_calls, "MAX_FILES", 1)
    reader = SourceReader(11 * 10**9)
    reader.list_calls(str(tmp_path / "a.py"), 1, "f")
    assert reader.list_calls(path, 6, "train") == ()


WAITS = {
    "while not os.path.exists(path):\n    time.sleep(0.01)": True,
    "while heads[0] <= n:\n    if pause:\n        time.sleep(0.01)": True,
    "while heads[0] <= n:\n    pass": True,
    "while True:\n    if queue.qsize():\n        break\n    time.sleep(0.01)": True,
    "while True:\n    found = look()\n    if found:\n        break\n    time.sleep(0.01)": True,
    "while True:\n    try:\n        x = load()\n        break\n    except E:\n        pass": True,
    "while not done():\n    if time.time() > end:\n        raise TimeoutError\n    sleep(1)": True,
    # a clock, a count, work, or no end
    "while time.monotonic() < end:\n    time.sleep(0.01)": False,
    "while True:\n    if time.time() > end:\n        break\n    time.sleep(0.01)": False,
    "while n < 5:\n    n += 1\n    time.sleep(0.01)": False,
    "while step < 5:\n    train()\n    time.sleep(0.01)": False,
    "while step < steps():\n    loss = train()\n    time.sleep(0.01)": False,
    "while True:\n    time.sleep(0.01)": False,
    "for _ in range(3):\n    time.sleep(0.01)": False,
}


@pytest.mark.parametrize(("loop", "polls"), WAITS.items())
def test_a_loop_that_only_waits_is_a_polling_loop(loop: str, polls: bool, tmp_path: Path) -> None:
    file = tmp_path / "wait.py"
    file.write_text(f"{loop}\ntime.sleep(1)\n")
    last = loop.count("\n") + 1
    reader = SourceReader(10**20)
    assert reader.is_in_poll(str(file), last, "<module>") is polls
    assert reader.is_in_poll(str(file), last + 1, "<module>") is False
    assert reader.list_calls(str(file), last + 1, "<module>") == ("time.sleep",)


def test_sleep_in_a_polling_loop_is_not_listed_as_sleep(tmp_path: Path) -> None:
    file = tmp_path / "wait.py"
    file.write_text("while not ready():\n    time.sleep(0.01)\n")
    reader = SourceReader(10**20)
    assert reader.list_calls(str(file), 2, "<module>") == ("time.sleep in a poll",)
    assert reader.list_calls(str(file), 1, "<module>") == ("ready",)


def test_polling_is_unknown_for_a_changed_source_file(path: str) -> None:
    assert SourceReader(11 * 10**9).is_in_poll(path, 14, "wait") is False
    assert SourceReader(11 * 10**9).is_in_poll(path, 14, "train") is None
    assert SourceReader(9 * 10**9).is_in_poll(path, 14, "wait") is None
