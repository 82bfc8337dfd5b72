"""Do the work of an analysis inside the tasks of a cluster: find, describe, analyze, compare.

These functions run on workers. What they take and return is picklable; tables of operations
are returned as one array of bytes per node, which stays on the worker.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clusterprof import __version__
from clusterprof.analysis.importers.nccl.flight_recorder import Dump
from clusterprof.analysis.inputs.profiler_traces import read_dumps
from clusterprof.analysis.node.analyze import NodeResult
from clusterprof.analysis.node.selection import StartTimes, read_start_times
from clusterprof.analysis.spill import measure_size_bytes
from clusterprof.analysis.tasks.base import TaskFailure
from clusterprof.analysis.tasks.local_engine import JobRequest, NodeTask, run_node_task
from clusterprof.errors import NoRecording
from clusterprof.trace.reader import (
    list_node_folders,
    list_unreadable_folders,
    path_exists,
    read_identity,
)
from clusterprof.trace.segments import list_segments

_START_BYTES = 4096  # of a recording; they hold its host and start, so that no two are equal
MAX_STORED_RATIO = 0.25
"""Part of a worker's memory that the operations of a single node may take."""


@dataclass(frozen=True, slots=True)
class SeenFolder:
    """A node's folder as a worker sees it."""

    folder: Path
    checksum: int
    """Of its first bytes: workers that see the same recording see the same checksum."""


@dataclass(frozen=True, slots=True)
class SeenPath:
    """What a worker sees at a path of the command line."""

    exists: bool
    folders: tuple[SeenFolder, ...] = ()
    unreadable: tuple[tuple[Path, str], ...] = ()
    """Folders that the worker may not read, and why."""
    why_none: str = ""
    """Why there is no recording."""


def list_seen_paths(paths: Sequence[Path]) -> list[SeenPath]:
    """List what this worker sees at each path."""
    return [_list_seen_path(path) for path in paths]


def _list_seen_path(path: Path) -> SeenPath:
    try:
        if not path_exists(path):
            return SeenPath(False)
        folders = [SeenFolder(folder, _read_checksum(folder)) for folder in list_node_folders(path)]
    except NoRecording as error:
        return SeenPath(True, why_none=error.message.removeprefix(f"{path}: "))
    unreadable = [(skipped.path, skipped.why) for skipped in list_unreadable_folders(path)]
    return SeenPath(True, tuple(folders), tuple(unreadable))


def _read_checksum(folder: Path) -> int:
    segments = [folder] if folder.is_file() else list_segments(folder)
    try:
        with segments[0].open("rb") as file:
            return zlib.crc32(file.read(_START_BYTES))
    except (OSError, IndexError):
        return 0


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """What the client must know of a recording that it does not see."""

    identity: tuple[str, str]
    """The node's key and the boot id of its kernel."""
    size_bytes: int
    starts: StartTimes


def describe_folder(folder: Path) -> FolderFacts:
    """Describe the recording of a node."""
    return FolderFacts(
        read_identity(folder), measure_size_bytes([folder]), read_start_times(folder)
    )


@dataclass(frozen=True, slots=True)
class RemoteResult:
    """The result of a node, without its operations."""

    node: NodeResult | TaskFailure
    dumps: tuple[Dump, ...] = ()
    unread_dumps: tuple[str, ...] = ()
    blocks_bytes: int = 0
    """Size of its operations, which stay on the worker."""


NodeOutput = tuple[RemoteResult, NDArray[np.uint8]]
"""The result of a node and its operations, uint8[bytes]; Dask measures and moves the latter."""


def run_remote_node(task: NodeTask, request: JobRequest, version: str) -> NodeOutput:
    """Analyze a node on a worker; return its result and its operations, uint8[bytes].

    Raises: OSError when the worker does not see the recording.
    """
    if version != __version__:  # of a worker that joined after the first check
        failure = TaskFailure(f"a worker has clusterprof {__version__}, not {version}")
        return RemoteResult(failure), np.zeros(0, np.uint8)
    if not path_exists(task.folder):  # so is another worker's view; it is tried elsewhere
        raise OSError(f"{task.folder}: the worker does not see it")
    sink = bytearray()
    spill = replace(task.spill, sink=sink, in_memory_bytes=_limit_stored_bytes())
    node = run_node_task(replace(task, spill=spill), request.limits, request.history)
    dumps, unread = read_dumps([task.folder])
    result = RemoteResult(node, tuple(dumps), tuple(unread), len(sink))
    return result, np.frombuffer(sink, np.uint8)


def _limit_stored_bytes() -> int:
    """Return how many bytes the operations of a node may take on this worker."""
    from distributed import get_worker

    try:
        limit = get_worker().memory_manager.memory_limit
    except (ValueError, AttributeError):
        limit = None
    memory = limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(MAX_STORED_RATIO * memory)


def take_result(output: NodeOutput) -> RemoteResult:
    """Return a node's result, which alone goes to the client, without uint8[bytes]."""
    return output[0]
