"""Run a real all-reduce between the demo's ranks: a ring over TCP on the loopback, with a
rate limit.

Each rank sends to the next and receives from the previous one, like NCCL and gloo in a
ring: in n - 1 rounds every rank obtains the sum of one part of the gradients, in n - 1
more all other parts.

    ring = Ring.from_environment(bytes_per_second=0)   # 0 = no rate limit
    ring.all_reduce(gradients)                         # float32[n], summed in place
    ring.operations                                    # [(arrived_ns, left_ns)]

A slow link is emulated by the sender: it sends `SLICE_BYTES` at a time, no faster than
the rate. The other ranks wait for real bytes in a real socket, and the kernel's queues
are unchanged.
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
from clusterprof.units import SECOND_NS

LISTEN_FD_VARIABLE, PORTS_VARIABLE = "CLUSTERPROF_DEMO_LISTEN_FD", "CLUSTERPROF_DEMO_PORTS"
SLICE_BYTES = 32 * 1024
PEER_TIMEOUT_S = 60.0  # a rank that dies closes its socket; this timeout is for one that hangs

_PROBE_MODULE = "_clusterprof_probe"  # the name of the probe module in a recorded process


def open_listeners(world: int) -> list[socket.socket]:
    """Open a listening socket for each rank; early connections wait in its backlog."""
    sockets = []
    for _ in range(world):
        listener = socket.create_server(("127.0.0.1", 0), backlog=1)
        listener.set_inheritable(True)
        sockets.append(listener)
    return sockets


def build_ring_variables(sockets: Sequence[socket.socket], rank: int) -> dict[str, str]:
    """Build the environment variables that `Ring.from_environment` of this rank needs."""
    ports = ",".join(str(listener.getsockname()[1]) for listener in sockets)
    return {LISTEN_FD_VARIABLE: str(sockets[rank].fileno()), PORTS_VARIABLE: ports}


class Ring:
    """The ranks of a job in a ring, as seen by one of them."""

    def __init__(
        self, rank: int, before: socket.socket, after: socket.socket, world: int, rate: int
    ) -> None:
        self.rank, self.world = rank, world
        self.operations: list[tuple[int, int]] = []
        """(arrived_ns, left_ns) of every all-reduce of this rank, in order."""
        self._before, self._after = before, after
        self._rate = rate
        self._spans = _CollectiveSpans(world)
        for peer in (before, after):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.setblocking(False)

    @classmethod
    def from_environment(cls, bytes_per_second: int = 0) -> Ring:
        """Connect to both neighbors given by the launcher's variables.

        bytes_per_second: capacity of this rank's link; 0 = no limit.
        Raises: ClusterprofError when a neighbor does not connect.
        """
        rank, ports = int(os.environ["RANK"]), os.environ[PORTS_VARIABLE].split(",")
        listener = socket.socket(fileno=int(os.environ[LISTEN_FD_VARIABLE]))
        listener.settimeout(PEER_TIMEOUT_S)
        try:
            address = ("127.0.0.1", int(ports[(rank + 1) % len(ports)]))
            after = socket.create_connection(address, timeout=PEER_TIMEOUT_S)
            before, _ = listener.accept()
        except OSError as error:
            raise ClusterprofError(f"rank {rank} has no neighbor: {error}") from None
        finally:
            listener.close()
        return cls(rank, before, after, len(ports), bytes_per_second)

    def all_reduce(self, values: NDArray[np.float32]) -> None:
        """Sum float32[n] over all ranks, in place; return when this rank has the whole sum.

        Raises: ClusterprofError when a neighbor is lost.
        """
        arrived_ns = time.monotonic_ns()
        try:
            self._reduce(values)
        except OSError as error:
            raise ClusterprofError(f"rank {self.rank} lost a neighbor: {error}") from None
        left_ns = time.monotonic_ns()
        self._spans.mark(len(self.operations), arrived_ns, left_ns, values.nbytes)
        self.operations.append((arrived_ns, left_ns))

    def _reduce(self, values: NDArray[np.float32]) -> None:
        parts = np.array_split(values, self.world)
        buffer = np.empty_like(parts[0])  # the first part is never the smaller one
        for turn in range(self.world - 1):
            own_part, next_part = self._turn(parts, self.rank - turn)
            incoming = buffer[: next_part.size]
            self._exchange(_get_byte_view(own_part), _get_byte_view(incoming))
            next_part += incoming
        for turn in range(self.world - 1):
            own_part, next_part = self._turn(parts, self.rank + 1 - turn)
            self._exchange(_get_byte_view(own_part), _get_byte_view(next_part))

    def find_last_arrivals(self) -> list[tuple[int, int]]:
        """Return (arrival of the last rank, that rank) for every all-reduce so far.

        Every rank must call this, after its last step. The ranks share one machine's clock.
        """
        arrivals = [arrived_ns for arrived_ns, _ in self.operations]
        latest = [(arrived_ns, self.rank) for arrived_ns in arrivals]
        message = struct.pack(f"<{len(arrivals)}q", *arrivals)
        for turn in range(1, self.world):
            incoming = bytearray(len(message))
            self._exchange(memoryview(message), memoryview(incoming))
            message = bytes(incoming)
            origin = (self.rank - turn) % self.world
            theirs = struct.unpack(f"<{len(arrivals)}q", message)
            latest = [max(arrival, (ns, origin)) for arrival, ns in zip(latest, theirs)]
        return latest

    def close(self) -> None:
        """Close the connections."""
        self._before.close()
        self._after.close()

    def _turn(
        self, parts: list[NDArray[np.float32]], number: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        return parts[number % self.world], parts[(number - 1) % self.world]

    def _exchange(self, outgoing: memoryview, incoming: memoryview) -> None:
        """Send one buffer to the next rank while receiving another from the previous one."""
        sent = received = 0
        began_ns = time.monotonic_ns()
        while sent < len(outgoing) or received < len(incoming):
            wait_ns = self._due_ns(began_ns, sent) if sent < len(outgoing) else SECOND_NS
            readers = [self._before] if received < len(incoming) else []
            writers = [self._after] if sent < len(outgoing) and wait_ns <= 0 else []
            timeout = (
                wait_ns / SECOND_NS if not writers and sent < len(outgoing) else PEER_TIMEOUT_S
            )
            readable, writable, _ = select.select(readers, writers, [], timeout)
            if not readable and not writable and timeout == PEER_TIMEOUT_S:
                raise ClusterprofError(f"rank {self.rank} waited {timeout:.0f} s for its neighbors")
            if readable:
                size = self._before.recv_into(incoming[received:])
                if not size:
                    raise ClusterprofError(f"rank {self.rank} lost the rank before it")
                received += size
            if writable:
                until = sent + SLICE_BYTES if self._rate else len(outgoing)
                sent += self._after.send(outgoing[sent:until])
        if self._rate:  # the last bytes take as long on a slow link as the others
            _wait_ns(self._due_ns(began_ns, sent))

    def _due_ns(self, began_ns: int, sent: int) -> int:
        """Return how long from now the link is busy with the bytes sent."""
        if not self._rate:
            return 0
        return began_ns + sent * SECOND_NS // self._rate - time.monotonic_ns()


class _CollectiveSpans:
    """Emits spans of all-reduces to the probe, if there is one, as the probe's hooks do."""

    def __init__(self, world: int) -> None:
        self._probe: Any = sys.modules.get(_PROBE_MODULE)
        self._group = 0
        if self._probe is None:
            return
        ring = self._probe.load()
        process_groups = __import__(
            f"{_PROBE_MODULE}.hooks.process_groups", fromlist=["compute_group_number"]
        )
        ranks = list(range(world))
        self._group = process_groups.compute_group_number(ranks)
        ring.register_group(self._group, ranks)

    def mark(self, number: int, arrived_ns: int, left_ns: int, size_bytes: int) -> None:
        if self._probe is not None:
            operation = layout.ALL_REDUCE | layout.BLOCKING << layout.FORM_SHIFT
            values = (self._group, number, size_bytes, operation)
            self._probe.emit(layout.COLLECTIVE, arrived_ns, left_ns, *values)


def _get_byte_view(values: NDArray[np.float32]) -> memoryview:
    return values.data.cast("B")


def _wait_ns(length_ns: int) -> None:
    if length_ns > 0:
        time.sleep(length_ns / SECOND_NS)
