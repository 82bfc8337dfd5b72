"""The run directory and who leads: locks, planted files, leaving and joining."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from clusterprof.agent.launch import election
from clusterprof.agent.launch.election import (
    build_run_dir_path,
    choose_base,
    ensure_run_dir,
    join_recorder,
    list_recorders,
    read_small_json,
    remove_stale_run_dirs,
    remove_unused_run_dir,
    take_recorder_lock,
    write_private_file,
)
from clusterprof.errors import CannotStart


def nothing() -> None:
    """Register nobody."""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "clusterprof-1-2-3"


def test_the_first_process_leads_until_the_lock_descriptor_is_closed(run_dir: Path) -> None:
    lock = join_recorder(run_dir, nothing)
    assert lock is not None
    assert join_recorder(run_dir, nothing) is None
    kept = os.dup(lock)  # what the recorder inherits
    os.close(lock)
    assert take_recorder_lock(run_dir) is None
    os.close(kept)
    again = take_recorder_lock(run_dir)
    assert again is not None
    os.close(again)


def test_each_process_registers_leader_or_not(run_dir: Path) -> None:
    came: list[int] = []
    first = join_recorder(run_dir, lambda: came.append(1))
    join_recorder(run_dir, lambda: came.append(2))
    assert came == [1, 2]
    assert first is not None
    os.close(first)


def test_the_last_recorder_removes_the_run_directory(run_dir: Path) -> None:
    lock = join_recorder(run_dir, nothing)
    assert lock is not None
    assert not remove_unused_run_dir(
        run_dir, lambda: True
    )  # somebody registered in the last moment
    assert run_dir.exists()
    assert remove_unused_run_dir(run_dir, lambda: False)
    assert list(run_dir.parent.iterdir()) == []
    os.close(lock)


def test_processes_cannot_join_while_the_last_recorder_checks(run_dir: Path) -> None:
    import fcntl

    lock = join_recorder(run_dir, nothing)
    assert lock is not None
    gate = os.open(run_dir / "gate", os.O_RDWR)

    def look_around() -> bool:
        with pytest.raises(BlockingIOError):  # what `join` tries before it registers
            fcntl.flock(gate, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False

    assert remove_unused_run_dir(run_dir, look_around)
    os.close(gate)
    os.close(lock)


def test_a_process_joining_after_the_end_leads_a_new_recording(run_dir: Path) -> None:
    first = join_recorder(run_dir, nothing)
    assert remove_unused_run_dir(run_dir, lambda: False)
    second = join_recorder(run_dir, nothing)
    assert first is not None
    assert second is not None
    os.close(first)
    os.close(second)


def test_a_process_with_a_removed_lock_file_joins_again(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[bool] = []
    first = join_recorder(run_dir, nothing)
    real, left = election._take_file_lock, []

    def leave_before_the_first_try(descriptor: int, kind: int) -> bool:
        if not left:
            left.append(True)
            assert remove_unused_run_dir(
                run_dir, lambda: False
            )  # between the joiner's open and its lock
        return bool(real(descriptor, kind))

    monkeypatch.setattr(election, "_take_file_lock", leave_before_the_first_try)
    second = join_recorder(run_dir, lambda: came.append(run_dir.exists()))
    assert came == [True]  # not into the folder that went away
    assert first is not None
    assert second is not None
    os.close(first)
    os.close(second)


def test_a_recorder_stopped_while_leaving_does_not_block_the_job(run_dir: Path) -> None:
    import fcntl

    ensure_run_dir(run_dir)
    gate = os.open(run_dir / "gate", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(gate, fcntl.LOCK_EX)  # stopped in the middle of leaving
    with pytest.raises(CannotStart):
        join_recorder(run_dir, nothing)
    os.close(gate)


def test_leftovers_of_a_killed_recorder_are_removed(tmp_path: Path) -> None:
    dead, led, lived_in = (tmp_path / f"clusterprof-1-b-{name}" for name in ("dead", "led", "in"))
    for run_dir in (dead, led, lived_in):
        lock = join_recorder(run_dir, nothing)
        assert lock is not None
        if run_dir is not led:
            os.close(lock)
    (tmp_path / "clusterprof-1-b-other").mkdir()  # no run directory: not ours to remove
    (tmp_path / "clusterprof-1-b-link").symlink_to(dead)
    remove_stale_run_dirs(tmp_path, "clusterprof-1-", lambda run_dir: run_dir == lived_in)
    left = {path.name.rpartition("-")[2] for path in tmp_path.iterdir()}
    assert left == {"led", "in", "other", "link"}


def plant_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def plant_file(path: Path, victim: Path) -> None:
    path.write_text("in the way")


def plant_open_folder(path: Path, victim: Path) -> None:
    path.mkdir()
    path.chmod(0o755)


@pytest.mark.parametrize("plant", [plant_link, plant_file, plant_open_folder])
def test_planted_run_directories_are_refused(run_dir: Path, tmp_path: Path, plant: object) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    plant(run_dir, victim)  # type: ignore[operator]
    with pytest.raises(CannotStart):
        join_recorder(run_dir, nothing)
    assert list(victim.iterdir()) == []


@pytest.mark.parametrize("name", ["lock", "gate"])
def test_a_planted_lock_is_refused(run_dir: Path, tmp_path: Path, name: str) -> None:
    ensure_run_dir(run_dir)
    (run_dir / name).symlink_to(tmp_path / "victim")
    with pytest.raises(CannotStart):
        join_recorder(run_dir, nothing)
    assert not (tmp_path / "victim").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another owner")
def test_a_folder_of_another_user_is_refused(run_dir: Path) -> None:
    run_dir.mkdir(mode=0o700)
    os.chown(run_dir, 65534, 65534)
    with pytest.raises(CannotStart):
        ensure_run_dir(run_dir)


def test_the_base_folder_is_local_memory_if_available(tmp_path: Path) -> None:
    memory, runtime = tmp_path / "shm", tmp_path / "run"
    environ = {"XDG_RUNTIME_DIR": str(runtime)}
    runtime.mkdir()
    assert choose_base(environ, str(memory)) == runtime
    memory.mkdir()
    assert choose_base(environ, str(memory)) == memory
    assert choose_base({}, str(tmp_path / "none")).is_dir()
    path = build_run_dir_path(memory, "471a98e8", "7.1")
    assert path == memory / f"clusterprof-{os.geteuid()}-471a98e8-7.1"


def test_only_small_regular_json_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "5.json"
    write_private_file(path, b'{"pid": 5}')
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_small_json(str(path)) == {"pid": 5}
    assert [entry.name for entry in tmp_path.iterdir()] == ["5.json"]  # no temporary is left
    (tmp_path / "list").write_text("[1]")
    (tmp_path / "large").write_text('{"a": "' + "x" * 4096 + '"}')
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "fifo")
    for name in ("list", "large", "link", "fifo", "absent"):
        assert read_small_json(str(tmp_path / name)) is None


def test_an_incompletely_written_file_is_an_error_with_a_path(tmp_path: Path) -> None:
    path = tmp_path / "1.json"
    write_private_file(path, b"{}")
    child = os.fork()
    if child == 0:  # of this process alone: pytest writes files of its own
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))
        try:
            write_private_file(path, bytes(4096))
        except OSError as error:
            os._exit(0 if (error.errno, error.filename) == (errno.EFBIG, str(path)) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert path.read_bytes() == b"{}"
    assert os.listdir(tmp_path) == ["1.json"]


def test_recorders_that_run_are_listed_with_their_job(tmp_path: Path) -> None:
    own_ticks = int(Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[19])
    jobs = {
        "train-7": f"{os.getpid()} {own_ticks}\n",
        "ended": f"{os.getpid()} {own_ticks + 1}\n",  # another process had this pid
        "gone": "4194305 1\n",  # above the highest pid
        "broken": "none\n",
    }
    for job, content in jobs.items():
        folder = build_run_dir_path(tmp_path, "abcd1234", job)
        folder.mkdir()
        (folder / "agent.pid").write_text(content)
    build_run_dir_path(tmp_path, "abcd1234", "starts").mkdir()
    fifo = build_run_dir_path(tmp_path, "abcd1234", "fifo")
    fifo.mkdir()
    os.mkfifo(fifo / "agent.pid")  # planted: reading it must not wait
    assert list_recorders(tmp_path) == [(os.getpid(), "train-7")]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user: root")
def test_a_folder_of_another_user_names_no_process_of_ours(tmp_path: Path) -> None:
    own_ticks = int(Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[19])
    folder = build_run_dir_path(tmp_path, "abcd1234", "train-7")
    folder.mkdir()
    (folder / "agent.pid").write_text(f"{os.getpid()} {own_ticks}\n")
    os.chown(folder, 65534, 65534)
    assert list_recorders(tmp_path) == []
