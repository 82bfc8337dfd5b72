"""A ring written by hand in the test's own process, as the probe writes it."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
from pathlib import Path

from clusterprof.agent.launch.identity import read_start_ticks
from clusterprof.agent.processes.span_rings import Ring, open_ring
from clusterprof.probe import layout
from clusterprof.trace.schema import Spans

NOW_NS = 10_000_000_000
PID = os.getpid()
TICKS = read_start_ticks("/proc", PID) or 0


class RingWriter:
    """A ring of our own, sealed against shrinking as the probe seals it."""

    def __init__(self, capacity: int = 8, seal: bool = True, log_bytes: int = 0) -> None:
        self.capacity = capacity
        self.log_begin = layout.RECORDS_OFFSET + capacity * layout.RECORD_BYTES
        size = self.log_begin + log_bytes
        self.fd = os.memfd_create("clusterprof-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        if seal:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.memory = mmap.mmap(self.fd, size)
        layout.HEADER.pack_into(
            self.memory, 0, layout.MAGIC, 64, capacity, PID, layout.NAMES_CAPACITY, TICKS, 0, 0
        )
        layout.COUNTER.pack_into(self.memory, layout.LOG_BYTES_OFFSET, log_bytes)
        self.written = 0

    def put(self, kind: int = layout.STEP, start: int = 1, end: int = 2, a: int = 0) -> None:
        self.written += 1
        self.read_slot(self.written, self.written, start, end, kind, a)
        self.set_counter(self.written)

    def read_slot(self, slot: int, *fields: int) -> None:
        values = (*fields, *(0,) * (8 - len(fields)))
        offset = layout.RECORDS_OFFSET + (slot - 1) % self.capacity * layout.RECORD_BYTES
        layout.RECORD.pack_into(self.memory, offset, *values)

    def set_counter(self, value: int) -> None:
        layout.COUNTER.pack_into(self.memory, layout.WRITTEN_OFFSET, value)

    def write_log(self, log: bytes, written: int | None = None) -> None:
        """Write the whole log; written: its committed length, None = that of `log`."""
        self.memory[self.log_begin : self.log_begin + len(log)] = log
        length = len(log) if written is None else written
        layout.COUNTER.pack_into(self.memory, layout.LOG_WRITTEN_OFFSET, length)

    def open(self) -> Ring:
        return open_ring(f"/proc/self/fd/{self.fd}", PID, TICKS, memory_file=True)

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)


def drain_ring(ring: Ring, looks: int = 2) -> list[Spans]:
    for _ in range(looks):
        ring.look()
    return ring.take(NOW_NS)


def list_sequences(spans: list[Spans]) -> list[int]:
    return [span.first_sequence + i for span in spans for i in range(len(span.columns["kind"]))]


def announce_ring(folder: Path, name: str, **content: object) -> None:
    (folder / name).write_text(json.dumps(content))
    (folder / name).chmod(0o600)
