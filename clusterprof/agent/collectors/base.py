"""The interface of collectors: open, sample, close.

The recorder, not the collector, handles failures, timing and storage. `open()` may
raise `Unavailable`: the collector is omitted and the reason recorded. A single value
that cannot be read is an `Unavailable` *in its place*, never a zero and never a gap.
`sample()` may raise `Unavailable` (no values in this tick), `NothingNew` (not read
since the last call) or `DevicesChanged` (open the collector again).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from clusterprof.agent.linux.files import MissingFile, OpenFile, Roots, read_all_files
from clusterprof.agent.linux.threads import SharedStatLines
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable
from clusterprof.signals import BY_NAME, Signal

Value = int | float | Unavailable


@dataclass(frozen=True, slots=True)
class Context:
    """The environment of a collector; every collector is built as `Class(context)`."""

    roots: Roots
    """Mount points of procfs and sysfs."""
    run_dir: Path | None
    """The run directory (docs/design/recording-format.md); None without a recording (doctor)."""
    job_pids: Callable[[], Sequence[int]]
    """Returns the registered processes of the job that are alive now."""
    readings: SharedStatLines = field(default_factory=SharedStatLines)
    """`stat` lines that collectors of one tick share, so that they are read only once."""


class Collector(Protocol):
    """One source of samples with a fixed set of columns between two calls of `open()`."""

    name: ClassVar[str]
    """File name, profile key and name in every message ("pressure")."""
    isolated: ClassVar[bool]
    """True when calls can hang or crash: the collector then runs in a helper process.

    A collector that keeps files of a device open in the recorder has `holds_device = True`, too:
    SIGUSR2 closes both kinds.
    """
    interval_ns: ClassVar[int]
    """Default sampling interval; a profile may change it."""

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open the source and return its columns: (signal, device) in the order of `sample()`."""
        ...

    def sample(self) -> Sequence[Value]:
        """Return one value per column, or in its place the reason why there is none."""
        ...

    def close(self) -> None:
        """Release the resources of `open()`; called once after every successful `open()`."""
        ...


class DeferredCollector:
    """A collector of the fast rate group, which only reads in a tick; `parse` runs later.

    After a sleep the processor's caches are cold, and an instruction costs several times as
    much as when repeated. The recorder therefore parses the readings of many ticks in one
    batch. `parse` may raise what `sample()` may, also DevicesChanged; readings are parsed
    in order, even if `open()` was called between them.
    """

    def read(self) -> Any:
        """Read the raw data of this tick with as few instructions as possible."""
        raise NotImplementedError

    def parse(self, reading: Any) -> Sequence[Any]:
        """Return the values that `sample()` would have returned at the time of the reading."""
        raise NotImplementedError

    def sample(self) -> Sequence[Any]:
        """Read and parse immediately."""
        return self.parse(self.read())

    def files(self) -> Sequence[OpenFile]:
        """Return the files that make up a reading; () while `read` does more than read files."""
        return ()


class FileCollector(DeferredCollector):
    """A collector whose reading is the content of its files, in order.

    The recorder reads the files of all such collectors in one loop (`agent.sampling.scheduler`)
    and calls `read` only where that fails: a file is gone, denied, or longer than before.
    """

    open_files: Sequence[OpenFile | MissingFile] = ()
    """Set by `open()`; a file that cannot be opened yields its reason in every reading."""

    def read(self) -> Sequence[bytes | Unavailable]:
        """Read all files."""
        return read_all_files(self.open_files)

    def files(self) -> Sequence[OpenFile]:
        """Return the files; () if one is missing, gone, or too long for a single read."""
        files = [
            file
            for file in self.open_files
            if isinstance(file, OpenFile) and file.single_read is not None
        ]
        return files if len(files) == len(self.open_files) else ()


class JobFileCollector(FileCollector):
    """A collector of the files of the job's cgroup; of our own cgroup until there is a job."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._pid: int | None = None

    def choose_pid(self) -> int | None:
        """Return the job's first process, None before there is one; `open()` calls this first."""
        pids = self._context.job_pids()
        self._pid = pids[0] if pids else None
        return self._pid

    def read(self) -> Sequence[bytes | Unavailable]:
        """Read all files.

        Raises: DevicesChanged when the job has started.
        """
        if self._pid is None and self._context.job_pids():
            raise DevicesChanged  # our own cgroup was only a substitute until there was a job
        return super().read()

    def files(self) -> Sequence[OpenFile]:
        """Return the files once they belong to the job; () before."""
        return () if self._pid is None else super().files()


class InProcessLibraryCollector:
    """An isolated collector's library, opened in this process instead of a helper process.

    A subclass implements `open_library(mark)`: it returns an object with `devices` (each
    with `sample()`: one value per signal, None = nothing new), `inventory`, `signals` and
    `close()`.
    """

    isolated: ClassVar[bool] = True

    def __init__(self, context: Context) -> None:
        self._library: Any = None

    def open_library(self, mark: Callable[[int, str], None]) -> Any:
        """Open the library; it may hang or crash with the driver.

        Raises: Unavailable when it cannot be opened.
        """
        raise NotImplementedError

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open the library in this process and return the columns.

        Raises: Unavailable when it cannot be opened.
        """
        self._library = self.open_library(lambda index, call: None)
        return [
            (BY_NAME[name], str(entry["id"]))
            for entry in self._library.inventory
            for name in self._library.signals
        ]

    def sample(self) -> Sequence[Value]:
        """Return the values of all devices.

        Raises: NothingNew when a device has no new values.
        """
        values: list[Value] = []
        for device in self._library.devices:
            device_values = device.sample()
            if device_values is None:
                raise NothingNew
            values += device_values
        return values

    def inventory(self) -> list[dict[str, Any]]:
        """Return the header entries of the devices."""
        return [] if self._library is None else list(self._library.inventory)

    def close(self) -> None:
        """Close the library."""
        if self._library is not None:
            self._library.close()
            self._library = None
