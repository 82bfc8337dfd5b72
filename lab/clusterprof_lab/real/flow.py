"""Traffic of another tenant: `flow.py take`, or `flow.py ADDRESS MBIT` sends MBIT a second."""

from __future__ import annotations

import socket
import sys
import time

PORT = 5100
BLOCK = bytes(16384)


def receive() -> None:
    """Receive and drop all data."""
    server = socket.create_server(("", PORT))
    while True:
        peer, _ = server.accept()
        while peer.recv(1 << 20):
            pass


def send(address: str, megabits: float) -> None:
    """Send at a steady rate, or as fast as the link allows."""
    while True:
        try:
            peer = socket.create_connection((address, PORT), timeout=1)
            break
        except OSError:
            time.sleep(0.1)
    peer.settimeout(None)
    block_s = len(BLOCK) * 8 / (megabits * 1e6)
    due = time.monotonic()
    while True:
        peer.sendall(BLOCK)
        due = max(due + block_s, time.monotonic() - 0.1)
        time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    if sys.argv[1] == "take":
        receive()
    else:
        send(sys.argv[1], float(sys.argv[2]))
