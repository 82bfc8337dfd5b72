"""`nvidia-smi --query-gpu=… --format=csv`: one row per GPU and sweep, heads in the first line.

timestamp, index, utilization.gpu [%], memory.used [MiB], power.draw [W]
2026/01/06 15:13:03.389, 0, 97 %, 71234 MiB, 612.40 W
"""

from __future__ import annotations

from clusterprof.importers.base import Source
from clusterprof.importers.nvidia_smi.names import QUERY
from clusterprof.importers.nvidia_smi.readings import Devices, quantity
from clusterprof.importers.telemetry.gathered import Meaning
from clusterprof.importers.telemetry.lines import lines_of
from clusterprof.importers.telemetry.times import time_ns

_SAME_SWEEP_NS = 100_000_000
_WHO = ("uuid", "gpu_uuid", "index", "pci.bus_id", "gpu_bus_id")
_MORE = ("timestamp", "name", "gpu_name", *_WHO)


def heads_of(line: bytes) -> list[str] | None:
    """Return the names of the columns without units; None for no such table."""
    if len(line) > 1 << 14:
        return None
    heads = [head.split("[")[0].strip().lower() for head in line.decode("latin-1").split(",")]
    fields = sum(head in QUERY for head in heads)
    return heads if fields and fields + sum(head in _MORE for head in heads) >= 2 else None


def read_query(source: Source, devices: Devices) -> None:
    """Read all rows."""
    account = devices.account
    heads: list[str] | None = None
    last_ns = 0
    position = 0
    for line in lines_of(source, account):
        if not line.strip():
            continue
        found = heads_of(line)
        if found is not None:  # again, in files that were put together
            heads = found
            continue
        cells = line.decode("utf-8", "replace").split(",")
        if heads is None or len(cells) != len(heads):
            account.skipped["rows with more or fewer columns than the first line"] += 1
            continue
        row = {head: cell.strip() for head, cell in zip(heads, cells)}
        zoned, t_ns = False, None
        if "timestamp" in row:
            said = time_ns(row["timestamp"])
            if said is None:
                account.skipped["rows with an impossible time"] += 1
                continue
            t_ns, zoned = said
        who = next((row[one] for one in _WHO if row.get(one)), "")
        if not who:
            position = position + 1 if t_ns is not None and t_ns - last_ns < _SAME_SWEEP_NS else 0
            who = str(position)
        last_ns = t_ns or 0
        devices.next_in_sweep(who)
        values: dict[Meaning, float] = {
            QUERY[head]: quantity(cell) for head, cell in row.items() if head in QUERY
        }
        name = row.get("name", "") or row.get("gpu_name", "")
        devices.row(
            f"gpu{who}" if who.isdecimal() else who,
            devices.sweep_ns() if t_ns is None else t_ns, values, zoned, name=name,
            uuid=row.get("uuid", "") or row.get("gpu_uuid", ""),
        )  # fmt: skip
