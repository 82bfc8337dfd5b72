"""Disks that fill up, folders that are not ours, secrets, drivers that hang: the whole recorder."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterprof.trace.reader import NodeReader, list_node_folders
from clusterprof.trace.schema import Columns, Event, Gap
from tests.support.nvml.simulated import Scenario, build_library
from tests.support.nvml.simulated import make_environment as nvml_environment
from tests.support.recording_runs import (
    PYTHON,
    RECORD,
    find_recorder_pid,
    get_run_dir,
    is_alive,
    list_counter_options,
    list_events,
    list_files,
    make_environment,
    make_job_id,
    read_records,
    wait_for_end,
    wait_for_recording,
    wait_until,
)

TICK_NS = 100_000_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; needs root, as CI has."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"this container may not mount: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    with open(path, "wb") as filler, pytest.raises(OSError, match="No space left"):
        while True:
            os.write(filler.fileno(), bytes(4096))


def times_of(out: Path, collector: str) -> list[int]:
    return [
        int(t)
        for record in read_records(out)
        if isinstance(record, Columns) and record.collector == collector
        for t in record.t_ns
    ]


def test_a_full_disk_pauses_the_recording_and_not_the_job(small_disk: Path, tmp_path: Path) -> None:
    job, out, end = make_job_id("full"), small_disk / "out", tmp_path / "end"
    program = (
        "import os, sys, time\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.1)\n"
        "print('trained')\n"
        "sys.exit(5)"
    )
    process = subprocess.Popen(
        [*RECORD, "-o", str(out), "--keep-free", "0 B", "--", PYTHON, "-c", program, str(end)],
        env=make_environment(job),
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_for_recording(out)
    wait_until(lambda: times_of(out, "cpu"))
    fill(small_disk / "filler")
    full_ns = time.monotonic_ns()
    time.sleep(2.0)
    assert isinstance(read_records(out)[0].node["key"], str)  # type: ignore[union-attr]
    os.unlink(small_disk / "filler")
    free_ns = time.monotonic_ns()
    wait_until(lambda: list_events(out, "disk-resumed"))
    end.touch()
    assert process.communicate()[0] == "trained\n"
    assert process.returncode == 5
    wait_for_end(out)
    kinds = [record.kind for record in read_records(out) if isinstance(record, Event)]
    assert kinds.index("disk-full") < kinds.index("disk-resumed")
    times = times_of(out, "cpu")
    # What was sampled meanwhile waited in memory; a busy machine may have cost some ticks.
    assert len([t for t in times if full_ns < t < free_ns]) >= (free_ns - full_ns) / TICK_NS / 3


def test_all_written_files_are_private(tmp_path: Path) -> None:
    job, out = make_job_id("private"), tmp_path / "out"
    old = os.umask(0)
    try:
        process = subprocess.Popen(
            [*RECORD, "-o", str(out), "--", PYTHON, "-c", "import time; time.sleep(9)"],
            env=make_environment(job),
        )
    finally:
        os.umask(old)
    folder = wait_for_recording(out)
    wait_until(lambda: (get_run_dir(job) / "probe").exists())
    # Until the recorder runs, the link leads nowhere: nothing may be written to memory.
    wait_until(lambda: (get_run_dir(job) / "nccl").resolve() == folder / "nccl")
    for root in (folder, get_run_dir(job)):
        for path in (root, *root.rglob("*")):
            if "probe" in path.parts:
                continue  # code of ours, without a secret; the folder above it is private
            if path.is_symlink():  # has no mode of its own
                assert path.resolve() == folder / "nccl"
                continue
            mode = stat.S_IMODE(path.lstat().st_mode)
            assert mode == (0o700 if path.is_dir() else 0o600), (path, oct(mode))
    process.kill()
    process.wait()
    wait_for_end(out)


def test_a_planted_run_directory_is_refused(tmp_path: Path) -> None:
    job, victim = make_job_id("planted"), tmp_path / "victim"
    victim.mkdir()
    get_run_dir(job).symlink_to(victim)
    try:
        done = subprocess.run(
            [*RECORD, "-o", str(tmp_path / "out"), "--", "/bin/echo", "trained"],
            env=make_environment(job),
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        get_run_dir(job).unlink()
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "not recording" in done.stderr
    assert list(victim.iterdir()) == []


def test_a_planted_output_folder_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)  # everybody may replace what is in it
    done = subprocess.run(
        [*RECORD, "-o", str(shared), "--", "/bin/echo", "trained"],
        env=make_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "not recording" in done.stderr
    assert list(shared.iterdir()) == []


def test_no_secret_of_the_job_enters_the_recording(tmp_path: Path) -> None:
    job, out = make_job_id("secrets"), tmp_path / "out"
    secrets = [f"s3cr3t-{n:02d}-{os.getpid()}" for n in range(6)]
    env = make_environment(
        job,
        API_TOKEN=secrets[0],
        AWS_SECRET_ACCESS_KEY=secrets[1],
        RANKING=secrets[2],
        CLUSTERPROF_NOTE=secrets[3],
    )
    program = "import subprocess, sys; subprocess.run(['sleep', '1.2'], env={'PASS': sys.argv[1]})"
    process = subprocess.Popen(
        [*RECORD, "-o", str(out), "--", PYTHON, "-c", program, secrets[4], f"--key={secrets[5]}"],
        env=env,
    )
    wait_for_recording(out)
    wait_until(lambda: get_run_dir(job).exists() and not list(get_run_dir(job).glob("probe.*.tmp")))
    written = b"".join(path.read_bytes() for path in list_files(get_run_dir(job)))
    assert process.wait() == 0
    wait_for_end(out)
    written += b"".join(path.read_bytes() for path in list_files(out))
    dumped = subprocess.run(
        [PYTHON, "-m", "clusterprof", "dump", str(out)], capture_output=True, check=True
    ).stdout  # unpacked, or a compressed secret would go unseen
    assert job.encode() in dumped  # the search can find something
    for secret in secrets:
        assert secret.encode() not in written + dumped


def test_a_hanging_driver_does_not_delay_other_collectors(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path / "scenario", devices=2, gpm=True)
    scenario.write()
    nvml = nvml_environment(build_library(tmp_path / "lib"), scenario)
    own = ("LD_LIBRARY_PATH", "FAKENVML_CTL")
    job, out = make_job_id("hang"), tmp_path / "out"
    profile = list_counter_options(tmp_path)
    env = make_environment(job, **{name: nvml[name] for name in own})
    process = subprocess.Popen(
        [*RECORD, "-o", str(out), *profile, "--", "/bin/sleep", "60"], env=env
    )
    wait_until(lambda: out.exists() and times_of(out, "gpu_nvidia"))
    scenario.write("0 * hang")
    wait_until(lambda: list_events(out, "collector-hung"))
    agent = find_recorder_pid(job)
    time.sleep(2)
    process.terminate()
    process.wait()
    wait_until(lambda: not is_alive(agent))  # the helper still waits: nobody has let it go
    scenario.write()
    records = read_records(out)
    (hung,) = [
        record
        for record in records
        if isinstance(record, Event) and record.kind == "collector-hung"
    ]
    times = times_of(out, "cpu")
    # 10 Hz from the first sample to the last, less what a busy machine lost. A loop that waits for
    # the driver takes one in a second at most.
    assert len(times) >= (times[-1] - times[0]) / TICK_NS / 3
    after = [
        record
        for record in records
        if isinstance(record, Columns)
        and record.collector == "gpu_nvidia"
        and record.t_ns[-1] > hung.t_ns
    ]
    device = hung.attributes["device"]
    for item in after:
        for column, mask in zip(item.devices, item.masks):
            assert (mask is None) == (column != device) or item is after[0]
    assert {
        gap.device for gap in records if isinstance(gap, Gap) and gap.collector == "gpu_nvidia"
    } == {device}


def test_sigterm_ends_the_recorder_immediately(tmp_path: Path) -> None:
    job, out = make_job_id("signaled"), tmp_path / "out"
    process = subprocess.Popen(
        [*RECORD, "-o", str(out), "--", "/bin/sleep", "60"], env=make_environment(job)
    )
    wait_for_recording(out)
    agent = find_recorder_pid(job)
    os.kill(agent, signal.SIGTERM)
    wait_until(lambda: not is_alive(agent))
    (stopped,) = list_events(out, "recorder-stopped")
    assert stopped.attributes["reason"] == "SIGTERM"
    assert process.poll() is None  # the job goes on
    process.kill()
    process.wait()


def test_recording_works_with_a_read_only_home_and_shadowing_modules(tmp_path: Path) -> None:
    hostile = tmp_path / "cwd"
    hostile.mkdir()
    for name in ("json", "msgspec", "clusterprof", "sitecustomize"):
        (hostile / f"{name}.py").write_text("raise SystemExit(99)")
    out = tmp_path / "out"
    command = [str(Path(sys.executable).parent / "clusterprof"), "record", "-o", str(out), "--"]
    env = {**make_environment(), "HOME": "/proc", "PYTHONPATH": ""}
    done = subprocess.run(
        [*command, "/bin/echo", "trained"],
        cwd=hostile,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "trained\n")
    wait_for_end(out)
    assert NodeReader(list_node_folders(out)[0]).damage.damaged_places == 0


def network_sockets(pid: int) -> list[str]:
    """Sockets other than those that ask the kernel of this machine (netlink)."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.exists()]
    asks = [line.split()[9] for line in Path("/proc/net/netlink").read_text().splitlines()[1:]]
    own = {f"socket:[{inode}]" for inode in asks}
    return [link for link in links if link.startswith("socket:") and link not in own]


