"""NFS: whether this machine could serve and mount it; the `fuse-*` faults are used instead."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from clusterprof_lab.real.faults import processes
from clusterprof_lab.real.faults.base import Options, Place, check_root

KNOWN = Path("/proc/filesystems")
_NEEDED = {"nfs4": "client", "nfsd": "server"}


class Nfs:
    """A mount over a bad link. It has never been made: no machine at hand could."""

    name = "nfs"

    def why_not_here(self) -> str:
        """Return why it cannot be made here; never "", as it is not implemented."""
        reason = check_root("an NFS server")
        if reason:
            return reason
        known = {line.split()[-1] for line in KNOWN.read_text().splitlines()}
        none = [f"{part} ({name})" for name, part in _NEEDED.items() if name not in known]
        if none:  # a module may be loaded by now: `modprobe nfs nfsd` before the lab
            return f"the kernel has no NFS {', no '.join(none)}: use fuse-latency and its like"
        reason = processes.list_missing_commands("exportfs", "rpc.nfsd", "mount.nfs")
        return reason or "this kernel could, but the lab has no NFS fault yet: use fuse-latency"

    def apply(self, place: Place) -> AbstractContextManager[Options]:
        """Raise RuntimeError with the reason."""
        raise RuntimeError(self.why_not_here())


FAULT = Nfs()
