"""Control groups of versions 1 and 2 under common names; a group is removed when its user ends.

https://docs.kernel.org/admin-guide/cgroup-v1/, …/cgroup-v2.html, …/scheduler/sched-bwc.html
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from clusterprof_lab.real.faults.processes import run_at_end

MOUNTED = Path("/sys/fs/cgroup")
_NAME = "clusterprof-lab-"
# Its processes may need a moment to go; what is left is moved up, as nobody else would.
_REMOVE = (
    'for i in 1 2 3 4 5 6 7 8 9; do rmdir "$0" && exit; sleep 0.1; done; '
    'for p in $(cat "$0/cgroup.procs"); do echo $p >"$0/../cgroup.procs"; done; rmdir "$0"'
)


@dataclass(frozen=True)
class Controller:
    """Where one controller's groups are made."""

    name: str
    version: int
    root: Path

    def why_not_here(self) -> str:
        """Return why no group can be made below, "" when one can."""
        if not os.access(self.root, os.W_OK, effective_ids=True):
            return f"groups of the cgroup controller {self.name!r} need root"
        return ""


def find_controller(name: str) -> Controller | str:
    """Return where a controller's groups are made, or why there is none."""
    first = MOUNTED / name
    if (first / "cgroup.procs").exists() and not (first / "cgroup.controllers").exists():
        return Controller(name, 1, first)
    with suppress(OSError):
        if name in (MOUNTED / "cgroup.controllers").read_text().split():
            return Controller(name, 2, MOUNTED)
    return f"the kernel offers no cgroup controller {name!r} here"


def check_controller(name: str) -> str:
    """Return why groups of a controller cannot be made, "" when they can."""
    mounted = find_controller(name)
    return mounted if isinstance(mounted, str) else mounted.why_not_here()


@dataclass(frozen=True)
class Group:
    """One control group."""

    controller: Controller
    folder: Path

    def write(self, value: str | int, first: str, second: str = "") -> None:
        """Write a value to the file of that name in version 1, in version 2."""
        (self.folder / (first if self.controller.version == 1 else second)).write_text(str(value))

    def read_counts(self, file: str) -> dict[str, int]:
        """Return a file of names and numbers, such as `cpu.stat`; {} when there is none."""
        with suppress(OSError, ValueError):
            lines = (self.folder / file).read_text().splitlines()
            return {name: int(value) for name, value in (line.split()[:2] for line in lines)}
        return {}

    def add_process(self, pid: int) -> None:
        """Move a process into the group."""
        (self.folder / "cgroup.procs").write_text(str(pid))


@contextmanager
def make_group(name: str, label: str, parent: Path | None = None) -> Iterator[Group]:
    """Make a group of a controller; it goes at the end, or when this process does.

    `parent`: below this group of version 1 instead of the root. RuntimeError without a controller.
    """
    mounted = find_controller(name)
    if isinstance(mounted, str):
        raise RuntimeError(mounted)
    # Version 2 allows no processes beside child groups, so a parent counts in version 1 only.
    base = parent if parent is not None and mounted.version == 1 else mounted.root
    folder = base / f"{_NAME}{os.getpid()}-{label}"
    with ExitStack() as stack:
        if mounted.version == 2:
            (base / "cgroup.subtree_control").write_text(f"+{name}")
        folder.mkdir()
        stack.enter_context(run_at_end(_REMOVE, str(folder)))
        yield Group(mounted, folder)


def list_remaining_groups(pid: int | None = None) -> list[Path]:
    """List the groups of a process that still exist; None = this process.

    Groups may disappear meanwhile, also those of others: `os.walk` passes over them.
    """
    prefix = f"{_NAME}{os.getpid() if pid is None else pid}-"
    return sorted(
        Path(folder, name)
        for folder, names, _ in os.walk(MOUNTED)
        for name in names
        if name.startswith(prefix)
    )
