"""What a process tells the recorder about itself: its ring, its rank, its device.

Small JSON files in the run directory (docs/design.md, section 3), each written under a temporary
name and renamed, so that a reader never meets half of one.
"""

import json
import os
import sys
from typing import Any, Dict, Optional, Sequence

from . import layout

_device = ""
_problem = ""


def _run_dir() -> str:
    from . import run_dir

    return run_dir


def path_of_ring() -> str:
    """Return where the ring of this process lies if it has to be a file."""
    return "%s/rings/%d.0.ring" % (_run_dir(), os.getpid())


def started_ticks() -> int:
    """Return when this process started, in clock ticks since boot (/proc/self/stat, field 22)."""
    with open("/proc/self/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def announce_ring(fd: int, path: str, size: int, ticks: int) -> None:
    """Tell the recorder which descriptor of ours, or which file, is the ring."""
    content = {
        "pid": os.getpid(),
        "started_ticks": ticks,
        "fd": None if path else fd,
        "path": path or None,
        "bytes": size,
    }
    _write("rings", "%d.0" % os.getpid(), content)


def register(problem: str = "") -> None:
    """Announce this process as one of the job, unless it only helps one that is.

    Best effort: a run directory that is full or gone costs the announcement, not the spans.
    """
    global _problem
    from . import ring

    _problem = problem or _problem
    if ring.helper:
        return
    most = layout.VALUE_CHARACTERS
    found = {name: os.environ[name][:most] for name in layout.VARIABLES if name in os.environ}
    content: Dict[str, Any] = {
        "pid": os.getpid(),
        "started_ticks": started_ticks(),
        "role": "python",
        "variables": found,
        "device": _device or _emulated(found.get("CLUSTERPROF_EMULATED", "")),
        "node_local_rank": _node_local_rank(found),
    }
    frameworks = _frameworks()
    if frameworks:
        content["frameworks"] = frameworks
    if _problem:
        content["problem"] = _problem
    try:
        _write("register", str(os.getpid()), content)
    except OSError:
        pass


def announce_group(group: int, ranks: Sequence[int]) -> None:
    """Tell the recorder which global ranks make up a group of the job; best effort as above."""
    from . import ring

    if ring.helper:
        return
    pid = os.getpid()
    try:
        _write("groups", "%d.%d" % (pid, group), {"pid": pid, "group": group, "ranks": ranks})
    except OSError:
        pass


def set_device(device: str) -> None:
    """Announce anew, now that the device of this process is known ("GPU-…")."""
    global _device
    from . import ring

    _device = device
    if ring.is_open():
        register()


def _frameworks() -> str:
    """Return "torch 2.13.0, jax 0.10.2": what the job has imported so far; nothing is imported."""
    found = []
    for name in ("torch", "jax", "tensorflow"):
        version = getattr(sys.modules.get(name), "__version__", "")
        if isinstance(version, str) and version:
            found.append("%s %s" % (name, str.__str__(version)[:32]))
    return ", ".join(found)


def _emulated(value: str) -> str:
    return "emulated-" + value if value.isdigit() else value if "emulated-" in value else ""


def _node_local_rank(variables: Dict[str, str]) -> Optional[int]:
    for name in layout.NODE_LOCAL_RANK_VARIABLES:
        if variables.get(name, "").isdigit():
            return int(variables[name])
    return None


def _write(folder: str, stem: str, content: Dict[str, Any]) -> None:
    path = "%s/%s/%s.json" % (_run_dir(), folder, stem)
    temporary = "%s.%d.tmp" % (path, os.getpid())
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(temporary, flags, 0o600)
    try:
        os.write(fd, json.dumps(content).encode())
    finally:
        os.close(fd)
    os.replace(temporary, path)
