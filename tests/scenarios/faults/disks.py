"""Disks that fail, are full, slow or read-only; memory for shared files that is full."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import time
from pathlib import Path

from clusterprof.trace.reader import list_node_folders
from clusterprof.trace.schema import Event, Gap
from tests.scenarios.faults.model import Fault, NotPossible, Trial
from tests.scenarios.faults.rig import (
    RecordedJob,
    count_failed_calls,
    fail_calls,
    find_largest_gap_s,
    list_times,
    read_cpu_s,
    read_recording,
    wait_until_gone,
)
from tests.support.recording_runs import get_run_dir, is_alive, wait_until

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EFBIG)
CALLS = ("write", "open", "ftruncate", "statvfs", "close", "write")
RUN_S = 3.0
MAX_CPU_RATIO = 0.2
"""Of one core: a recorder that tries the failing call again and again takes more."""
MAX_GAP_S = 1.0
RECOVERY_AT_MOST_S = 5.0
DISK_BYTES = 64 << 20
CRASH_AFTER_S = (40.0, 60.0)
MAX_CRASH_LOSS_S = 45.0
"""The kernel writes dirty pages after 30 s, and looks for them every 5 s."""
TICK_NS = 100_000_000
MAX_CROWDED = 3
"""Of a tick: a late sample and the next on the grid may be close; missed ones are not made up."""


def fail_call_on_disk(folder: Path, number: int) -> Trial:
    """Fail one to thirty calls on the files of the recording, from the N-th on."""
    draw = random.Random(number)
    settings = {
        "FAULT_CALL": CALLS[number % len(CALLS)],
        "FAULT_FIRST": draw.choice((1, 2, 3, 4, 6, 8, 12, 16)),
        "FAULT_COUNT": draw.choice((1, 1, 3, 10, 30)),
        "FAULT_ERRNO": draw.choice(ERRORS),
        "FAULT_HALF": draw.choice((0, 1)),
        "FAULT_UNDER": folder / "out",
    }
    return _run_with_failures(folder, number, settings)


def fail_any_call(folder: Path, number: int) -> Trial:
    """Fail a call of the recorder, wherever it is; every second time, of files of the kernel."""
    draw = random.Random(number)
    if number % 2:
        settings: dict[str, object] = {
            "FAULT_CALL": "open",
            "FAULT_FIRST": draw.randrange(1, 80),
            "FAULT_COUNT": draw.choice((1, 5, 30)),
            "FAULT_ERRNO": draw.choice((errno.EIO, errno.EMFILE, errno.ENOMEM, errno.EPERM)),
            "FAULT_UNDER": ("/proc", "/sys")[number // 2 % 2],
        }
        must_record = settings["FAULT_UNDER"] == "/sys"  # no file there is needed to record
        return _run_with_failures(folder, number, settings, not must_record, must_record)
    call = ("mmap", "read", "open", "write", "close")[number % 5]
    settings = {
        "FAULT_CALL": call,
        "FAULT_FIRST": draw.choice((draw.randrange(1, 100), draw.randrange(100, 3000))),
        "FAULT_COUNT": 1,
        "FAULT_ERRNO": errno.ENOMEM if call == "mmap" else draw.choice(ERRORS),
    }
    return _run_with_failures(folder, number, settings, may_not_record=True)


def _run_with_failures(
    folder: Path,
    number: int,
    settings: dict[str, object],
    may_not_record: bool = False,
    must_record: bool = False,
) -> Trial:
    """Record a job while calls fail; what is lost is reported, and the job is unharmed."""
    variables = fail_calls(folder, **settings)
    with RecordedJob(folder, number, ("--keep-free", "0 B"), **variables) as job:
        job.wait_for_steps(1)
        began = time.monotonic()
        agent = _find_recorder(job)
        time.sleep(RUN_S)
        cpu_s, wall_s = read_cpu_s(agent) if agent else 0.0, time.monotonic() - began
        alive = agent and is_alive(agent)
        job.end()
        if agent:
            wait_until_gone(agent)
    injected = count_failed_calls(folder)
    assert cpu_s <= 1.0 + MAX_CPU_RATIO * wall_s, f"the recorder spun: {cpu_s} s of {wall_s:.1f} s"
    assert alive or not must_record, f"it does not record: {settings}, {job.messages}"
    if not alive:
        is_reported = "not recording" in job.messages or "the recorder" in job.messages
        may_end = may_not_record and not agent  # before it recorded
        assert may_end or is_reported, f"it ended without a word: {settings}"
        return Trial(injected=injected, facts={"no recorder": 1})
    if not list(job.out.glob("*/*.cpf")):  # every attempt to open a file was refused
        assert injected and settings["FAULT_CALL"] in ("open", "write", "statvfs"), settings
        return Trial(injected=injected, facts={"nothing recorded": 1})
    records, reader = read_recording(job.out)
    torn = settings["FAULT_CALL"] == "ftruncate"
    assert reader.damage.damaged_places == 0 or torn, f"damaged: {settings}"
    gap_s = find_largest_gap_s(list_times(records))
    return Trial(gap_s, injected)


def _find_recorder(job: RecordedJob) -> int:
    """Return the pid of the recorder; 0 when none has come."""
    try:
        return job.find_recorder()
    except AssertionError:
        return 0


def delay_writes(folder: Path, number: int) -> Trial:
    """Delay every write of the recording by 0.05 to 0.5 s."""
    delay_us = (50_000, 200_000, 500_000)[number % 3]
    variables = fail_calls(
        folder,
        FAULT_CALL="write",
        FAULT_FIRST=1,
        FAULT_COUNT=1_000_000,
        FAULT_ERRNO=0,
        FAULT_DELAY_US=delay_us,
        FAULT_UNDER=folder / "out",
    )
    with RecordedJob(folder, number, **variables) as job:
        job.wait_for_rings()
        agent = job.find_recorder()
        time.sleep(2 * RUN_S)
        assert is_alive(agent)
        job.end()
        wait_until_gone(agent)
    records, reader = read_recording(job.out)
    assert reader.damage.damaged_places == 0
    times = sorted(list_times(records))
    crowded = [b - a for a, b in zip(times, times[MAX_CROWDED:]) if b - a < TICK_NS]
    assert not crowded, f"{MAX_CROWDED + 1} samples within {crowded[0] / 1e6:.0f} ms"
    return Trial(find_largest_gap_s(times), count_failed_calls(folder))


def fill_disk(folder: Path, number: int) -> Trial:
    """Fill the disk of the recording, then free it; what was sampled meanwhile is there."""
    disk = mount_tmpfs(folder / "disk", "1m")
    try:
        with RecordedJob(disk, number, ("--keep-free", "0 B")) as job:
            job.wait_for_rings()
            agent = job.find_recorder()
            wait_until(lambda: list_times(read_recording(job.out)[0]))
            time.sleep((number % 5) / 5)
            filler = disk / "filler"
            _fill(filler)
            time.sleep(1.0 + number % 3)
            filler.unlink()
            freed_ns = time.monotonic_ns()
            wait_until(lambda: _find_event(job, "disk-resumed"))
            resumed = _find_event(job, "disk-resumed")
            job.end()
            wait_until_gone(agent)
            records, reader = read_recording(job.out)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    assert resumed is not None and reader.damage.damaged_places == 0
    assert resumed.attributes["frames_dropped"] == 0
    resumed_s = (resumed.t_ns - freed_ns) / 1e9
    assert resumed_s <= RECOVERY_AT_MOST_S, f"resumed after {resumed_s:.1f} s"
    gap_s = find_largest_gap_s(list_times(records))
    return Trial(gap_s, facts={"resumed after, s": round(resumed_s, 2)})


def crash_host(folder: Path, number: int) -> Trial:
    """Copy a disk while it is recorded to: what a power failure leaves, once its journal is read.

    The copy has what the kernel had written to the device, and no more.
    """
    image, copy = folder / "image", folder / "copy"
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    _run_as_root("mkfs.ext4", "-q", str(image))
    disk = mount_image(image, folder / "disk", "rw")
    try:
        with RecordedJob(disk, number, ("--keep-free", "0 B")) as job:
            job.wait_for_rings()
            agent = job.find_recorder()
            time.sleep(random.Random(number).uniform(*CRASH_AFTER_S))
            _run_as_root("cp", "--sparse=always", str(image), str(copy))
            crashed_ns = time.monotonic_ns()
            job.end()
            wait_until_gone(agent)
    finally:
        _run_as_root("umount", "-l", str(disk))
    subprocess.run(["e2fsck", "-fy", str(copy)], capture_output=True, check=False)  # 1 = mended
    after = mount_image(copy, folder / "after", "ro")
    try:
        records, reader = read_recording(after / "out")
    finally:
        _run_as_root("umount", "-l", str(after))
    lost_s = (crashed_ns - max(list_times(records))) / 1e9
    assert lost_s <= MAX_CRASH_LOSS_S, f"{lost_s:.0f} s were lost"
    facts = {"damaged places": reader.damage.damaged_places}  # blocks that were never written
    return Trial(max(lost_s, 0.0), facts=facts)


def mount_image(image: Path, folder: Path, mode: str) -> Path:
    """Mount a disk image.

    Raises: NotPossible where this user may not.
    """
    folder.mkdir()
    _run_as_root("mount", "-o", f"loop,{mode}", str(image), str(folder))
    return folder


def _run_as_root(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NotPossible(f"there is no {command[0]}") from None
    if done.returncode:
        raise NotPossible(f"{command[0]}: {done.stderr.strip()}")


def fill_shared_memory(folder: Path, number: int) -> Trial:
    """Give the job a /dev/shm of 8 to 512 KiB: rings are memory files, the job goes on."""
    size = ("8k", "64k", "512k", f"{random.Random(number).randrange(200, 440, 4)}k")[number % 4]
    if os.geteuid() != 0:
        raise NotPossible("mounting needs root")
    script = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    prefix = ("unshare", "--mount", "/bin/sh", "-c", script, "sh")
    program = (
        "import os, sys, time\n"
        "for _ in range(200): time.sleep(0.002)\n"
        "open(sys.argv[2], 'w').write('0 1')\n"
        "sys.exit(7)\n"
    )
    with RecordedJob(folder, number, program=program, prefix=prefix) as job:
        job.end()
        time.sleep(0.5)
    recorded = bool(list_node_folders(job.out)) if job.out.exists() else False
    assert recorded or "not recording" in job.messages, job.messages
    assert "Error in sitecustomize" not in job.messages, job.messages
    return Trial(facts={"not recorded": int(not recorded)})


def remove_run_dir(folder: Path, number: int) -> Trial:
    """Delete the run directory, rings and registrations too, below a running job."""
    with RecordedJob(folder, number) as job:
        job.wait_for_rings()
        agent = job.find_recorder()
        time.sleep((number % 10) / 10)
        subprocess.run(["rm", "-rf", str(get_run_dir(job.job))], check=True)
        steps = job.steps
        job.wait_for_steps(steps + 600)  # a gap is written with the next batch, a second later
        job.end()
        wait_until_gone(agent)
    records, reader = read_recording(job.out)
    assert reader.damage.damaged_places == 0
    gaps = [record.message for record in records if isinstance(record, Gap)]
    assert any("deleted the run directory" in gap for gap in gaps), "nothing says so"
    return Trial()


def mount_tmpfs(folder: Path, size: str) -> Path:
    """Mount a small file system in memory.

    Raises: NotPossible where this user may not.
    """
    folder.mkdir()
    options = f"size={size},mode=0700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise NotPossible(f"mounting: {done.stderr.strip()}")
    return folder


def _fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC


def _find_event(job: RecordedJob, kind: str) -> Event | None:
    for record in read_recording(job.out)[0]:
        if isinstance(record, Event) and record.kind == kind:
            return record
    return None


FAULTS = (
    Fault(
        "call-fails",
        "calls on the files of the recording fail: ENOSPC, EIO, EDQUOT, EROFS, ESTALE, EFBIG",
        "a library loaded with LD_PRELOAD fails 1 to 30 calls from the N-th on",
        fail_call_on_disk,
        48,
        1500,
        "s without a sample",
        "failed calls",
        at_once=4,
    ),
    Fault(
        "any-call-fails",
        "calls of the recorder fail: mmap, read, open, write, close, on any file",
        "a library loaded with LD_PRELOAD fails the N-th call, N up to 3,000, or 1 to 30 on /proc",
        fail_any_call,
        40,
        1500,
        "s without a sample",
        "failed calls",
        at_once=4,
    ),
    Fault(
        "disk-slow",
        "every write of the recording takes 0.05 to 0.5 s",
        "a library loaded with LD_PRELOAD sleeps before each write",
        delay_writes,
        6,
        60,
        "s without a sample",
        "delayed writes",
        at_once=3,
    ),
    Fault(
        "disk-full",
        "the disk is full for 1 to 3 s",
        "a tmpfs of 1 MiB is filled and freed",
        fill_disk,
        12,
        200,
        "s without a sample",
        at_once=4,
    ),
    Fault(
        "host-crash",
        "the host loses power after 40 to 60 s",
        "the image of an ext4 file system is copied while it is recorded to, and checked by e2fsck",
        crash_host,
        4,
        40,
        "s",
        at_once=4,
    ),
    Fault(
        "shm-full",
        "/dev/shm has 8 to 512 KiB",
        "a tmpfs of that size in a mount namespace",
        fill_shared_memory,
        16,
        60,
        at_once=3,
    ),
    Fault(
        "run-dir-removed",
        "the run directory is deleted below the job",
        "rm -rf at a random moment",
        remove_run_dir,
        10,
        200,
        at_once=4,
    ),
)
