"""/proc/pressure/{cpu,io,memory} and the cgroup's *.pressure: time lost to waiting, in µs.

https://docs.kernel.org/accounting/psi.html

    some avg10=0.06 avg60=0.21 avg300=0.99 total=8537362
    full avg10=0.00 avg60=0.13 avg300=0.96 total=8183134

`total` is an integral kept by the scheduler: exact, however seldom it is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from clusterprof.errors import Unavailable
from clusterprof.linux.held import HeldFile, MissingFile, hold

REMEDY = "needs Linux 4.20 or later with CONFIG_PSI=y, and psi=1 where the kernel defaults to off"


class Pressure(NamedTuple):
    """Time since boot in which tasks waited for one resource."""

    some_ns: int
    """At least one task waited."""
    full_ns: int | None
    """Every non-idle task waited; None where the file has no such line (cpu, before 5.13)."""


def hold_pressure(folder: Path, name: str) -> HeldFile | MissingFile:
    """Open a pressure file and read it once, since a switched-off PSI shows only on reading."""
    held = hold(folder / name, REMEDY)
    try:
        held.read()
    except Unavailable as reason:
        held.close()
        return MissingFile(reason)
    return held


def parse_pressure(data: bytes) -> Pressure:
    """Return the totals of a pressure file."""
    if not data.startswith(b"some"):
        raise ValueError(f"a pressure file that does not begin with 'some': {data[:80]!r}")
    some = data.index(b"total=") + 6
    full = data.rindex(b"total=") + 6
    end = data.find(b"\n", some)
    return Pressure(
        int(data[some:] if end < 0 else data[some:end]) * 1_000,
        None if full == some else int(data[full:]) * 1_000,
    )
