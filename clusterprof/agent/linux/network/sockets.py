"""Which TCP connections belong to some processes: the kernel's list, joined to /proc/<pid>/fd.

    /proc/4711/fd/12 -> socket:[745831]        the number is the inode the kernel's list gives too

Both can be long, so both are read piece by piece: a few hundred entries a call, however many there
are. Descriptors are looked at only when the list shows a connection nobody has looked for yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

from clusterprof.linux.addresses import plain
from clusterprof.linux.roots import Roots
from clusterprof.linux.sock_diag import Connections, Listed

_LIST_NS = 3_000_000_000  # between the end of one list and the next
_LIST_SHARE = 5000  # … or this many times what it took …
_LIST_NS_AT_MOST = 30_000_000_000  # … but no more than this
_PIECES = 2  # of the list a call, some 260 connections each
_LINKS = 256  # descriptors a call
_AGAIN_NS = 60_000_000_000  # then strangers are looked at again: a socket can be handed over
_MOST = 65536  # strangers remembered
_MOST_DESCRIPTORS = 65536  # of one process
_ADDRESSES_NS = 10_000_000_000
_SOCKET = "socket:["


class Found:
    """A connection of the job: where it goes out, and whether it was there when we came."""

    __slots__ = ("listed", "nic", "was_there")

    def __init__(self, listed: Listed, nic: str, was_there: bool) -> None:
        self.listed = listed
        self.nic = nic
        self.was_there = was_there


class JobSockets:
    """Finds the connections of some processes that leave the machine, a little at every call."""

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
        self._strangers: set[int] = set()
        self._old_strangers: set[int] = set()
        self._seen: set[int] = set()
        self._pending: dict[int, Listed] = {}
        self._asked: dict[int, Listed] = {}
        self._scan: Iterator[None] | None = None
        self._inodes: set[int] = set()
        self.denied = 0
        """Processes whose descriptors we may not see, of those looked at last."""

    def look(
        self,
        kernel: Connections,
        pids: Sequence[int],
        known: dict[int, Found],
        clock: Callable[[], int],
    ) -> None:
        """Go on looking and add to `known`, by inode, what was found; raises Unavailable."""
        if not pids:
            return
        began_ns = clock()
        if tuple(pids) != self._pids:
            self._pids = tuple(pids)
            self._due_ns = self._again_ns = 0
        if not self._listing:
            if began_ns < self._due_ns:
                self._go_on(known, began_ns)
                return
            self._begin(kernel, began_ns)
        for _ in range(_PIECES):
            found, last = kernel.more(self._strangers, self._seen)
            for listed in found:
                before = known.get(listed.inode)
                new = before is None or before.listed.id != listed.id
                if new and len(self._pending) < _MOST:
                    self._pending[listed.inode] = listed
            if last:
                self._end()
                break
        self._spent_ns += clock() - began_ns
        if not self._listing:
            rest_ns = min(_LIST_SHARE * self._spent_ns, _LIST_NS_AT_MOST)
            self._due_ns = began_ns + max(_LIST_NS, rest_ns)
        self._go_on(known, began_ns)

    def restart(self) -> None:
        """Forget a list that was half read: its socket is gone."""
        self._listing = False

    def _begin(self, kernel: Connections, now_ns: int) -> None:
        if now_ns >= self._again_ns:
            self._again_ns = now_ns + _AGAIN_NS
            self._old_strangers, self._strangers = self._strangers, set()
        kernel.start()
        self._listing = True
        self._spent_ns = 0
        self._seen = set()
        self._pending = {}

    def _end(self) -> None:
        self._listing = False
        self._lists += 1
        self._strangers = self._seen
        if self._pending and self._scan is None:
            self._asked, self._pending = self._pending, {}
            self._first = self._lists == 1
            self._scan = self._look_through()

    def _go_on(self, known: dict[int, Found], now_ns: int) -> None:
        if self._scan is None:
            return
        for _ in self._scan:  # ends, or pauses after its share
            return
        self._scan = None
        for inode, listed in self._asked.items():
            nic = self._nic(listed, now_ns) if inode in self._inodes else ""
            if nic:
                was_there = self._first or inode in self._old_strangers
                known[inode] = Found(listed, nic, was_there)
            elif len(self._strangers) < _MOST:
                self._strangers.add(inode)
        self._asked = {}

    def _nic(self, listed: Listed, now_ns: int) -> str:
        """Return the interface it goes out by; "" when it does not leave the machine."""
        local, remote = plain(listed.local), plain(listed.remote)
        if local not in self._addresses and now_ns - self._addresses_ns >= _ADDRESSES_NS:
            self._addresses, self._addresses_ns = self._read_addresses(), now_ns
        nic = self._addresses.get(local, "")
        return "" if nic == "lo" or remote in self._addresses else nic

    def _look_through(self) -> Iterator[None]:
        """Gather the inodes of all sockets of the processes, pausing every few hundred."""
        inodes: set[int] = set()
        left, denied = _LINKS, 0
        for pid in self._pids:
            folder = f"{self._roots.proc}/{pid}/fd"
            try:
                numbers = os.listdir(folder)[:_MOST_DESCRIPTORS]
            except PermissionError:
                denied += 1
                continue
            except OSError:
                continue
            for number in numbers:
                if not left:
                    yield
                    left = _LINKS
                left -= 1
                try:
                    target = os.readlink(f"{folder}/{number}")
                except OSError:
                    continue
                if target.startswith(_SOCKET) and len(inodes) < _MOST:
                    inodes.add(int(target[len(_SOCKET) : -1]))
        self._inodes, self.denied = inodes, denied
