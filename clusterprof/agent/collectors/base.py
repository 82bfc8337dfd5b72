"""What a collector is: opens, samples, closes. Nothing else is asked of it.

The recorder, not the collector, handles failure, time and storage. `open()` may raise
`Unavailable` (the collector is left out and the reason recorded); a single value that cannot be
read is an `Unavailable` *in its place*, never a zero, never a hole; `sample()` may raise
`Unavailable` (nothing of this tick), `NothingNew` (not read since the last one) or
`DevicesChanged` (open me again).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from clusterprof.errors import DevicesChanged, NothingNew, Unavailable
from clusterprof.linux.held import HeldFile, MissingFile, read_all
from clusterprof.linux.roots import Roots
from clusterprof.linux.task import Readings
from clusterprof.signals import BY_NAME, Signal

Value = int | float | Unavailable


@dataclass(frozen=True, slots=True)
class Context:
    """What a collector may know of the world; every collector is built as `Class(context)`."""

    roots: Roots
    """Where /proc and /sys are."""
    run_dir: Path | None
    """The run directory (docs/design.md, section 3); None when only looking, as doctor does."""
    job_pids: Callable[[], Sequence[int]]
    """Returns the registered processes of the job that live now."""
    readings: Readings = field(default_factory=Readings)
    """What collectors of the same tick need not read twice."""


class Collector(Protocol):
    """One source of samples with a fixed set of columns between two `open()`s."""

    name: ClassVar[str]
    """File name, profile key and word in every message ("pressure")."""
    isolated: ClassVar[bool]
    """True when calls can hang or crash: it then runs in an abandonable helper process."""
    interval_ns: ClassVar[int]
    """Default sampling interval; a profile may change it."""

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open the source and return its columns: (signal, device) in the order of `sample()`."""
        ...

    def sample(self) -> Sequence[Value]:
        """Return one value per column, or in its place why there is none."""
        ...

    def close(self) -> None:
        """Release what `open()` took; called once after every successful `open()`."""
        ...


class TableCollector(Protocol):
    """One source of samples whose rows come and go (threads of the job)."""

    name: ClassVar[str]
    isolated: ClassVar[bool]
    interval_ns: ClassVar[int]

    def open(self) -> Sequence[str]:
        """Open the source and return the names of the int64 columns of each row."""
        ...

    def sample(self) -> Sequence[Sequence[int]]:
        """Return the rows of this tick; -1 where a value is not available."""
        ...

    def strings(self) -> dict[str, Sequence[str]]:
        """Return for each column of indices the strings seen so far."""
        ...

    def close(self) -> None:
        """Release what `open()` took."""
        ...


class ReadFirst:
    """A collector of the fast tier, which only reads at a tick; `parse` understands it later.

    After a sleep nothing is in the processor's caches, and an instruction costs several times what
    it costs again: so the recorder parses the readings of many ticks at once, when it hands them
    over. `parse` may raise what `sample()` may, DevicesChanged too; readings come in their order,
    also after `open()` was called once more between them.
    """

    def read(self) -> Any:
        """Take what there is to read now, in as few instructions as will do."""
        raise NotImplementedError

    def parse(self, reading: Any) -> Sequence[Any]:
        """Return what `sample()` would have returned when it was read."""
        raise NotImplementedError

    def sample(self) -> Sequence[Any]:
        """Read and understand at once."""
        return self.parse(self.read())

    def files(self) -> Sequence[HeldFile]:
        """Return the files that a reading consists of; () while `read` has more to do than read."""
        return ()


class ReadsFiles(ReadFirst):
    """A collector whose reading is what stands in its files, one after the other.

    The recorder reads the files of all these in one loop (`recorder/sweep`) and asks `read` only
    where that fails: where a file has gone, is denied, or is longer than it was.
    """

    held: Sequence[HeldFile | MissingFile] = ()
    """Set by `open()`; what cannot be opened has its reason in every reading."""

    def read(self) -> Sequence[bytes | Unavailable]:
        """Read all files."""
        return read_all(self.held)

    def files(self) -> Sequence[HeldFile]:
        """Return the files, unless one is missing, has gone, or is too long for one call."""
        found = [one for one in self.held if isinstance(one, HeldFile) and one.once is not None]
        return found if len(found) == len(self.held) else ()


class ReadsFilesOfJob(ReadsFiles):
    """A collector whose files are those of the job's cgroup: of our own until there is a job."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._pid: int | None = None

    def choose_pid(self) -> int | None:
        """Return the job's first process, None before there is one; `open()` begins with it."""
        pids = self._context.job_pids()
        self._pid = pids[0] if pids else None
        return self._pid

    def read(self) -> Sequence[bytes | Unavailable]:
        """Read all files; raises DevicesChanged when the job has come."""
        if self._pid is None and self._context.job_pids():
            raise DevicesChanged  # our own cgroup was only the guess before there was a job
        return super().read()

    def files(self) -> Sequence[HeldFile]:
        """Return the files, once they are those of the job."""
        return () if self._pid is None else super().files()


class OpenedHere:
    """An isolated collector's library, opened in this process; the recorder opens it in a helper.

    A subclass says how: `library(mark)` returns an object with `devices` (each with `sample()`:
    one value per signal, None = nothing new), `inventory`, `signals` and `close()`.
    """

    isolated: ClassVar[bool] = True

    def __init__(self, context: Context) -> None:
        self._library: Any = None

    def library(self, mark: Callable[[int, str], None]) -> Any:
        """Open the library; raises Unavailable, and may hang or crash with the driver."""
        raise NotImplementedError

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open the library in this process; raises Unavailable."""
        self._library = self.library(lambda index, call: None)
        return [
            (BY_NAME[name], str(entry["id"]))
            for entry in self._library.inventory
            for name in self._library.signals
        ]

    def sample(self) -> Sequence[Value]:
        """Return the values of all devices; raises NothingNew when one has none."""
        values: list[Value] = []
        for device in self._library.devices:
            taken = device.sample()
            if taken is None:
                raise NothingNew
            values += taken
        return values

    def inventory(self) -> list[dict[str, Any]]:
        """Return for the header what each device is."""
        return [] if self._library is None else list(self._library.inventory)

    def close(self) -> None:
        """Close the library."""
        if self._library is not None:
            self._library.close()
            self._library = None
