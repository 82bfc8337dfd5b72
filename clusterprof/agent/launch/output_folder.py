"""Choose the folder of a recording, so that recordings of unrelated jobs are never mixed.

    out/                 free, or holds this job: used as it is
    out/4712/            out/ holds another job, and this one has the id 4712
    out/run-2/           out/ holds another job, and this one has no id

Nodes and restarts of one job share a folder. A job is known by the id of its launcher. Without
an id each node has a name of its own: then recordings of other machines that are still being
written, and processes with the rendezvous address of a recording that is still being written,
belong to the job.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from clusterprof.agent.launch import identity
from clusterprof.errors import CannotStart
from clusterprof.trace import frame
from clusterprof.trace.schema import Header
from clusterprof.trace.segments import is_segment

LIVE_S = 60.0
"""Age of the last write up to which a recording counts as being written, seconds: a recorder
writes every second, and a shared file system may keep an old time for most of a minute."""
_MAX_HEADERS = 32
"""Headers read per folder: a second job on thousands of nodes differs in any of them."""
_MAX_HEADER_BYTES = 1 << 20
_MAX_RUNS = 1000
_SLURM_STEP = re.compile(r"(\d+)\.\w+")
_RESTART = re.compile(r"-restart\d+$")
_HEADER = msgspec.msgpack.Decoder(Header)


class JobIdentity(NamedTuple):
    """Identity of a job, by which its recordings are recognized."""

    job: str
    named: bool
    """Whether the launcher named the job: then the name is equal on all nodes."""
    machine: tuple[str, str]
    """Host name and boot id."""
    rendezvous: str
    """Address at which its ranks meet; "" = none."""


def build_job_identity(job: str, variables: Mapping[str, str], boot_id: str) -> JobIdentity:
    """Build the identity of the job that this process records.

    variables: launcher variables of the job's environment.
    """
    machine = (identity.get_hostname(), boot_id)
    return JobIdentity(job, identity.is_job_name(job), machine, _format_rendezvous(variables))


def strip_restart(job: str) -> str:
    """Return the id that restarts and Slurm steps of a job share: 4711 for 4711.0-restart2."""
    job = _RESTART.sub("", job)
    step = _SLURM_STEP.fullmatch(job)
    return step[1] if step else job


@contextmanager
def lock_output_folder(out: Path) -> Iterator[None]:
    """Create a folder and lock it, as far as its file system can.

    Two recorders that start at once then choose one after the other.
    """
    descriptor = -1
    with contextlib.suppress(OSError):  # the writer reports why the folder cannot be used
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def choose_output_folder(out: Path, ours: JobIdentity) -> Path:
    """Return `out`, or a folder in it when `out` holds the recording of another job.

    Raises: CannotStart when there are 1,000 recordings of other jobs.
    """
    named = [out / strip_restart(ours.job)] if ours.named else []
    numbered = (out / f"run-{number}" for number in range(2, _MAX_RUNS))
    for folder in itertools.chain([out], named, numbered):
        if all(
            _is_same_job(recorded_job, ours, is_live)
            for recorded_job, is_live in _read_jobs(folder, ours)
        ):
            return folder
    raise CannotStart(
        f"{out}: holds {_MAX_RUNS} recordings of other jobs", "give another output folder"
    )


def _is_same_job(recorded: JobIdentity | None, ours: JobIdentity, is_live: bool) -> bool:
    """Decide whether a recording belongs to our job. recorded: None = its header is unreadable."""
    if recorded is None:
        return False
    if recorded.named or ours.named:
        return recorded.named == ours.named and strip_restart(recorded.job) == strip_restart(
            ours.job
        )
    if recorded.machine == ours.machine and recorded.job == ours.job:
        return True
    if not is_live:
        return False
    if recorded.rendezvous and recorded.rendezvous == ours.rendezvous:
        return True
    return recorded.machine != ours.machine and not (recorded.rendezvous and ours.rendezvous)


def _read_jobs(folder: Path, ours: JobIdentity) -> Iterator[tuple[JobIdentity | None, bool]]:
    """Yield the identity of recordings in a folder, and whether each is still being written.

    Recordings of this machine come first.
    """
    segments = list(_list_newest_segments(folder))
    if not segments:
        return
    now_s = _read_file_system_time(folder)
    host = identity.escape_name(ours.machine[0])
    segments.sort(key=lambda segment: not segment.parent.name.startswith(f"{host}-"))
    for segment in segments[:_MAX_HEADERS]:
        try:
            is_live = now_s - segment.stat().st_mtime <= LIVE_S
            data = _read_beginning(segment)
        except OSError:
            yield None, False
            continue
        if _is_header_complete(data):  # else its recorder died before it had recorded anything
            yield _decode_identity(data), is_live


def _list_newest_segments(folder: Path) -> Iterable[Path]:
    """Yield the newest segment of each node in a folder."""
    try:
        entries = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir())
    except OSError:
        return
    for path in entries:
        try:
            segments = [entry for entry in os.scandir(path) if is_segment(entry.name)]
            names = [entry.name for entry in segments if entry.is_file()]  # a pipe would block
        except OSError:
            continue
        if names:
            yield Path(path, max(names, key=lambda name: (len(name), name)))


def _read_file_system_time(folder: Path) -> float:
    """Return the present time by the clock of the folder's file system, seconds since 1970."""
    path = folder / f".clusterprof-{os.getpid()}.tmp"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
    except OSError:
        return float("inf")  # nothing can be written here: no recording is live for us
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        os.unlink(path)


def _read_beginning(segment: Path) -> bytes:
    descriptor = os.open(segment, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        return file.read(_MAX_HEADER_BYTES)


def _is_header_complete(data: bytes) -> bool:
    """Return False for a segment that ends within its first frame."""
    if len(data) < frame.HEAD_BYTES:
        return False
    payload_bytes = frame.read_payload_length(data, 0)
    return payload_bytes is None or len(data) >= frame.HEAD_BYTES + payload_bytes


def _decode_identity(data: bytes) -> JobIdentity | None:
    """Decode the identity of a recording from its first frame; None = unreadable."""
    try:
        payload_bytes = frame.read_payload_length(data, 0)
        if payload_bytes is None:
            return None
        first = frame.unpack_frame(data, 0, payload_bytes)
        header = _HEADER.decode(first.header) if first.kind == frame.KIND_HEADER else None
    except (frame.FrameError, msgspec.MsgspecError):
        return None
    if header is None:
        return None
    launcher, node = header.launcher, header.node
    return JobIdentity(
        str(launcher.get("job") or ""),
        bool(launcher.get("named")),
        (str(node.get("hostname", "")), str(node.get("boot_id", ""))),
        _format_rendezvous(launcher.get("variables") or {}),
    )


def _format_rendezvous(variables: Mapping[str, str]) -> str:
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    values = [str(variables.get(name, "")) for name in names]
    return ":".join(values) if values[0] and values[1] else ""
