"""/sys/class/infiniband: traffic, errors, congestion and link of the ports of RDMA devices.

Documentation/ABI/stable/sysfs-class-infiniband; what drivers call their counters: `rdma_names`.

    mlx5_0/ports/1/state                    4: ACTIVE
    mlx5_0/ports/1/rate                     400 Gb/sec (4X NDR)
    mlx5_0/ports/1/counters/port_rcv_data   345091702026      data octets divided by 4

`counters` hold what the InfiniBand specification's performance management does: 64 bits of data,
but 32, 16 or 8 bits of the rest, and such a counter stops at its end instead of beginning anew. A
port without performance management says "N/A (no PMA)". Reading asks the card's firmware.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from clusterprof.errors import Unavailable, unavailable_from_os_error
from clusterprof.linux.rdma_names import ENDS, OPA, PLAIN, Dialect, Source
from clusterprof.linux.roots import Roots
from clusterprof.linux.task import Descriptors, TaskFile

DOWN, ACTIVE = 1, 4
PORTS_AT_MOST = 64
_RATE = re.compile(rb"([\d.]+) Gb/sec(?: \((\d+)X)?")
_BYTES_PER_GIGABIT = 125_000_000
_NOT_COUNTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_GONE = (errno.ENODEV, errno.ESTALE)
_OPA_NAMES = ("hfi1_", "opap")  # the driver's own, and those that udev's rules make of it


class Link(NamedTuple):
    """What a port says of its link."""

    state: int | Unavailable
    """1 DOWN, 2 INIT, 3 ARMED, 4 ACTIVE, 5 ACTIVE_DEFER."""
    bytes_per_second: int | Unavailable
    lanes: int | Unavailable


def ports(roots: Roots) -> list[tuple[str, str]]:
    """Return (device, port) of every port, in order; raises Unavailable without any device."""
    folder = roots.sys / "class/infiniband"
    try:
        devices = sorted(os.listdir(folder))
    except OSError as error:
        raise unavailable_from_os_error(error, str(folder)) from None
    found: list[tuple[str, str]] = []
    for device in devices:
        try:
            numbers = sorted(
                os.listdir(folder / device / "ports"), key=lambda name: (len(name), name)
            )
        except OSError:
            continue
        found += [(device, number) for number in numbers]
    return found[:PORTS_AT_MOST]


class Counters:
    """The counter files of one port, each opened once; what a driver does not count has a reason.

    Which files there are does not change while the port lives.
    """

    def __init__(
        self, name: str, places: Sequence[str], descriptors: Descriptors, dialect: Dialect = PLAIN
    ) -> None:
        """`places`: folders of files, the first that has a file of a name wins."""
        self.name = name
        self._descriptors = descriptors
        self._dialect = dialect
        self._paths: dict[str, str] = {}
        for place in places:
            for file in _entries(place):
                if file not in dialect.empty:
                    self._paths.setdefault(file, f"{place}/{file}")
        self._files: dict[str, TaskFile] = {}
        self._chosen: dict[Source, tuple[str, ...]] = {}
        self._counted: set[str] = set()  # files that gave a number: without one there is no sum
        self._settled: dict[tuple[Source, ...], tuple[Source]] = {}

    def value(self, *sources: Source) -> int | Unavailable:
        """Return the sum of the first source that gives a number, else why none does.

        What gave a number once is asked from then on: another count would not go on from it.
        """
        why: Unavailable | None = None
        for source in self._settled.get(sources, sources):
            value = self._sum(source)
            if not isinstance(value, Unavailable):
                self._settled[sources] = (source,)
                return value
            if why is None or why.kind == "absent":
                why = value
            if why.kind != "absent":
                break  # it is counted and cannot be told now
        assert why is not None
        return why

    def link(self) -> Link:
        """Return state, speed and width."""
        raise NotImplementedError

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    @staticmethod
    def parse(text: bytes) -> int:
        """Return the number in a counter's file; raises ValueError."""
        return int(text)

    def _sum(self, source: Source) -> int | Unavailable:
        names = self._chosen.get(source)
        if names is None:
            there = (tuple(n for n in group if n in self._paths) for group in source.groups)
            names = self._chosen[source] = next(filter(None, there), ())
        total, counted = 0, False
        why = Unavailable("absent", "the driver does not count it", "")
        for name in names:
            value = self._number(name)
            if not isinstance(value, Unavailable):
                total += value * self._dialect.factors.get(name, source.factor)
                counted = True
                self._counted.add(name)
            elif value.kind != "absent" or name in self._counted:
                return value  # one part is unknown, so the sum is
            else:
                why = value
        return total if counted else why

    def _number(self, name: str) -> int | Unavailable:
        try:
            text = self._text_of(name)
        except OSError as error:
            if error.errno in _NOT_COUNTED:
                return Unavailable("absent", "the driver does not count it", "")
            return unavailable_from_os_error(error, self._paths[name])
        try:
            value = self.parse(text)
        except ValueError:  # "N/A (no PMA)"
            return Unavailable("absent", f"{self.name} keeps no {name}", "")
        if value < 0:
            return Unavailable("failed", f"{name} of {self.name} is {value}: no count", "")
        if value == ENDS.get(name):
            message = f"{name} of {self.name} stands at its end, {value}, and counts no further"
            return Unavailable("failed", message, "reset it with perfquery -R")
        return value

    def _text_of(self, name: str) -> bytes:
        file = self._files.get(name)
        if file is not None:
            try:
                return file.read()
            except OSError as error:
                if error.errno not in _GONE:
                    raise
            file.close()  # the device went and came back under its name: its files are new ones
            del self._files[name]
        file = self._files[name] = TaskFile(self._paths[name], self._descriptors)
        return file.read()


