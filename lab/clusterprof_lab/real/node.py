"""A node of an emulated cluster: namespaces with a host name, an address and a CPU.

A node has its own network, processes, host name, boot id, /dev/shm and /etc/hosts, so each has a
recorder of its own. All nodes share the rest with the machine, which matters when a recording is
judged: /proc/stat, /proc/diskstats, /proc/loadavg and /proc/pressure show all nodes, control groups
are the machine's, and CLOCK_MONOTONIC is one clock. The common clock makes the truth comparable.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from json import dumps
from pathlib import Path
from types import TracebackType
from typing import Any

INIT = Path(__file__).with_name("init.py")
NETWORK = "10.77.0"
_NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--ipc")
_COMMANDS = ("unshare", "nsenter", "ip", "mount", "taskset", "env", "gcc")
_CPU_GROUPS = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")  # version 1, version 2
_SHARES = {"cpu.shares": 102_400, "cpu.weight": 10_000}  # a hundred times what others have
_GROUP = "clusterprof-lab-"
# A group outlives everything but its removal, so a process of its own sees to that.
_REMOVE = 'cat >/dev/null; for i in 1 2 3 4 5 6 7 8 9; do rmdir "$0" && exit; sleep 0.2; done'
_JOIN = 'echo 0 >"$0"; exec "$@"'


def why_not_here() -> str:
    """Return why nodes cannot be made on this machine, "" when they can."""
    if os.geteuid() != 0:
        return "namespaces and TAP interfaces need root"
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be opened: the kernel or the container has no TAP interfaces"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "--mount-proc", "true"], capture_output=True, text=True
    )
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def get_address(index: int) -> str:
    """Return the address of the node with this number."""
    return f"{NETWORK}.{index + 1}"


def _cpu_group(name: str) -> Path | None:
    """Make a control group before which all others of the machine stand back.

    What else runs on the machine would be a fault on every node. None where it may not be made.
    """
    for parent in _CPU_GROUPS:
        for file, value in _SHARES.items():
            group = parent / f"{_GROUP}{os.getpid()}-{name}"
            with suppress(OSError):
                group.mkdir(exist_ok=True)
                with (group / file).open("r+") as shares:  # a plain folder has no such file
                    shares.write(str(value))
                return group
            with suppress(OSError):
                group.rmdir()
    return None


def _start_group_remover(group: Path) -> subprocess.Popen[Any]:
    """Start the process that removes a group when our end of its pipe is closed."""
    remove = ("sh", "-c", _REMOVE, str(group))
    return subprocess.Popen(remove, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)


@contextmanager
def make_priority_group(name: str) -> Iterator[list[Path]]:
    """Make a control group for a job of this machine itself, none where that is not allowed."""
    group = _cpu_group(name)
    if group is None:
        yield []
        return
    with _start_group_remover(group):
        yield [group]


class Node:
    """One node; a context manager, and gone when this process is, however it ends."""

    def __init__(self, index: int, names: Sequence[str]) -> None:
        """`names`: the host names of all nodes, by which they find each other."""
        self.index = index
        self.name = names[index]
        self.address = get_address(index)
        self.cpu = sorted(os.sched_getaffinity(0))[index % len(os.sched_getaffinity(0))]
        self.boot_id = str(uuid.uuid4())
        hosts = "127.0.0.1 localhost\n" + "".join(
            f"{get_address(i)} {name}\n" for i, name in enumerate(names)
        )
        wish = dumps({"name": self.name, "boot_id": self.boot_id, "hosts": hosts})
        self._unshare = subprocess.Popen(
            [
                *("unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"),
                *(sys.executable, "-I", str(INIT), wish),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._unshare.stdout is not None
        if self._unshare.stdout.readline() != b"ready\n":
            self.close()
            raise RuntimeError(f"{self.name} did not come up")
        outer = self._unshare.pid
        self.pid = int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])
        self._running: list[subprocess.Popen[Any]] = []
        self.cpu_group = _cpu_group(self.name)
        self._guard: subprocess.Popen[Any] | None = None
        if self.cpu_group is not None:
            self._guard = _start_group_remover(self.cpu_group)

    @property
    def root(self) -> Path:
        """The node's file tree, as this process sees it."""
        return Path(f"/proc/{self.pid}/root")

    def make_command(self, *command: str, folder: Path | None = None) -> list[str]:
        """Return the command line that runs a command in this node, on its CPU."""
        enter = ["nsenter", f"--target={self.pid}", *_NAMESPACES, "--"]
        where = [f"--chdir={folder}"] if folder is not None else []
        group = self.cpu_group
        join = ["sh", "-c", _JOIN, str(group / "cgroup.procs")] if group is not None else []
        return [*join, *enter, "taskset", "--cpu-list", str(self.cpu), "env", *where, *command]

    def start(
        self,
        *command: str,
        folder: Path | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command; it ends with the node at the latest."""
        own = {**(os.environ if env is None else env), "TMPDIR": "/dev/shm/tmp"}
        run = subprocess.Popen(self.make_command(*command, folder=folder), env=own, **options)
        self._running.append(run)
        return run

    def run(self, *command: str) -> str:
        """Run a command to its end; return what it printed, raise when it failed."""
        done = subprocess.run(
            self.make_command(*command), capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        """End every process of the node and take it down."""
        assert self._unshare.stdin is not None and self._unshare.stdout is not None
        self._unshare.stdin.close()
        try:
            self._unshare.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._unshare.kill()
            self._unshare.wait()
        self._unshare.stdout.close()
        for run in getattr(self, "_running", ()):
            run.wait()
        guard = getattr(self, "_guard", None)
        if guard is not None:
            assert guard.stdin is not None
            guard.stdin.close()
            guard.wait()

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
