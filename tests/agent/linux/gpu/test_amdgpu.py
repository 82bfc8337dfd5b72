"""The firmware's table, written here field by field as `kgd_pp_interface.h` declares it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from clusterprof.agent.linux.gpu.amdgpu import parse_metrics
from clusterprof.errors import Unavailable

U16, U32, U64 = ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64
HEADER = [("structure_size", U16), ("format_revision", ctypes.c_uint8), ("content", ctypes.c_uint8)]


def words(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Fields of one type; "name*8" is an array."""
    collected = []
    for word in names.split():
        name, _, count = word.partition("*")
        collected.append((name, kind * int(count) if count else kind))
    return collected


V1_1 = [
    *words(U16, "edge hotspot mem vrgfx vrsoc vrmem gfx umc mm watts"),
    *words(U64, "energy system_clock"),
    *words(U16, "a1 a2 a3 a4 a5 a6 a7 gfxclk socclk uclk vclk0 dclk0 vclk1 dclk1"),
    *words(U32, "throttle_status"),
    *words(U16, "fan width speed padding"),
    *words(U32, "gfx_acc mem_acc"),
    *words(U16, "hbm*4"),
]
V1_2 = [*V1_1, *words(U64, "firmware")]
V1_3 = [*V1_2, *words(U16, "soc_mv gfx_mv mem_mv padding1"), *words(U64, "indep")]
START = words(U16, "hotspot mem vrsoc watts gfx umc")
RESIDENCIES = words(U32, "cycles prochot ppt socket vr hbm_thermal")
LINKS = words(U16, "width speed xgmi_width xgmi_speed")
PCIE = words(U64, "pcie_acc pcie_inst l0 replays rollover")
NAKS = words(U32, "nak_sent nak_received")
XGMI = words(U64, "read*8 write*8")
CLOCKS = [*words(U64, "firmware"), *words(U16, "gfxclk*8 socclk*4 vclk*4 dclk*4 uclk")]
ACC = words(U32, "gfx_acc mem_acc")
ENERGY = words(U64, "energy system_clock")
V1_4 = [
    *START,
    *words(U16, "vcn*4"),
    *ENERGY,
    *words(U32, "throttle lock"),
    *LINKS,
    *ACC,
    *PCIE,
    *XGMI,
    *CLOCKS,
    *words(U16, "padding"),
]
V1_5 = [
    *START,
    *words(U16, "vcn*4 jpeg*32"),
    *ENERGY,
    *words(U32, "throttle lock"),
    *LINKS,
    *ACC,
    *PCIE,
    *NAKS,
    *XGMI,
    *CLOCKS,
    *words(U16, "padding"),
]
V1_6_OLD = [
    *START,
    *words(U16, "vcn*4 jpeg*32"),
    *ENERGY,
    *RESIDENCIES,
    *words(U32, "throttle lock"),
    *LINKS,
    *ACC,
    *PCIE,
    *NAKS,
    *XGMI,
    *CLOCKS,
    *words(U16, "padding"),
]


def partition(jpeg: int, more: str) -> Any:
    fields = [
        *words(U32, "inst*8"),
        *words(U16, f"jpeg*{jpeg} vcn*4"),
        *words(U64, "acc*8"),
        *words(U64, more),
    ]
    return type("Partition", (ctypes.Structure,), {"_fields_": fields})


def of_partitions(kind: Any) -> list[tuple[str, Any]]:
    return [*words(U16, "partitions"), ("xcp", kind * 8), *words(U32, "other_end")]


V1_6 = [
    *START,
    *ENERGY,
    *RESIDENCIES,
    *words(U32, "lock"),
    *LINKS,
    *ACC,
    *PCIE,
    *NAKS,
    *XGMI,
    *CLOCKS,
    *of_partitions(partition(32, "")),
]
SEVEN = [
    *START,
    *words(U64, "bandwidth"),
    *ENERGY,
    *RESIDENCIES,
    *words(U32, "lock"),
    *LINKS,
    *ACC,
    *PCIE,
    *NAKS,
    *XGMI,
    *words(U16, "states*8 padding"),
    *CLOCKS,
]
V1_7 = [*SEVEN, *of_partitions(partition(32, "below*8"))]
V1_8_SHORT = [*SEVEN, *of_partitions(partition(40, "ppt*8 thm*8 low*8"))]
V1_8 = [*SEVEN, *of_partitions(partition(40, "ppt*8 thm*8 low*8 total*8"))]
VERSIONS = {
    (1, 1, 96): V1_1,
    (1, 2, 104): V1_2,
    (1, 3, 120): V1_3,
    (1, 4, 288): V1_4,
    (1, 5, 360): V1_5,
    (1, 6, 384): V1_6_OLD,
    (1, 6, 1664): V1_6,
    (1, 7, 2208): V1_7,
    (1, 8, 3360): V1_8_SHORT,
    (1, 8, 3872): V1_8,
}


