"""Find the recordings that the workers of a cluster see, each with the workers that see it.

    shared folder            every worker sees the same recordings: any may read them
    disk of each node        a worker sees the recordings of its own node: only it may
    s3://, gs://, abfs://    any worker may

Two workers see the same recording when path and first bytes are equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterprof.analysis.tasks.dask_client import get_host
from clusterprof.analysis.tasks.remote_nodes import SeenPath, list_seen_paths
from clusterprof.errors import ClusterFailed, ClusterprofError, NoRecording
from clusterprof.trace.reader import SkippedInput
from clusterprof.trace.remote import RemotePath, resolve_path
from clusterprof.trace.segments import merge_segments

_UNREADABLE_HINT = "start the workers as the user who recorded, or make the folder readable"


@dataclass(frozen=True, slots=True)
class RemoteSource:
    """The recording of a node, and who can read it."""

    folder: Path
    workers: tuple[str, ...] = ()
    """Hosts or addresses of the workers that see it; () = all do."""


def find_remote_sources(
    client: Any, paths: Sequence[Path]
) -> tuple[list[RemoteSource], list[SkippedInput]]:
    """Find the recordings that workers see in the given paths, copies included.

    Returns them in the order in which one machine that sees them all lists them, and what
    cannot be read.
    Raises: NoRecording for a path that no worker sees, or when there is nothing to read.
    """
    paths = merge_segments([resolve_path(path) for path in paths])
    seen_by_worker = _ask_workers(client, [p for p in paths if not isinstance(p, RemotePath)])
    in_store = [path for path in paths if isinstance(path, RemotePath)]
    seen_in_store = _ask_any_worker(client, in_store)
    workers = list(client.nthreads())
    sources: list[RemoteSource] = []
    skipped: list[SkippedInput] = []
    for path in paths:
        if isinstance(path, RemotePath):
            views = {"": seen_in_store[path]}
        else:
            views = {worker: view[path] for worker, view in seen_by_worker.items()}
        view = _merge_views(path, views)
        if not view.readers and len(paths) == 1:
            raise NoRecording(f"{path}: {view.why_none}", "give the folder of the recording")
        for folder, _ in sorted(view.readers, key=lambda key: (key[0].name, key[1])):
            readers = view.readers[folder, _]
            limits = () if readers == {""} else restrict_workers(readers, workers)
            sources.append(RemoteSource(folder, limits))
        if not view.readers:
            remedy = "give the folder that `clusterprof record` wrote"
            skipped.append(SkippedInput(path, view.why_none, remedy, is_copy=False))
        readable = {folder for folder, _ in view.readers}
        skipped += [
            SkippedInput(folder, why, _UNREADABLE_HINT, is_copy=False)
            for folder, why in sorted(view.unreadable.items())
            if folder not in readable
        ]
    if not sources:
        whys = "; ".join(f"{node.path}: {node.why}" for node in skipped)
        raise NoRecording(whys, "give the folders that `clusterprof record` wrote")
    return sources, skipped


def _ask_workers(client: Any, paths: Sequence[Path]) -> dict[str, dict[Path, SeenPath]]:
    """Ask every worker what it sees at each path.

    Raises: ClusterFailed when no worker answers.
    """
    if not paths:
        return {}
    answers = client.run(list_seen_paths, paths, on_error="return")
    errors = [answer for answer in answers.values() if isinstance(answer, BaseException)]
    if len(errors) == len(answers):
        raise ClusterFailed(f"no worker can look for recordings: {errors or 'none is left'}")
    return {
        worker: dict(zip(paths, answer))
        for worker, answer in answers.items()
        if not isinstance(answer, BaseException)
    }


def _ask_any_worker(client: Any, paths: Sequence[Path]) -> dict[Path, SeenPath]:
    """Ask any worker what an object store holds at each path.

    Raises: ClusterprofError as the worker does.
    """
    if not paths:
        return {}
    try:
        return dict(zip(paths, client.submit(list_seen_paths, paths, pure=False).result()))
    except ClusterprofError:
        raise
    except Exception as error:
        raise ClusterFailed(f"a worker cannot list {paths[0]}: {error}") from error


@dataclass
class _SeenByAll:
    """What all workers together see at a path."""

    readers: dict[tuple[Path, int], set[str]] = field(default_factory=dict)
    """The workers that see a recording, by folder and checksum of its first bytes."""
    unreadable: dict[Path, str] = field(default_factory=dict)
    why_none: str = ""


def _merge_views(path: Path, views: dict[str, SeenPath]) -> _SeenByAll:
    """Merge what the workers see at a path.

    Raises: NoRecording when there is nothing, for any worker.
    """
    if not any(view.exists for view in views.values()):
        if isinstance(path, RemotePath):
            raise NoRecording(f"{path}: no such object or folder", "check the address")
        raise NoRecording(
            f"{path}: no worker sees this path",
            "give a path that the workers see: a shared folder, or the local disk of their nodes",
        )
    readers: dict[tuple[Path, int], set[str]] = defaultdict(set)
    merged = _SeenByAll()
    for worker, view in views.items():
        for entry in view.folders:
            readers[entry.folder, entry.checksum].add(worker)
        merged.unreadable |= dict(view.unreadable)
        merged.why_none = merged.why_none or view.why_none
    merged.readers = dict(readers)
    return merged


def restrict_workers(readers: Collection[str], workers: Collection[str]) -> tuple[str, ...]:
    """Return hosts and addresses that stand for these readers; () when all workers are readers.

    A host stands for all its workers: one that is restarted there has another address.
    """
    if set(workers) <= set(readers):
        return ()
    other_hosts = {get_host(worker) for worker in workers if worker not in readers}
    return tuple(sorted({w if get_host(w) in other_hosts else get_host(w) for w in readers}))
