"""What the network adapters of a node carried, as far as a profile has it."""

from __future__ import annotations

import re

import numpy as np

from clusterprof.importers.base import Account
from clusterprof.importers.device_gaps import Int
from clusterprof.importers.nsys.database import DamagedError, Database
from clusterprof.importers.tables import NodeTables

_UNIT = re.compile(r"(?:b|bytes?)\s*/\s*(s|sec|second|ms|us|ns)", re.IGNORECASE)
_NS = {"s": 1e9, "sec": 1e9, "second": 1e9, "ms": 1e6, "us": 1e3, "ns": 1.0}
_NAMES = {
    "ib: bytes sent": "rdma.transmit_bytes_total",
    "ib: bytes received": "rdma.receive_bytes_total",
    "bytes sent": "network.transmit_bytes_total",
    "bytes received": "network.receive_bytes_total",
    "eth: bytes sent": "network.transmit_bytes_total",
    "eth: bytes received": "network.receive_bytes_total",
}
_COLUMNS = ("start", "end", "globalId", "metricsListId", "metricsIdx", "value")


def add_adapters(node: NodeTables, db: Database, account: Account) -> None:
    """Add the bytes that network adapters sent and received.

    Only metrics whose unit the file names as bytes in a time are understood.
    """
    try:
        known = _known(db, account)
        adapters = _adapters(db)
        rows: dict[tuple[str, str], list[tuple[int, int, float]]] = {}
        for some in db.rows("NET_NIC_METRIC", _COLUMNS) if known else ():
            for start, end, adapter, of, number, value in some:
                told = known.get((of, number))
                good = type(start) is type(end) is int and 0 <= start < end < 1 << 62
                if told is None or not good or not isinstance(value, (int, float)):
                    continue
                name = adapters.get(adapter, f"nic{adapter}")
                if 0 <= value < float(1 << 50):
                    carried = value * (end - start) / told[1]
                    rows.setdefault((told[0], name), []).append((start, end, carried))
    except DamagedError as error:
        account.cut = account.cut or f"NET_NIC_METRIC: {error}"
        return
    for (signal, name), some_rows in rows.items():
        some_rows.sort()
        t_ns: Int = np.array([some_rows[0][0], *(row[1] for row in some_rows)], np.int64)
        total = np.concatenate([[0.0], np.cumsum([row[2] for row in some_rows])])
        t_ns, first = np.unique(t_ns, return_index=True)
        node.series(signal, name, t_ns, np.rint(total[first]).astype(np.int64))
        account.read["readings of network adapters"] += len(some_rows)


def _known(db: Database, account: Account) -> dict[tuple[int, int], tuple[str, float]]:
    """Signal and ns in the unit's time, by list and place of a metric."""
    found = {}
    columns = ("metricsListId", "metricsIdx", "name", "unit")
    for rows in db.rows("TARGET_INFO_NETWORK_METRICS", columns):
        for of, number, name, unit in rows:
            signal = _NAMES.get(str(name).strip().lower())
            told = _UNIT.fullmatch(str(unit).strip())
            if signal and told:
                found[of, number] = (signal, _NS[told[1].lower()])
            elif signal:
                account.skipped[f'network metrics in the unit "{str(unit)[:20]}"'] += 1
    return found


def _adapters(db: Database) -> dict[int, str]:
    """Names of adapters by the id that metrics carry."""
    names = {nic: str(name) for rows in db.rows("TARGET_INFO_NIC_INFO", ("nicId", "name"))
             for nic, name in rows}  # fmt: skip
    return {one: names[nic] for rows in db.rows("NIC_ID_MAP", ("nicId", "globalId"))
            for nic, one in rows if nic in names}  # fmt: skip
