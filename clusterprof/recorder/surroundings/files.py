"""On which file systems the job works: its folder, home, temporary files, memory, data.

Of a path the mount is looked up in our own mount table; a server is never asked. How much room
there is is asked of local file systems only. Options are those that decide speed; an option that
may name a person or a secret is never shown.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clusterprof.errors import Unavailable
from clusterprof.linux.held import read_once
from clusterprof.linux.mountinfo import Mount, mount_of, parse_mountinfo
from clusterprof.linux.roots import Roots
from clusterprof.recorder.surroundings.change import ADMIN, JOB, YOU, Change

_OPTIONS = frozenset((
    "ro", "sync", "soft", "softerr", "hard", "noac", "vers",
    "nfsvers", "proto", "nconnect", "max_connect", "rsize", "wsize", "actimeo", "acregmin",
    "acregmax", "acdirmin", "acdirmax", "lookupcache", "fsc", "local_lock", "timeo", "retrans",
    "flock", "localflock", "lazystatfs", "cache", "multichannel", "max_channels", "size",
    "nr_inodes", "huge", "direct_io", "kernel_cache", "max_read", "nobarrier", "dax",
))  # fmt: skip
_MEMORY = frozenset(("tmpfs", "ramfs"))
_LOCAL = _MEMORY | {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay"}
_NFS = ("nfs", "nfs4")
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_HANG_S = 1.0
_SMALL_SHM_BYTES = 1 << 30
_SMALL_TMP_BYTES = 1 << 30


def read_files(
    roots: Roots,
    environ: Mapping[str, str],
    cwd: str,
    paths: Sequence[str],
    real: Callable[[str], str] = os.path.realpath,
    room: Callable[[str], Any] = os.statvfs,
) -> list[dict[str, Any]]:
    """Return one entry per place: what, path, point, type, server or source, options, room.

    `problem` says why something is not known. size_bytes and free_bytes: of local file systems.
    """
    places = [("working folder", cwd), ("HOME", environ.get("HOME", ""))]
    places += [("TMPDIR", environ.get("TMPDIR") or "/tmp"), ("shared memory", "/dev/shm")]
    places += [("data", path) for path in paths]
    try:
        mounts = parse_mountinfo(read_once(roots.proc / "self/mountinfo"))
    except Unavailable as why:
        return [
            {"what": what, "path": path, "problem": why.message} for what, path in places if path
        ]
    return [_entry(what, path, mounts, real, room) for what, path in places if path]


def _entry(
    what: str,
    path: str,
    mounts: list[Mount],
    real: Callable[[str], str],
    room: Callable[[str], Any],
) -> dict[str, Any]:
    entry: dict[str, Any] = {"what": what, "path": path}
    where = within(_HANG_S, lambda: real(path))
    if where is None:
        entry["problem"] = "the path does not answer"
    mount = mount_of(mounts, where or os.path.normpath(path))
    if mount is None:
        entry.setdefault("problem", "no mount of it is in our table")
        return entry
    entry |= {"point": mount.point, "type": mount.type}
    source = mount.source.rpartition("@")[2] if mount.type not in ("lustre",) else mount.source
    server = _server(mount.type, source)
    if server:
        entry["server"] = server
    if source not in ("none", mount.type):
        entry["source"] = source
    entry["options"] = [
        option for option in dict.fromkeys(mount.options) if option.partition("=")[0] in _OPTIONS
    ]
    if type_size := options_size(mount):
        entry["size_bytes"] = type_size
    if mount.type in _LOCAL and where is not None:
        found = within(_HANG_S, lambda: room(where))
        if found is not None:
            entry["size_bytes"] = found.f_blocks * found.f_frsize
            entry["free_bytes"] = found.f_bavail * found.f_frsize
    return entry


def options_size(mount: Mount) -> int | None:
    """Return how large a file system in memory may become, as its options say; None = unsaid."""
    for option in mount.options:
        name, _, value = option.partition("=")
        if mount.type == "tmpfs" and name == "size" and value[:-1].isdigit():
            return int(value[:-1]) * _UNITS.get(value[-1], 1)
    return None


def within(seconds: float, ask: Callable[[], Any]) -> Any:
    """Return what a call returns within a time, None when it fails or does not come back.

    A thread of a dead file server cannot be ended; as a daemon it does not keep us from ending.
    """
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(ask())
        except OSError:
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def _server(type_: str, source: str) -> str:
    if type_ in _NFS or type_ in ("ceph", "glusterfs", "fuse.glusterfs", "beegfs", "fuse.sshfs"):
        return source.rpartition(":/")[0]
    if type_ == "lustre":
        return source.rpartition(":/")[0]
    if type_ in ("cifs", "smb3"):
        return source.removeprefix("//").partition("/")[0]
    return ""


def changes(entries: Sequence[Mapping[str, Any]], launchers: Sequence[str]) -> list[Change]:
    """Say what of the file systems is in the job's way."""
    out: list[Change] = []
    for entry in entries:
        what, path, type_ = entry["what"], entry["path"], entry.get("type", "")
        if "problem" in entry:
            continue
        size = entry.get("size_bytes")
        if what == "shared memory" and size is not None and size < _SMALL_SHM_BYTES:
            message = f"{path} has {size >> 20:,} MiB: dataloader workers pass batches through it"
            remedy = "docker run --shm-size or --ipc=host; outside of one remount it with a size"
            if "Kubernetes" in launchers:
                remedy = "an emptyDir with medium: Memory mounted at /dev/shm"
            out.append(Change("files", message, remedy, JOB))
        if what == "TMPDIR" and _is_remote(type_):
            message = f"temporary files ({path}) go to a server ({type_})"
            out.append(Change("files", message, "set TMPDIR to a local folder", YOU))
        if what == "TMPDIR" and entry.get("free_bytes", _SMALL_TMP_BYTES) < _SMALL_TMP_BYTES:
            message = f"{path} has {entry['free_bytes'] >> 20:,} MiB left"
            out.append(Change("files", message, "set TMPDIR to a folder with more room", YOU))
        options = {option.partition("=")[0]: option for option in entry.get("options", ())}
        if type_ in _NFS and "noac" in options:
            message = f"{entry['point']} is mounted noac: every stat and open asks the server"
            out.append(Change("files", message, "mount it without noac", ADMIN))
        if type_ in _NFS and "proto=tcp" in options.values() and "nconnect" not in options:
            message = f"{entry['point']} ({what}) has one TCP connection to its server"
            remedy = "mount it with nconnect=8 (Linux 5.3 or later), or over RDMA"
            out.append(Change("files", message, remedy, ADMIN))
        if "sync" in options:
            message = f"{entry['point']} is mounted sync: every write waits for the disk"
            out.append(Change("files", message, "mount it without sync", ADMIN))
    return list(dict.fromkeys(out))


def _is_remote(type_: str) -> bool:
    return type_ in (*_NFS, "lustre", "cifs", "smb3", "ceph", "beegfs", "gpfs", "fuse.sshfs")
