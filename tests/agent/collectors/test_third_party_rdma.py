"""RDMA ports of the trees other projects test theirs on, against what those must print.

The trees are not ours to ship: they are read where they lie, beside the repository.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from clusterprof.agent.collectors.base import Value
from clusterprof.agent.collectors.rdma import RdmaCollector
from clusterprof.agent.linux.files import Roots
from clusterprof.errors import Unavailable
from tests.support.archives import unpack_archive
from tests.support.opened_collector import OpenedCollector

SHARED = Path(__file__).parents[3].parent / "shared/data"
pytestmark = pytest.mark.skipif(
    not SHARED.exists(), reason="the third-party fixture trees do not lie beside the repository"
)


def values(folder: Path, archive: str, sys: str) -> dict[tuple[str, str], Value]:
    unpack_archive(SHARED / archive, folder, "/infiniband/")
    return {
        (name.removeprefix("rdma."), device): value
        for name, device, value in OpenedCollector(
            RdmaCollector, Roots(folder, folder / sys)
        ).read_all()
    }


def test_rdma_port_values_equal_node_exporter(tmp_path: Path) -> None:
    ours = values(tmp_path, "node-exporter-fixtures/sys.tar.gz", "sys")
    expected = (SHARED / "node-exporter-fixtures/expected-e2e-output.txt.gz").read_bytes()
    text = gzip.decompress(expected).decode()
    pattern = r'^node_infiniband_(\w+)\{device="(\w+)",port="(\d)"\} (\S+)$'
    theirs = {
        (name, f"{device}/{port}"): float(value)
        for name, device, port, value in re.findall(pattern, text, re.MULTILINE)
    }
    names = {
        "port_data_received_bytes_total": "receive_bytes_total",
        "port_data_transmitted_bytes_total": "transmit_bytes_total",
        "port_discards_transmitted_total": "discards_total",
        "link_downed_total": "link_downed_total",
        "rate_bytes_per_second": "link_bytes_per_second",
        "state_id": "state_count",
    }
    compared = {key: value for key, value in theirs.items() if key[0] in names}
    assert len(compared) == 13
    # Omni-Path's driver hands on flits of eight octets; they count them as words of four.
    for (name, port), value in compared.items():
        double = 2 if port.startswith("hfi1") and "_data_" in name else 1
        assert ours[names[name], port] == double * value, (name, port)
    # Where they print the end of a counter of 32 bits, we know that we do not know.
    assert theirs["port_transmit_wait_total", "mlx4_0/1"] == 0xFFFFFFFF
    stopped = ours["transmit_wait_total", "mlx4_0/1"]
    assert isinstance(stopped, Unavailable) and stopped.kind == "failed"
    # "N/A (no PMA)": they print nothing, and so do we.
    missing = ours["receive_bytes_total", "i40iw0/1"]
    assert isinstance(missing, Unavailable) and missing.kind == "absent"


def test_rdma_port_values_equal_those_of_the_procfs_library(tmp_path: Path) -> None:
    ours = values(tmp_path, "procfs-fixtures/fixtures.tar.gz", "fixtures/sys")
    known = json.loads((SHARED / "procfs-fixtures/known.json").read_text())["infiniband_counters"]
    compared = 0
    for path, text in known.items():
        match = re.search(r"infiniband/(\w+)/ports/(\d)/counters/port_(rcv|xmit)_data$", path)
        if match and text.isdigit():
            name = "receive_bytes_total" if match[3] == "rcv" else "transmit_bytes_total"
            # Omni-Path's driver hands on flits of eight octets; they count them as words of four.
            octets = 8 if match[1].startswith("hfi1") else 4
            assert ours[name, f"{match[1]}/{match[2]}"] == octets * int(text), path
            compared += 1
    assert compared >= 8
    # The driver's own counters of the port of mlx5: NAKs, timeouts, implied NAKs, retransmissions.
    port = tmp_path / "fixtures/sys/class/infiniband/mlx5_0/ports/1/hw_counters"
    parts = ("packet_seq_err", "implied_nak_seq_err", "local_ack_timeout_err", "roce_adp_retrans")
    again = sum(int((port / part).read_text()) for part in parts)
    assert ours["retransmits_total", "mlx5_0/1"] == again
    sequence = int((port / "out_of_sequence").read_text())
    assert ours["out_of_sequence_total", "mlx5_0/1"] == sequence
