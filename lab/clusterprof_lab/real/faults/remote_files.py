"""A slow file server: far away, out of slots, slow to open or sync, or short of bandwidth.

`file_server.c` serves generated files over /dev/fuse in the node's mounts, so the job blocks in a
file system like a network's, without a block device. It logs each delayed request.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from clusterprof_lab.real.faults import processes
from clusterprof_lab.real.faults.base import Options, Place, check_root, make_read_options

SOURCE = Path(__file__).with_name("file_server.c")
RECORDS_BYTES = 64 << 20
JITTER_PPM = 200_000
WORKERS = 4
SLOTS = 2
_UNDO = 'mounted=$0; "$@" umount -l "$mounted"; rmdir "$mounted"'
_META_REQUESTS = 4  # of a small file: lookup, open, and two getattr (Python's open, the reader's)
_FILES, _FILE_BYTES = 4000, 16_384
_OWN_NS = 150_000  # what a request takes without any delay: two switches, a copy


def why_not_here() -> str:
    """Return why no file system can be served here, "" when one can."""
    reason = check_root("mounting a file system in user space")
    if reason:
        return reason
    if not os.access("/dev/fuse", os.R_OK | os.W_OK, effective_ids=True):
        return "/dev/fuse cannot be opened: the kernel or the container has no FUSE"
    return processes.list_missing_commands("gcc", "nsenter", "umount")


@cache
def build_server() -> Path:
    """Compile the server, once in the life of this process; return the program."""
    folder = Path(tempfile.mkdtemp(prefix="clusterprof-lab-"))
    kept = ExitStack()
    kept.enter_context(processes.run_at_end('rm -rf "$0"', str(folder)))
    atexit.register(kept.close)
    program = folder / "file_server"
    build = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(program), str(SOURCE)]
    subprocess.run(build, check=True)
    return program


@contextmanager
def serve_files(place: Place, name: str, **values: int) -> Iterator[tuple[Path, Path]]:
    """Serve files with these values of `file_server.c`; yield where the job sees them, and the log.

    RuntimeError when the server does not start.
    """
    program, mounted = build_server(), place.make_path(name)
    log = place.make_path(f"{name}.jsonl")
    mounted.mkdir()
    # A server that was killed leaves a mount that answers nobody.
    with processes.run_at_end(_UNDO, str(mounted), *place.make_node_command()):
        words = [f"{key}={value}" for key, value in values.items()]
        command = place.make_node_command(str(program), str(mounted), str(log), *words)
        with processes.run_until_stdin_ends(command, wait_for=b"ready\n"):
            yield mounted, log


@dataclass(frozen=True)
class RemoteFiles:
    """One way in which a file server is slow."""

    name: str

    def why_not_here(self) -> str:
        """Return why it cannot be made here, "" when it can."""
        return why_not_here()

    @contextmanager
    def apply(self, place: Place) -> Iterator[Options]:
        """Serve the node's data slowly."""
        values, script = _WAYS[self.name](place)
        with serve_files(place, self.name, jitter=JITTER_PPM, **values) as (mounted, log):
            yield Options([word.format(mounted) for word in script], log=log)


Way = tuple[dict[str, int], list[str]]


def _make_read_fault(name: str, reads: int, read_bytes: int) -> list[str]:
    return make_read_options("{}/" + name if name else "{}", reads, read_bytes)


def _compute_min_delay(delay_ns: float) -> int:
    """Return the least delay of which this is the mean, once jitter has been added."""
    return max(0, round(delay_ns / (1 + JITTER_PPM / 2e6)))


def _make_latency(place: Place) -> Way:
    """Each read takes a long time, however small; bandwidth and slots abound."""
    reads = int(place.options.get("reads", 4))
    delay_ns = place.slowed_ns / (place.items * reads) - _OWN_NS
    values = {"records": RECORDS_BYTES, "read": 0 if place.clean else _compute_min_delay(delay_ns)}
    return values, _make_read_fault("records", reads, 65_536)


def _make_slots(place: Place) -> Way:
    """The server answers as fast as ever, but few requests may be under way at a time.

    A rank has several workers, each with a read under way: with `SLOTS` most of the time of a read
    is spent waiting for a slot, without a limit none is.
    """
    reads, workers = int(place.options.get("reads", 2)), int(place.options.get("workers", WORKERS))
    delay_ns = place.slowed_ns * SLOTS / (place.ranks * place.items * reads)
    values = {"records": RECORDS_BYTES, "read": _compute_min_delay(delay_ns), "slots": SLOTS}
    if place.clean:
        values["slots"] = 0
    return values, [*_make_read_fault("records", reads, 65_536), f"--workers={workers}"]


def _make_small_files(place: Place) -> Way:
    """Every sample is many small files: each costs requests before its bytes do."""
    reads = int(place.options.get("reads", 8))
    file_ns = place.slowed_ns / (place.items * reads)
    each_ns = (file_ns - (_META_REQUESTS + 1) * _OWN_NS) / (_META_REQUESTS + 0.25)
    meta_ns = 0 if place.clean else _compute_min_delay(each_ns)
    values = {"files": _FILES, "bytes": _FILE_BYTES, "meta": meta_ns, "read": meta_ns // 4}
    return values, _make_read_fault("", reads, _FILE_BYTES)


def _make_rate(place: Place) -> Way:
    """The server's line carries few bytes per second, of all of the node's reads together."""
    read_bytes = 327_680
    node_bytes = place.items * read_bytes * place.ranks
    rate = 0 if place.clean else node_bytes * 1_000_000_000 // place.slowed_ns
    return {"records": RECORDS_BYTES, "rate": rate}, _make_read_fault("records", 1, read_bytes)


def _make_fsync(place: Place) -> Way:
    """What each rank writes to its log is only a little, but the server takes long to have it."""
    values = {"sync": 0 if place.clean else _compute_min_delay(place.stall_ns - 3 * _OWN_NS)}
    return values, ["--log={}/log", "--log-bytes=4096"]


_WAYS = {
    "fuse-latency": _make_latency,
    "fuse-slots": _make_slots,
    "fuse-small-files": _make_small_files,
    "fuse-rate": _make_rate,
    "fuse-fsync": _make_fsync,
}
WAYS = tuple(RemoteFiles(name) for name in _WAYS)
