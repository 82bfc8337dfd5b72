"""gpu_metrics: the binary table in which amdgpu's firmware says how a device is.

drivers/gpu/drm/amd/include/kgd_pp_interface.h defines it (struct gpu_metrics_v1_1 … v1_8), in the
machine's byte order, each field aligned to its size. Its first four bytes are its size and version:

    u16 structure_size, u8 format_revision, u8 content_revision

The versions are no extensions of each other, so each has a layout of its own here: v1.1 to v1.3
(MI100, MI200, Radeon), v1.4 to v1.8 (MI300, MI325, MI350). v2 and v3 are of APUs and leave units
open, v1.9 has no fixed layout: these are not read. The driver fills what the firmware does not
tell with ones, which is "not told" and no number.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from clusterprof.errors import Unavailable

HEADER_BYTES = 4
JOULES_PER_UNIT = 2.0**-16
"""Of `energy`, in v1.4 and later; the header says 15.259 µJ."""
XGMI_UNIT_BYTES = 1024
PARTITIONS, PER_PARTITION = 8, 8
_ENDS = {"H": 0xFFFF, "I": 0xFFFFFFFF, "Q": 0xFFFFFFFFFFFFFFFF}


class Layout(NamedTuple):
    """Where the fields of one version are: name -> (offset, type, how many)."""

    fields: dict[str, tuple[int, str, int]]
    partition: tuple[int, int, int] | None = None
    """Of the partitions' statistics: offset, bytes of each, and offset of `gfx_busy_acc` in it."""


class Metrics(NamedTuple):
    """One table as numbers; a field that is missing or not told is not in it."""

    version: str
    """ "1.7"."""
    values: dict[str, int]
    clocks_mhz: tuple[int, ...]
    """Of the compute dies that tell one."""
    xgmi_read: int | None
    """Sum over the links, in units of 1,024 bytes."""
    xgmi_write: int | None
    partition_busy: tuple[tuple[int | None, int | None], ...]
    """Per partition: (percent now, sum of percent so far), each the mean over its compute dies."""


_V1_1 = {
    "temperature": (6, "H", 1),
    "gfx_percent": (16, "H", 1),
    "memory_percent": (18, "H", 1),
    "watts": (22, "H", 1),
    "clocks": (54, "H", 1),
    "memory_mhz": (58, "H", 1),
}


def _v1_4(energy: int, counter: bool) -> dict[str, tuple[int, str, int]]:
    """Lay out the fields of v1.4 to v1.6: alike behind the energy, but for what v1.6 inserts."""
    at = energy + 16
    fields = {
        "temperature": (4, "H", 1),
        "watts": (10, "H", 1),
        "gfx_percent": (12, "H", 1),
        "memory_percent": (14, "H", 1),
        "energy": (energy, "Q", 1),
    }
    if counter:
        names = ("cycles", "prochot", "power", "socket_thermal", "vr_thermal", "memory_thermal")
        fields |= {name: (at + 4 * i, "I", 1) for i, name in enumerate(names)}
        at += 24
    return fields | {"link": (at, "I", 0)}


def _behind(fields: dict[str, tuple[int, str, int]], link: int, gap: int = 0, naks: bool = True,
            ) -> dict[str, tuple[int, str, int]]:  # fmt: skip
    """Add the fields from the PCIe link on. `gap`: bytes between the XGMI sums and the clocks."""
    gfx = link + 8
    pcie = (gfx + 8 + 7) // 8 * 8
    read = pcie + 40 + (8 if naks else 0)
    clocks = read + 128 + gap + 8
    fields = {name: place for name, place in fields.items() if name != "link"}
    return fields | {
        "gfx_acc": (gfx, "I", 1),
        "replays": (pcie + 24, "Q", 1),
        "xgmi_read": (read, "Q", 8),
        "xgmi_write": (read + 64, "Q", 8),
        "clocks": (clocks, "H", 8),
        "memory_mhz": (clocks + 40, "H", 1),
        "partitions": (clocks + 42, "H", 1),
    }


def _layouts() -> dict[tuple[int, int, int], Layout]:
    """Return the layouts by format, content and size; the size tells two forms of one version."""
    v1_3 = Layout({**_V1_1, "throttle": (112, "Q", 1)})
    found = {(1, 1, 96): Layout(_V1_1), (1, 2, 104): Layout(_V1_1), (1, 3, 120): v1_3}
    four = _v1_4(24, counter=False)
    found[1, 4, 288] = _without_partitions(_behind(four, 48, naks=False))
    five = _v1_4(88, counter=False)
    found[1, 5, 360] = _without_partitions(_behind(five, 112))
    old_six = _v1_4(88, counter=True)  # as in Linux 6.11, with a word of throttle status
    found[1, 6, 384] = _without_partitions(_behind(old_six, 136))
    six = _v1_4(16, counter=True)
    found[1, 6, 1664] = Layout(_behind(six, 60), (312, 168, 104))
    # v1.7 has 8 bytes of bandwidth before the energy, and the links' states before the clocks.
    seven = _v1_4(24, counter=True)
    found[1, 7, 2208] = Layout(_behind(seven, 68, gap=24), (344, 232, 104))
    eight = _behind(seven, 68, gap=24)
    found[1, 8, 3360] = Layout(eight, (344, 376, 120))  # without the sum of all limits
    found[1, 8, 3872] = Layout(eight, (344, 440, 120))
    return found


def _without_partitions(fields: dict[str, tuple[int, str, int]]) -> Layout:
    return Layout({name: place for name, place in fields.items() if name != "partitions"})


LAYOUTS = _layouts()


def parse_metrics(data: bytes) -> Metrics:
    """Parse one table; raises Unavailable when it is none, or of a version not known here."""
    if len(data) < HEADER_BYTES:
        raise Unavailable("failed", f"gpu_metrics: {len(data)} bytes are no table")
    size, form, content = struct.unpack_from("=HBB", data)
    layout = LAYOUTS.get((form, content, size))
    if layout is None:
        message = f"gpu_metrics v{form}.{content} of {size} bytes is not known here"
        raise Unavailable("absent", message, "a newer clusterprof may know it")
    if len(data) < size:
        raise Unavailable("failed", f"gpu_metrics: {len(data)} bytes of {size}")
    read = {name: _read(data, *place) for name, place in layout.fields.items()}
    lists = ("clocks", "xgmi_read", "xgmi_write")
    values = {name: told[0] for name, told in read.items() if told and name not in lists}
    return Metrics(
        f"{form}.{content}",
        values,
        tuple(read["clocks"]),
        sum(read["xgmi_read"]) if read.get("xgmi_read") else None,
        sum(read["xgmi_write"]) if read.get("xgmi_write") else None,
        _partitions(data, layout, values.get("partitions", 0)),
    )


def _read(data: bytes, offset: int, kind: str, count: int) -> list[int]:
    """Return the numbers that are told; [] when none is."""
    numbers = struct.unpack_from(f"={count}{kind}", data, offset)
    return [value for value in numbers if value != _ENDS[kind]]


def _partitions(
    data: bytes, layout: Layout, count: int
) -> tuple[tuple[int | None, int | None], ...]:
    if layout.partition is None:
        return ()
    first, size, sums = layout.partition
    found = []
    for number in range(min(count, PARTITIONS)):
        at = first + number * size
        percents = _read(data, at, "I", PER_PARTITION)
        totals = _read(data, at + sums, "Q", PER_PARTITION)
        found.append(
            (
                sum(percents) // len(percents) if percents else None,
                sum(totals) // len(totals) if totals else None,
            )
        )
    return tuple(found)
