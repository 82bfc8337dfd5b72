"""A slow object store over HTTP: `object_server.py ADDRESS DELAY_NS JITTER RATE LOG`.

Answers HEAD and GET (with `Range: bytes=A-B`) of any path with made-up bytes of one object. Each
GET waits DELAY_NS, and up to JITTER of it more, then gets RATE bytes per second, as each other one
does (0 = no limit). Prints its port; ends when its standard input does. Standard library only.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time

OBJECT_BYTES = 64 << 20
_PIECE = 65_536
_MADE_UP = os.urandom(1 << 20)


class Store:
    """All connections of one store."""

    def __init__(self, delay_ns: int, jitter: float, rate: int, log: str) -> None:
        self.delay_ns, self.jitter, self.rate = delay_ns, jitter, rate
        self.log = open(log, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self.chance = random.Random(0)

    async def talk(self, asked: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        """Serve one connection until the other side closes it."""
        try:
            while True:
                head = (await asked.readuntil(b"\r\n\r\n")).decode("latin-1")
                start_ns = time.monotonic_ns()
                first, last = _wanted(head)
                if head.startswith("HEAD"):
                    answer.write(_headers("200 OK", OBJECT_BYTES))
                    continue
                delay_ns = self.delay_ns * (1 + self.jitter * self.chance.random())
                await asyncio.sleep(delay_ns / 1e9)
                answer.write(_headers("206 Partial Content", last + 1 - first))
                await self.send(answer, last + 1 - first)
                if delay_ns or self.rate:
                    line = {"start_ns": start_ns, "end_ns": time.monotonic_ns()}
                    self.log.write(json.dumps({**line, "cause": "storage-object"}) + "\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            answer.close()

    async def send(self, answer: asyncio.StreamWriter, left: int) -> None:
        """Send so many bytes at the rate of one request."""
        due_s = time.monotonic()
        while left:
            piece = min(left, _PIECE if self.rate else len(_MADE_UP))
            if self.rate:
                due_s += piece / self.rate
                await asyncio.sleep(due_s - time.monotonic())
            answer.write(_MADE_UP[:piece])
            await answer.drain()
            left -= piece


def _wanted(head: str) -> tuple[int, int]:
    for line in head.split("\r\n"):
        name, _, value = line.partition(":")
        if name.lower() == "range":
            first, _, last = value.strip().removeprefix("bytes=").partition("-")
            return int(first), min(int(last), OBJECT_BYTES - 1)
    return 0, OBJECT_BYTES - 1


def _headers(status: str, length: int) -> bytes:
    kept = "Connection: keep-alive\r\nAccept-Ranges: bytes"
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{kept}\r\n\r\n".encode()


async def serve(address: str, store: Store) -> None:
    """Listen until standard input ends."""
    server = await asyncio.start_server(store.talk, address, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    server.close()


if __name__ == "__main__":
    try:  # a busy node must not make the store slower than it was told to be
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    except OSError:
        pass
    where, delay, jitter, rate, log = sys.argv[1:]
    asyncio.run(serve(where, Store(int(delay), float(jitter), int(rate), log)))
    os._exit(0)  # connections that are still open are not waited for