def table(form: int, content: int, size: int, **values: Any) -> Any:
    """A table in which only `values` are known."""
    kind = type(
        "Table", (ctypes.Structure,), {"_fields_": [*HEADER, *VERSIONS[form, content, size]]}
    )
    assert ctypes.sizeof(kind) == size
    made = kind.from_buffer_copy(b"\xff" * size)
    made.structure_size, made.format_revision, made.content = size, form, content
    for name, value in values.items():
        field = getattr(made, name)
        if isinstance(value, tuple):
            for index, item in enumerate(value):
                field[index] = item
        else:
            setattr(made, name, value)
    return made


@pytest.mark.parametrize("version", VERSIONS, ids=str)
def test_each_metrics_table_version_is_parsed(version: tuple[int, int, int]) -> None:
    names = {name for name, _ in VERSIONS[version]}
    by_key = {
        "hotspot": 61,
        "watts": 612,
        "gfx": 87,
        "umc": 33,
        "energy": 65536,
        "gfx_acc": 5,
        "cycles": 1000,
        "prochot": 1,
        "ppt": 2,
        "socket": 3,
        "vr": 4,
        "hbm_thermal": 6,
        "replays": 7,
        "uclk": 1300,
        "indep": 1 << 32,
    }
    by_key = {name: value for name, value in by_key.items() if name in names}
    several = version[1] >= 4
    lists = {"read": (1, 2, 3), "write": (10, 20), "gfxclk": (2100, 1900)} if several else {}
    made = table(*version, **by_key, **(lists or {"gfxclk": 1410}))
    metrics = parse_metrics(bytes(made))
    expected = {
        "temperature": 61,
        "gfx_percent": 87,
        "memory_percent": 33,
        "watts": 612,
        "memory_mhz": 1300,
    }
    if version[1] == 3:
        expected["throttle"] = 1 << 32
    if several:
        expected |= {"energy": 65536, "gfx_acc": 5, "replays": 7}
    if "cycles" in names:
        expected |= {
            "cycles": 1000,
            "prochot": 1,
            "power": 2,
            "socket_thermal": 3,
            "vr_thermal": 4,
            "memory_thermal": 6,
        }
    assert (metrics.version, metrics.values) == (f"1.{version[1]}", expected)
    assert metrics.clocks_mhz == ((2100, 1900) if several else (1410,))
    assert (metrics.xgmi_read, metrics.xgmi_write) == ((6, 30) if several else (None, None))
    assert metrics.partition_busy == ()


@pytest.mark.parametrize("version", [v for v in VERSIONS if v[2] > 1000], ids=str)
def test_partition_busy_time_is_the_mean_of_compute_dies(version: tuple[int, int, int]) -> None:
    made = table(*version, partitions=2)
    for place, (inst, acc) in enumerate([((90, 80), (1000, 3000)), ((), (7,))]):
        for die, value in enumerate(inst):
            made.xcp[place].inst[die] = value
        for die, value in enumerate(acc):
            made.xcp[place].acc[die] = value
    assert parse_metrics(bytes(made)).partition_busy == ((85, 2000), (None, 7))


def test_unreported_fields_have_no_value() -> None:
    metrics = parse_metrics(bytes(table(1, 7, 2208)))
    assert (metrics.values, metrics.clocks_mhz) == ({}, ())
    assert (metrics.xgmi_read, metrics.xgmi_write) == (None, None)


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (b"", "failed", "gpu_metrics: 0 bytes are too few for a table"),
        (b"\x10\0\2\4" + b"\0" * 12, "absent", "gpu_metrics v2.4 of 16 bytes is not supported"),
        (b"\x08\0\1\x09\0\0\0\0", "absent", "gpu_metrics v1.9 of 8 bytes is not supported"),
        (bytes(table(1, 7, 2208))[:100], "failed", "gpu_metrics: 100 bytes of 2208"),
    ],
)
def test_missing_and_unknown_metrics_tables_are_reasons(
    data: bytes, kind: str, message: str
) -> None:
    with pytest.raises(Unavailable) as raised:
        parse_metrics(data)
    assert (raised.value.kind, raised.value.message) == (kind, message)
