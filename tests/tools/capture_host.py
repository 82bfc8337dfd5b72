"""Capture this machine's kernel files as a fixture host: a short allow-list, scrubbed.

    python tests/tools/capture_host.py NAME      writes tests/hosts/NAME/{proc,sys}

Names of machines, addresses, serial numbers and foreign paths do not get in: only files whose
content is counters are copied as they are; mount tables are filtered to the file systems that the
readers look for and their servers renamed; cgroups are called level1, level2 and so on.
Look at `git diff` before you commit all the same.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ALLOWED = (
    "proc/stat",
    "proc/meminfo",
    "proc/vmstat",
    "proc/diskstats",
    "proc/pressure/*",
    "proc/net/dev",
    "proc/net/snmp",
    "proc/net/netstat",
    "proc/self/cgroup",
    "proc/self/mountinfo",
    "proc/self/mountstats",
    "sys/devices/system/node/node[0-9]*/numastat",
    "sys/class/net/*/operstate",
    "sys/class/net/*/speed",
    "sys/class/net/*/carrier_changes",
)
CGROUP_FILES = (
    "cpu.stat",
    "cpu.max",
    "cpu.pressure",
    "io.pressure",
    "memory.pressure",
    "memory.current",
    "memory.max",
    "memory.events",
    "cpuacct.usage",
    "cpu.cfs_quota_us",
    "cpu.cfs_period_us",
    "memory.usage_in_bytes",
    "memory.limit_in_bytes",
    "memory.oom_control",
)
HIERARCHIES = {"cpu", "cpuacct", "cpu,cpuacct", "cpuacct,cpu", "memory", "unified"}
KEPT_CORES = 4
KEPT_MOUNTS = re.compile(r" - (proc|sysfs|cgroup2?|nfs4?) | / / ")
SERVER = re.compile(r"(?<!\S)(\[\S+\]|[^\s:]+):/\S*")
ADDRESS = re.compile(r"(?<=addr=)[^,\s]+")


def main(arguments: list[str]) -> int:
    """Capture into tests/hosts/NAME; refuse to overwrite a host that exists."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--root", type=Path, default=Path("/"))
    parser.add_argument("--into", type=Path, default=Path(__file__).parents[1] / "hosts")
    options = parser.parse_args(arguments)
    target: Path = options.into / options.name
    if (target / "proc").exists():
        print(f"{target} exists: remove it first", file=sys.stderr)
        return 2
    for relative, text in iterate_files(options.root):
        path = target / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    print(f"wrote {target}; now write its README.md (kernel, how captured)", file=sys.stderr)
    return 0


def iterate_files(root: Path) -> Iterator[tuple[str, str]]:
    """Yield path and scrubbed text of every allowed file that can be read."""
    for pattern in ALLOWED:
        for path in sorted(root.glob(pattern)):
            yield from _capture_file(root, path)
    for folder in _list_own_cgroups(root):
        for name in CGROUP_FILES:
            yield from _capture_file(root, folder / name)


def _capture_file(root: Path, path: Path) -> Iterator[tuple[str, str]]:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return  # as the readers will find it: not there
    yield scrub_path(str(path.relative_to(root))), scrub(path.name, text)


def _list_own_cgroups(root: Path) -> list[Path]:
    """Return our own cgroup's folders in every hierarchy, and all above them."""
    folders = []
    base = root / "sys/fs/cgroup"
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for name in [*controllers.split(","), controllers, "unified", ""]:
            folder = base / name / path.strip("/")
            while folder != base.parent and base in (folder, *folder.parents):
                folders.append(folder)
                folder = folder.parent
    return sorted(set(folders))


def scrub_path(path: str) -> str:
    """Give the levels of a cgroup neutral names; other allowed paths hold nothing to hide."""
    head, mark, tail = path.partition("sys/fs/cgroup/")
    if not mark:
        return path
    *folders, name = tail.split("/")
    hierarchy = folders[:1] if set(folders[:1]) & HIERARCHIES else []
    levels = [f"level{depth}" for depth in range(1, len(folders) - len(hierarchy) + 1)]
    return head + mark + "/".join([*hierarchy, *levels, name])


def scrub(name: str, text: str) -> str:
    """Blank what identifies a machine in the text of the file called `name`."""
    if name == "stat":
        lines = text.splitlines()
        cores = [line for line in lines if re.match(r"cpu\d", line)]
        kept = [line for line in lines if line not in cores[KEPT_CORES:]]
        kept = [re.sub(r"^btime .*", "btime 1700000000", line) for line in kept]
        return "\n".join(" ".join(line.split(" ")[:40]) for line in kept) + "\n"
    if name == "cgroup":
        return "".join(_scrub_membership(line) + "\n" for line in text.splitlines())
    if name == "mountinfo":
        lines = [line for line in text.splitlines() if KEPT_MOUNTS.search(line)]
        return "".join(_scrub_mount(line) + "\n" for line in lines)
    if name == "mountstats":
        parts = re.split(r"^(?=device )", text, flags=re.MULTILINE)
        return "".join(_scrub_server(part) for part in parts if " with fstype nfs" in part)
    return text


def _scrub_membership(line: str) -> str:
    number, controllers, path = line.split(":", 2)
    depth = len([part for part in path.split("/") if part])
    levels = "/".join(f"level{level}" for level in range(1, depth + 1))
    return f"{number}:{controllers}:/{levels}"


def _scrub_mount(line: str) -> str:
    if " / / " in line:  # the root: what lies below it is private
        line = re.sub(r" - (\S+) .*", r" - \1 /dev/root rw", line)
    return _scrub_server(line)


def _scrub_server(text: str) -> str:
    return SERVER.sub("server:/export", ADDRESS.sub("192.0.2.1", text))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
