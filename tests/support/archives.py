"""Unpacks archives of other people's fixtures."""

from __future__ import annotations

import posixpath
import tarfile
from pathlib import Path


def unpack_archive(archive: Path, folder: Path, *parts: str) -> Path:
    """Unpack the members that have one of the parts in their path; no part = all members.

    Links that lead out of the folder are left out. Python before 3.11.4 has no filters for
    `extractall`, and Python 3.14 always uses one.
    """
    with tarfile.open(archive) as tar:
        members = [
            member
            for member in tar
            if _stays_inside(member) and (not parts or any(part in member.name for part in parts))
        ]
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, members, filter="data")
        else:
            tar.extractall(folder, members)
    return folder


def _stays_inside(member: tarfile.TarInfo) -> bool:
    if not (member.issym() or member.islnk()):
        return member.isfile() or member.isdir()
    beside = posixpath.dirname(member.name) if member.issym() else ""
    target = posixpath.normpath(posixpath.join(beside, member.linkname))
    return not target.startswith(("..", "/"))
