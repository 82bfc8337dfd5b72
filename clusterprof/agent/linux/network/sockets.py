"""Find the TCP connections of given processes, from the kernel's list and /proc/<pid>/fd.

    /proc/4711/fd/12 -> socket:[745831]        the number is the inode in the kernel's list

Both can be long, so both are read in parts: a few hundred entries per call regardless of the total.
Descriptors are read only when the list shows a connection that has not been looked up yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.network.netlink import Connections, ListedConnection, normalize_address

_LIST_NS = 3_000_000_000  # minimum pause between the end of one list and the next
_LIST_REST_FACTOR = 5000  # … or this many times the duration of the list …
_MAX_LIST_NS = 30_000_000_000  # … but no longer than this
_LIST_PARTS_PER_CALL = 2  # parts of the list per call, some 260 connections each
_LINKS_PER_CALL = 256  # descriptors per call
# then foreign sockets are checked again: a process can pass a socket on
_RECHECK_NS = 60_000_000_000
_MAX_REMEMBERED = 65536  # foreign sockets remembered
_MAX_DESCRIPTORS = 65536  # of one process
_ADDRESSES_NS = 10_000_000_000
_SOCKET = "socket:["


class JobConnection:
    """A connection of the job, its outgoing interface, and whether it existed before."""

    __slots__ = ("existed_before", "listed", "nic")

    def __init__(self, listed: ListedConnection, nic: str, was_there: bool) -> None:
        self.listed = listed
        self.nic = nic
        self.existed_before = was_there


class JobSockets:
    """Finds the connections of given processes that leave the machine, a few at every call."""

    def __init__(self, roots: Roots, addresses: Callable[[], dict[bytes, str]]) -> None:
        """`addresses`: returns the interface of every address of this machine."""
        self._roots = roots
        self._read_addresses = addresses
        self._addresses: dict[bytes, str] = {}
        self._addresses_ns = -_ADDRESSES_NS
        self._pids: tuple[int, ...] = ()
        self._listing = False
        self._due_ns = self._again_ns = 0
        self._spent_ns = 0
        self._lists = 0
        self._first = True
        self._foreign: set[int] = set()
        self._old_foreign: set[int] = set()
        self._seen: set[int] = set()
        self._pending: dict[int, ListedConnection] = {}
        self._scanned: dict[int, ListedConnection] = {}
        self._scan: Iterator[None] | None = None
        self._inodes: set[int] = set()
        self.denied = 0
        """Processes whose descriptors were not readable, in the last scan."""

    def search(
        self,
        connections: Connections,
        pids: Sequence[int],
        found_connections: dict[int, JobConnection],
        clock: Callable[[], int],
    ) -> None:
        """Continue the search and add new connections to `found_connections`, by inode.

        Raises: Unavailable when the kernel does not list connections.
        """
        if not pids:
            return
        began_ns = clock()
        if tuple(pids) != self._pids:
            self._pids = tuple(pids)
            self._due_ns = self._again_ns = 0
        if not self._listing:
            if began_ns < self._due_ns:
                self._continue_scan(found_connections, began_ns)
                return
            self._start_list(connections, began_ns)
        for _ in range(_LIST_PARTS_PER_CALL):
            listed_connections, last = connections.receive_listed(self._foreign, self._seen)
            for listed in listed_connections:
                before = found_connections.get(listed.inode)
                is_new = before is None or before.listed.id != listed.id
                if is_new and len(self._pending) < _MAX_REMEMBERED:
                    self._pending[listed.inode] = listed
            if last:
                self._finish_list()
                break
        self._spent_ns += clock() - began_ns
        if not self._listing:
            rest_ns = min(_LIST_REST_FACTOR * self._spent_ns, _MAX_LIST_NS)
            self._due_ns = began_ns + max(_LIST_NS, rest_ns)
        self._continue_scan(found_connections, began_ns)

    def restart(self) -> None:
        """Discard a half-read list whose socket is gone."""
        self._listing = False

    def _start_list(self, connections: Connections, now_ns: int) -> None:
        if now_ns >= self._again_ns:
            self._again_ns = now_ns + _RECHECK_NS
            self._old_foreign, self._foreign = self._foreign, set()
        connections.start()
        self._listing = True
        self._spent_ns = 0
        self._seen = set()
        self._pending = {}

    def _finish_list(self) -> None:
        self._listing = False
        self._lists += 1
        self._foreign = self._seen
        if self._pending and self._scan is None:
            self._scanned, self._pending = self._pending, {}
            self._first = self._lists == 1
            self._scan = self._scan_descriptors()

    def _continue_scan(self, connections: dict[int, JobConnection], now_ns: int) -> None:
        if self._scan is None:
            return
        for _ in self._scan:  # ends, or pauses after its share
            return
        self._scan = None
        for inode, listed in self._scanned.items():
            nic = self._find_nic(listed, now_ns) if inode in self._inodes else ""
            if nic:
                was_there = self._first or inode in self._old_foreign
                connections[inode] = JobConnection(listed, nic, was_there)
            elif len(self._foreign) < _MAX_REMEMBERED:
                self._foreign.add(inode)
        self._scanned = {}

    def _find_nic(self, listed: ListedConnection, now_ns: int) -> str:
        """Return the outgoing interface; "" when the connection does not leave the machine."""
        local, remote = normalize_address(listed.local), normalize_address(listed.remote)
        if local not in self._addresses and now_ns - self._addresses_ns >= _ADDRESSES_NS:
            self._addresses, self._addresses_ns = self._read_addresses(), now_ns
        nic = self._addresses.get(local, "")
        return "" if nic == "lo" or remote in self._addresses else nic

    def _scan_descriptors(self) -> Iterator[None]:
        """Collect the inodes of all sockets of the processes, pausing every few hundred."""
        inodes: set[int] = set()
        remaining_links, denied = _LINKS_PER_CALL, 0
        for pid in self._pids:
            folder = f"{self._roots.proc}/{pid}/fd"
            try:
                numbers = os.listdir(folder)[:_MAX_DESCRIPTORS]
            except PermissionError:
                denied += 1
                continue
            except OSError:
                continue
            for number in numbers:
                if not remaining_links:
                    yield
                    remaining_links = _LINKS_PER_CALL
                remaining_links -= 1
                try:
                    target = os.readlink(f"{folder}/{number}")
                except OSError:
                    continue
                if target.startswith(_SOCKET) and len(inodes) < _MAX_REMEMBERED:
                    inodes.add(int(target[len(_SOCKET) : -1]))
        self._inodes, self.denied = inodes, denied
