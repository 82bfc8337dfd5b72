"""/proc/<pid>/status: on which CPUs and NUMA nodes a process may be.

https://docs.kernel.org/filesystems/proc.html (table 1-2), https://docs.kernel.org/admin-guide/cgroup-v1/cpusets.html

    Cpus_allowed:        00000000,00000008
    Cpus_allowed_list:   3
    Mems_allowed_list:   0-1

`Cpus_allowed_list` is what both the process's affinity and its cpuset leave; it may name CPUs that
are offline. It is that of the main thread: another thread may have been given a set of its own.
"""

from __future__ import annotations

STATUS_BYTES = 32768  # the masks of 8,192 CPUs and 1,024 nodes are 2.6 KB
_CPUS, _NODES = b"\nCpus_allowed_list:", b"\nMems_allowed_list:"


def parse_allowed(data: bytes) -> tuple[str, str]:
    """Return the lists of CPUs and of NUMA nodes; "" for one that the kernel does not write."""
    return _value(data, _CPUS), _value(data, _NODES)


def _value(data: bytes, word: bytes) -> str:
    at = data.find(word)
    if at < 0:
        return ""
    at += len(word)
    stop = data.find(b"\n", at)
    return data[at : stop if stop >= 0 else len(data)].strip().decode("ascii", "replace")