def test_the_recorder_uses_batch_scheduling_and_little_memory(tmp_path: Path) -> None:
    job, out = make_job_id("manners"), tmp_path / "out"
    process = subprocess.Popen(
        [*RECORD, "-o", str(out), "--", "/bin/sleep", "60"], env=make_environment(job)
    )
    wait_for_recording(out)
    agent = find_recorder_pid(job)
    wait_until(lambda: len(times_of(out, "cpu")) > 3)
    assert os.sched_getscheduler(agent) == os.SCHED_BATCH
    assert os.getpriority(os.PRIO_PROCESS, agent) == os.getpriority(os.PRIO_PROCESS, 0)
    assert Path(f"/proc/{agent}/oom_score_adj").read_text() == "500\n"
    limits = Path(f"/proc/{agent}/limits").read_text()
    assert f"Max address space         {512 << 20} " in limits

    def status() -> dict[str, str]:
        lines = Path(f"/proc/{agent}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    # What a node has not is looked for again in its first seconds, by threads that end at once.
    wait_until(lambda: status()["Threads"] == "1")
    assert int(status()["VmRSS"].split()[0]) <= 30 << 10  # 30 MB
    wait_until(lambda: not network_sockets(agent))
    process.kill()
    process.wait()
    wait_for_end(out)
