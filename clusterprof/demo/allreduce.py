"""A real all-reduce between the demo's ranks: a ring over TCP on the loopback, at a rate if asked.

Each rank sends to the next and receives from the one before, as NCCL and gloo do in a ring: in
n - 1 rounds every rank gets the sum of one part of the gradients, in n - 1 more all other parts.

    ring = Ring.from_environment(bytes_per_second=0)    # 0 = as fast as the loopback is
    ring.all_reduce(gradients)                          # float32[n], summed in place
    ring.operations                                     # [(came_ns, left_ns)]: the truth

A slow link is the sender's own doing: it hands out `SLICE_BYTES` at a time, no faster than the
rate. The others wait for real bytes in a real socket, and the kernel's queues stay as they are.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof.errors import ClusterprofError
from clusterprof.probe import layout

LISTEN_FD, PORTS = "CLUSTERPROF_DEMO_LISTEN_FD", "CLUSTERPROF_DEMO_PORTS"
SLICE_BYTES = 32 * 1024
PEER_TIMEOUT_S = 60.0  # a rank that died closes its socket; this is for one that hangs

_NS = 1_000_000_000
_PROBE = "_clusterprof_probe"  # the name under which a recorded process carries the probe


def listeners(world: int) -> list[socket.socket]:
    """Return a listening socket for each rank: those who connect early wait in its backlog."""
    sockets = []
    for _ in range(world):
        one = socket.create_server(("127.0.0.1", 0), backlog=1)
        one.set_inheritable(True)
        sockets.append(one)
    return sockets


def variables(sockets: Sequence[socket.socket], rank: int) -> dict[str, str]:
    """Return what `Ring.from_environment` of this rank needs to know."""
    ports = ",".join(str(one.getsockname()[1]) for one in sockets)
    return {LISTEN_FD: str(sockets[rank].fileno()), PORTS: ports}


class Ring:
    """The ranks of a job in a circle, as seen by one of them."""

    def __init__(
        self, rank: int, before: socket.socket, after: socket.socket, world: int, rate: int
    ) -> None:
        self.rank, self.world = rank, world
        self.operations: list[tuple[int, int]] = []
        """(came_ns, left_ns) of every all-reduce of this rank, in order."""
        self._before, self._after = before, after
        self._rate = rate
        self._spans = _Spans(world)
        for one in (before, after):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.setblocking(False)

    @classmethod
    def from_environment(cls, bytes_per_second: int = 0) -> Ring:
        """Connect to both neighbours, as the launcher's variables say.

        `bytes_per_second` is what this rank's link carries; 0 = no limit. ClusterprofError when a
        neighbour does not come.
        """
        rank, ports = int(os.environ["RANK"]), os.environ[PORTS].split(",")
        listener = socket.socket(fileno=int(os.environ[LISTEN_FD]))
        listener.settimeout(PEER_TIMEOUT_S)
        try:
            address = ("127.0.0.1", int(ports[(rank + 1) % len(ports)]))
            after = socket.create_connection(address, timeout=PEER_TIMEOUT_S)
            before, _ = listener.accept()
        except OSError as error:
            raise ClusterprofError(f"rank {rank} found no neighbour: {error}") from None
        finally:
            listener.close()
        return cls(rank, before, after, len(ports), bytes_per_second)

    def all_reduce(self, values: NDArray[np.float32]) -> None:
        """Sum `values` over all ranks, in place; returns when this rank has all of the sum."""
        came_ns = time.monotonic_ns()
        try:
            self._reduce(values)
        except OSError as error:
            raise ClusterprofError(f"rank {self.rank} lost a neighbour: {error}") from None
        left_ns = time.monotonic_ns()
        self._spans.mark(len(self.operations), came_ns, left_ns, values.nbytes)
        self.operations.append((came_ns, left_ns))

    def _reduce(self, values: NDArray[np.float32]) -> None:
        parts = np.array_split(values, self.world)
        buffer = np.empty_like(parts[0])  # the first part is never the smaller one
        for turn in range(self.world - 1):
            mine, theirs = self._turn(parts, self.rank - turn)
            incoming = buffer[: theirs.size]
            self._exchange(_bytes(mine), _bytes(incoming))
            theirs += incoming
        for turn in range(self.world - 1):
            mine, theirs = self._turn(parts, self.rank + 1 - turn)
            self._exchange(_bytes(mine), _bytes(theirs))

    def last_to_come(self) -> list[tuple[int, int]]:
        """Return for every all-reduce so far (when the last rank came to it, which one that was).

        Every rank must ask, after the last of its steps. The ranks share one machine's clock.
        """
        came = [came_ns for came_ns, _ in self.operations]
        latest = [(came_ns, self.rank) for came_ns in came]
        passed = struct.pack(f"<{len(came)}q", *came)
        for turn in range(1, self.world):
            incoming = bytearray(len(passed))
            self._exchange(memoryview(passed), memoryview(incoming))
            passed = bytes(incoming)
            whose = (self.rank - turn) % self.world
            theirs = struct.unpack(f"<{len(came)}q", passed)
            latest = [max(one, (ns, whose)) for one, ns in zip(latest, theirs)]
        return latest

    def close(self) -> None:
        """Leave the circle."""
        self._before.close()
        self._after.close()

    def _turn(
        self, parts: list[NDArray[np.float32]], at: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        return parts[at % self.world], parts[(at - 1) % self.world]

    def _exchange(self, outgoing: memoryview, incoming: memoryview) -> None:
        """Send one buffer to the next rank while another is filled by the one before."""
        sent = received = 0
        began_ns = time.monotonic_ns()
        while sent < len(outgoing) or received < len(incoming):
            wait_ns = self._due_ns(began_ns, sent) if sent < len(outgoing) else _NS
            readers = [self._before] if received < len(incoming) else []
            writers = [self._after] if sent < len(outgoing) and wait_ns <= 0 else []
            timeout = wait_ns / _NS if not writers and sent < len(outgoing) else PEER_TIMEOUT_S
            readable, writable, _ = select.select(readers, writers, [], timeout)
            if not readable and not writable and timeout == PEER_TIMEOUT_S:
                raise ClusterprofError(
                    f"rank {self.rank} waited {timeout:.0f} s for its neighbours"
                )
            if readable:
                size = self._before.recv_into(incoming[received:])
                if not size:
                    raise ClusterprofError(f"rank {self.rank} lost the rank before it")
                received += size
            if writable:
                until = sent + SLICE_BYTES if self._rate else len(outgoing)
                sent += self._after.send(outgoing[sent:until])
        if self._rate:  # the last bytes of a slow link are under way for as long as the others
            _sleep_ns(self._due_ns(began_ns, sent))

    def _due_ns(self, began_ns: int, sent: int) -> int:
        """Return how long from now the link is busy with what was sent."""
        if not self._rate:
            return 0
        return began_ns + sent * _NS // self._rate - time.monotonic_ns()


class _Spans:
    """Tells a recording, when there is one, of all-reduces over all ranks: as its hooks do."""

    def __init__(self, world: int) -> None:
        self._probe: Any = sys.modules.get(_PROBE)
        self._group = 0
        if self._probe is None:
            return
        self._probe.load()
        groups = __import__(f"{_PROBE}.hooks.groups", fromlist=["number_of"])
        registration = __import__(f"{_PROBE}.registration", fromlist=["announce_group"])
        ranks = list(range(world))
        self._group = groups.number_of(ranks)
        registration.announce_group(self._group, ranks)

    def mark(self, number: int, came_ns: int, left_ns: int, size_bytes: int) -> None:
        if self._probe is not None:
            operation = layout.ALL_REDUCE | layout.BLOCKING << layout.FORM_SHIFT
            values = (self._group, number, size_bytes, operation)
            self._probe.emit(layout.COLLECTIVE, came_ns, left_ns, *values)


def _bytes(values: NDArray[np.float32]) -> memoryview:
    return values.data.cast("B")


def _sleep_ns(length_ns: int) -> None:
    if length_ns > 0:
        time.sleep(length_ns / _NS)