class Port(Counters):
    """The files of one port: counters to be read often, the link rarely."""

    def __init__(self, roots: Roots, device: str, number: str, descriptors: Descriptors) -> None:
        """Open the files that are there."""
        top = f"{roots.sys}/class/infiniband/{device}"
        self._folder = f"{top}/ports/{number}"
        places = [f"{self._folder}/{kind}" for kind in ("counters", "hw_counters")]
        if len(list(_entries(f"{top}/ports"))) == 1:
            places.append(f"{top}/hw_counters")  # the device's are the port's; of two, of neither
        dialect = OPA if _is_omni_path(top, device) else PLAIN
        super().__init__(f"{device}/{number}", places, descriptors, dialect)

    def link(self) -> Link:
        """Return state, speed and width; the speed of a link that is not up means nothing."""
        try:
            state = int(self._text("state").split(b":", 1)[0])
        except OSError as error:
            why = unavailable_from_os_error(error, f"{self._folder}/state")
            return Link(why, why, why)
        except ValueError:
            why = Unavailable("failed", f"{self._folder}/state: not understood", "")
            return Link(why, why, why)
        if state != ACTIVE:
            down = Unavailable("absent", f"the link of {self.name} is not up", "")
            return Link(state, down, down)
        try:
            return Link(state, *parse_rate(self._text("rate")))
        except (OSError, ValueError):
            why = Unavailable("absent", f"the driver does not say the rate of {self.name}", "")
            return Link(state, why, why)

    def _text(self, name: str) -> bytes:
        with open(f"{self._folder}/{name}", "rb") as file:
            return file.read()


def parse_rate(text: bytes) -> tuple[int, int | Unavailable]:
    """Return bytes per second and lanes of a line as "200 Gb/sec (4X HDR)"; raises ValueError."""
    match = _RATE.match(text)
    if match is None:
        raise ValueError(text)
    lanes = int(match[2]) if match[2] else Unavailable("absent", "the driver says no width", "")
    return round(float(match[1]) * _BYTES_PER_GIGABIT), lanes


def _is_omni_path(top: str, device: str) -> bool:
    try:
        return os.path.basename(os.readlink(f"{top}/device/driver")) == "hfi1"
    except OSError:
        return device.startswith(_OPA_NAMES)


def _entries(folder: str) -> Iterable[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return ()
