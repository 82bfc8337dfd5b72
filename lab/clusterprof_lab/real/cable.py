"""The network between nodes: one process that carries Ethernet frames between TAP interfaces.

`cable.c` does it, at real-time priority where that is allowed, so that a busy node does not slow
the network down. The nodes' own TCP runs over it: round trips, retransmissions and backpressure
are real. Segmentation offload is off, else a loss would take whole 64 KiB super-frames.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from clusterprof_lab.real.node import NETWORK, Node

SOURCE = Path(__file__).with_name("cable.c")
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000


@dataclass(frozen=True, slots=True)
class Link:
    """What one node's link does to each frame, up and down alike."""

    rate_bits_per_second: int = 0
    """0 = as fast as the machine can."""
    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Up to this much more, evenly distributed; frames stay in order."""
    loss_ratio: float = 0.0
    queue_bytes: int = 1 << 20
    """What waits for its turn beyond this is dropped; only with a rate."""


def build_cable(folder: Path) -> Path:
    """Compile the cable into `folder`; return the program."""
    program = folder / "cable"
    command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(program), str(SOURCE)]
    subprocess.run(command, check=True)
    return program


class Cable:
    """Connects nodes; a context manager, and gone when this process is, however it ends."""

    def __init__(self, program: Path, nodes: Sequence[Node], mtu_bytes: int = 1500) -> None:
        taps = [_open_tap(f"cable{os.getpid()}n{node.index}") for node in nodes]
        try:
            self._process = subprocess.Popen(
                [str(program), *map(str, taps)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=taps,
                text=True,
            )
            for node in nodes:
                _attach_interface(f"cable{os.getpid()}n{node.index}", node, mtu_bytes)
        finally:
            for tap in taps:
                os.close(tap)  # the cable holds them now: they vanish with it

    def set_link(self, port: int, link: Link) -> None:
        """Set the limits of a node's link from now on."""
        loss_per_million = round(link.loss_ratio * 1_000_000)
        delay_ns, jitter_ns = round(link.delay_s * 1e9), round(link.jitter_s * 1e9)
        values = (link.rate_bits_per_second, delay_ns, jitter_ns, loss_per_million)
        self._order(f"set {port} {' '.join(map(str, values))} {link.queue_bytes}")

    def set_downlink_rate(self, port: int, rate_bits_per_second: int) -> None:
        """Limit the direction towards a node to another rate than its link; 0 = the link's."""
        self._order(f"down {port} {rate_bits_per_second}")

    def read_counts(self) -> dict[str, Any]:
        """Return what went through each port, up and down: frames, bytes, lost, overflowed."""
        self._order("count")
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """Cut the cable; the nodes' interfaces disappear."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _order(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def __enter__(self) -> Cable:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _open_tap(name: str) -> int:
    """Return the descriptor of a new TAP interface, which lives as long as the descriptor."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    fcntl.ioctl(tap, _TUNSETOFFLOAD, 0)
    return tap


def _attach_interface(tap: str, node: Node, mtu_bytes: int) -> None:
    move = ["ip", "link", "set", "dev", tap, "netns", str(node.pid), "name", "eth0"]
    subprocess.run(move, check=True)
    node.run(
        "ip", "address", "add", f"{node.address}/24", "broadcast", f"{NETWORK}.255", "dev", "eth0"
    )
    node.run("ip", "link", "set", "dev", "eth0", "mtu", str(mtu_bytes), "up")
