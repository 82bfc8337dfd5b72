"""The nodes of a job from wherever their recordings were kept: each of them once.

    find_nodes([Path("host1"), Path("host2"), Path("shared/run")])

Recordings may lie on node-local disks and be brought together, some of them twice. A path is a
recording, one node's folder in it, or a segment of one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterprof.errors import NoRecording
from clusterprof.trace.reader import NodeReader, node_folders
from clusterprof.trace.schema import Header
from clusterprof.trace.segments import is_segment

_GIVE = "give the folders that `clusterprof record` wrote"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A path or folder that is not analysed."""

    path: Path
    why: str
    remedy: str
    copy: bool
    """True when nothing is missing: another folder holds the same."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What is there to read."""

    folders: tuple[Path, ...]
    """One per node and recorder, in the order of the paths."""
    left_out: tuple[LeftOut, ...] = ()


def find_nodes(paths: Sequence[Path]) -> Sources:
    """Return the folders of all nodes under some paths, each recording of a node once.

    Of two copies the one with more bytes is taken. Raises NoRecording for a path that is not there,
    and when nothing under any of them can be read; one unreadable path of several is left out.
    """
    for path in paths:
        if not os.path.lexists(path):
            raise NoRecording(f"{path}: no such file or directory", _missing(path))
    folders: list[Path] = []
    left_out: list[LeftOut] = []
    for path in paths:
        try:
            folders += node_folders(path)
        except NoRecording as error:
            if len(paths) == 1:
                raise
            why = error.message.removeprefix(f"{path}: ")
            left_out.append(LeftOut(path, why, error.remedy, copy=False))
        left_out += _closed(path)
    if not folders:
        raise NoRecording("; ".join(f"{one.path}: {one.why}" for one in left_out), _GIVE)
    if len(folders) == 1:
        return Sources(tuple(folders), tuple(left_out))
    return _once(_whole(folders), left_out)


def _missing(path: Path) -> str:
    if any(letter in str(path) for letter in "*?["):
        return "the shell found nothing that this pattern fits; give the folders of the nodes"
    return "give the folder that `clusterprof record` wrote"


def _closed(path: Path) -> list[LeftOut]:
    """Return the folders in a recording that we may not look into."""
    out = []
    try:
        inside = [entry for entry in os.scandir(path) if entry.is_dir()]
    except OSError:
        return []
    for entry in sorted(inside, key=lambda entry: entry.name):
        try:
            os.scandir(entry.path).close()
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            remedy = "analyse as the user who recorded, or let this one read the folder"
            out.append(LeftOut(path / entry.name, why, remedy, copy=False))
    return out


def _whole(folders: Sequence[Path]) -> list[Path]:
    """Take several segments of one folder for the folder; `run/*/*.cpf` names them one by one."""
    parents = [folder.parent for folder in folders if folder.is_file()]
    out: list[Path] = []
    for folder in folders:
        if folder.is_file() and parents.count(folder.parent) > 1:
            folder = folder.parent
        if folder not in out:
            out.append(folder)
    return out


def _once(folders: Sequence[Path], left_out: list[LeftOut]) -> Sources:
    taken: dict[tuple[str, str], Path] = {}
    for folder in folders:
        who = _who(folder)
        other = taken.get(who)
        if other is None:
            taken[who] = folder
            continue
        better, worse = (folder, other) if _bytes(folder) > _bytes(other) else (other, folder)
        taken[who] = better
        if os.path.realpath(better) != os.path.realpath(worse):
            why = f"the same recording of the same node as {better}, which was taken"
            left_out.append(LeftOut(worse, why, "", copy=True))
    return Sources(tuple(taken.values()), tuple(left_out))


def _who(folder: Path) -> tuple[str, str]:
    """Return what identifies one recorder's life on one node: its key and the boot of the kernel.

    A folder whose header cannot be read stands for itself.
    """
    for record in NodeReader(folder):
        if isinstance(record, Header):
            return record.node.get("key") or folder.name, record.node.get("boot_id", "")
    return os.path.realpath(folder), ""


def _bytes(folder: Path) -> int:
    if folder.is_file():
        return folder.stat().st_size
    entries = [entry for entry in os.scandir(folder) if is_segment(entry.name)]
    return sum(entry.stat().st_size for entry in entries)
