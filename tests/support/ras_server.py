"""A server on this machine that speaks the protocol of NCCL's RAS service.

It answers as src/ras/client_support.cc of NCCL does: every line gets an answer in order, and the
connection is closed after the status.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

STATUS: dict[str, Any] = {"nccl_version": "2.28.9", "communicators_count": 0, "communicators": []}


class RasServer:
    """Speaks the protocol of ncclras on a port of its own."""

    def __init__(
        self,
        has_json: bool = True,
        answer: Callable[[], bytes] | None = None,
        status: dict[str, Any] = STATUS,
    ) -> None:
        self.lines: list[str] = []
        self._status = status
        self._has_json, self._answer = has_json, answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"localhost:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection, connection.makefile("rb") as lines:
            for line in lines:
                self.lines.append(line.decode().rstrip("\n"))
                if self.lines[-1] == "VERBOSE STATUS":
                    break
                connection.sendall(self._reply(self.lines[-1]))
            if self._answer is not None:
                connection.sendall(self._answer())
            elif self._has_json:
                connection.sendall(json.dumps(self._status).encode())
            else:
                connection.sendall(b"NCCL version 2.27.3\n\nErrors\n======\n\n")

    def _reply(self, line: str) -> bytes:
        if line.startswith("CLIENT PROTOCOL"):
            return b"SERVER PROTOCOL 2\n"
        if line.startswith("TIMEOUT") or (line == "SET FORMAT json" and self._has_json):
            return b"OK\n"
        return b"ERROR: Unknown command %s\n" % line.encode()
