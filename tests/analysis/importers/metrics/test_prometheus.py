"""Scrapes and answers of Prometheus: values in our units, by host and device; all by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.base import CannotImportError
from clusterprof.analysis.importers.metrics.prometheus import Prometheus
from clusterprof.analysis.pipeline import analyze
from tests.support.metric_imports import SHARED, ImportedNode, import_files

S = 1_000_000_000
T = 1_711_034_567


def gathered(folder: Path, **files: bytes) -> dict[str, ImportedNode]:
    """The nodes by name."""
    return {item.name: item for item in import_files(Prometheus(), folder, **files)[0]}


def test_a_scrape_with_times_becomes_series_in_standard_units(tmp_path: Path) -> None:
    text = b"""# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",modelName="NVIDIA H100",Hostname="n1"} 97 1711034567000
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",modelName="NVIDIA H100",Hostname="n1"} 50 1711034582000
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a",Hostname="n1"} 2 1711034567000
DCGM_FI_DEV_SM_CLOCK{gpu="0",UUID="GPU-a",Hostname="n1"} 1980 1711034567000
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-a",Hostname="n1"} 612.5 1711034567000
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="0",UUID="GPU-a",Hostname="n1"} 5000 1711034567000
DCGM_FI_DEV_POWER_VIOLATION{gpu="0",UUID="GPU-a",Hostname="n1"} 77 1711034567000
DCGM_FI_DEV_MEM_CLOCK{gpu="0",UUID="GPU-a",Hostname="n1"} 9223372036854775792 1711034567000
DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-a",Hostname="n1"} 79 1711034567000
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",Hostname="n1",GPU_I_ID="3"} 10 1711034567000
up{job="dcgm"} 1 1711034567000
"""
    nodes, (account,) = import_files(Prometheus(), tmp_path, scrape__prom=text)
    (node,) = nodes
    assert (node.name, node.wall) == ("n1", True)
    assert node.devices == [
        {"id": "GPU-a", "vendor": "nvidia", "name": "NVIDIA H100", "uuid": "GPU-a"},
        {"id": "GPU-a MIG 3", "vendor": "nvidia", "uuid": "GPU-a"},
    ]
    assert node.series == {
        "gpu.busy_ratio GPU-a": [(T * S, 0.97), ((T + 15) * S, 0.5)],
        "gpu.busy_ratio GPU-a MIG 3": [(T * S, 0.1)],
        "gpu.memory_used_bytes GPU-a": [(T * S, 2097152.0)],
        "gpu.sm_clock_hertz GPU-a": [(T * S, 1.98e9)],
        "gpu.power_watts GPU-a": [(T * S, 612.5)],
        "gpu.energy_joules_total GPU-a": [(T * S, 5.0)],
        "gpu.power_violation_ns_total GPU-a": [(T * S, 77.0)],
    }
    assert account.skipped == {
        "metric names without a signal": 1,
        "values out of range or not available": 1,
    }
    assert account.notes == [
        "n1: GPU 0: the driver's last error is Xid 79",
        "2 devices were busy 42% of the time by their readings (from 10% to 74%)",
    ]


def test_the_more_precise_metric_is_preferred(tmp_path: Path) -> None:
    text = b"""DCGM_FI_DEV_GPU_UTIL{gpu="1",Hostname="n1"} 100 1711034567000
DCGM_FI_PROF_GR_ENGINE_ACTIVE{gpu="1",Hostname="n1"} 0.83 1711034567000
"""
    node = gathered(tmp_path, scrape=text)["n1"]
    assert node.series == {"gpu.busy_ratio gpu1": [(T * S, 0.83)]}


def test_open_metrics_text_with_exemplars_is_read(tmp_path: Path) -> None:
    text = rb"""# TYPE DCGM_FI_DEV_GPU_TEMP gauge
DCGM_FI_DEV_GPU_TEMP{gpu="0",pod="a\"}b, c=\"d",Hostname="n 1"} -3.5 1711034567.25
DCGM_FI_DEV_GPU_TEMP{gpu="0",pod="a\"}b, c=\"d",Hostname="n 1"} 40 1711034568 # {id="x"} 7 1
# EOF
"""
    node = gathered(tmp_path, metrics=text)["n 1"]
    assert node.series == {
        "gpu.temperature_celsius gpu0": [(T * S + S // 4, -3.5), ((T + 1) * S, 40.0)]
    }


def test_a_separate_time_line_dates_a_scrape(tmp_path: Path) -> None:
    line = b'DCGM_FI_DEV_GPU_TEMP{gpu="0",Hostname="n1"} %d\n'
    text = b"# 1711034567\n" + line % 30 + b"2024-03-21T15:22:57Z\n" + line % 31
    node = gathered(tmp_path, scrapes=text)["n1"]
    assert node.series == {"gpu.temperature_celsius gpu0": [(T * S, 30.0), ((T + 10) * S, 31.0)]}


def test_untimed_scrapes_keep_the_first_sample_of_each_series(tmp_path: Path) -> None:
    line = b'DCGM_FI_DEV_GPU_TEMP{gpu="0",Hostname="n1"} %d\n'
    (node,), (account,) = import_files(Prometheus(), tmp_path, scrape=line % 30 + line % 31)
    assert (node.wall, node.series) == (False, {"gpu.temperature_celsius gpu0": [(0, 30.0)]})
    assert account.skipped == {"repeated samples without a time": 1}
    assert account.notes == ["readings without a time are shown as those of one instant"]


NODE_EXPORTER = b"""# HELP node_cpu_seconds_total Seconds the CPUs spent in each mode.
node_cpu_seconds_total{cpu="0",mode="user",instance="10.0.0.1:9100"} 4 1711034567000
node_cpu_seconds_total{cpu="0",mode="nice",instance="10.0.0.1:9100"} 0.5 1711034567000
node_cpu_seconds_total{cpu="1",mode="user",instance="10.0.0.1:9100"} 2 1711034567000
node_cpu_seconds_total{cpu="1",mode="nice",instance="10.0.0.1:9100"} 0 1711034567000
node_cpu_seconds_total{cpu="1",mode="irq",instance="10.0.0.1:9100"} 1 1711034567000
node_disk_read_bytes_total{device="nvme0n1",instance="10.0.0.1:9100"} 2.5e+09 1711034567000
node_disk_read_bytes_total{device="dm-0",instance="10.0.0.1:9100"} 5 1711034567000
node_network_receive_bytes_total{device="lo",instance="10.0.0.1:9100"} 5 1711034567000
node_network_receive_errs_total{device="eth0",instance="10.0.0.1:9100"} 3 1711034567000
node_network_transmit_errs_total{device="eth0",instance="10.0.0.1:9100"} 4 1711034567000
node_infiniband_port_data_received_bytes_total{device="mlx5_0",port="1"} 18 1711034567000
node_vmstat_pswpin{instance="10.0.0.1:9100"} 2 1711034567000
DCGM_FI_DEV_GPU_TEMP{gpu="0",Hostname="n1",instance="10.0.0.1:9400"} 30 1711034567000
"""


def test_host_metrics_are_joined_by_host_address(tmp_path: Path) -> None:
    nodes, (account,) = import_files(Prometheus(), tmp_path, scrape=NODE_EXPORTER)
    by_name = {node.name: node.series for node in nodes}
    assert by_name == {
        "unnamed host": {"rdma.receive_bytes_total mlx5_0/1": [(T * S, 18.0)]},
        "n1": {
            "cpu.user_ns_total 0": [(T * S, 4.5e9)],
            "cpu.user_ns_total 1": [(T * S, 2e9)],
            "cpu.user_ns_total all": [(T * S, 6.5e9)],
            "disk.read_bytes_total nvme0n1": [(T * S, 2.5e9)],
            "network.errors_total eth0": [(T * S, 7.0)],
            "memory.swap_in_bytes_total": [(T * S, 8192.0)],
            "gpu.temperature_celsius gpu0": [(T * S, 30.0)],
        },
    }
    assert account.skipped == {
        "series of an ignored device or kind": 2,
        "values without the other parts of cpu.system_ns_total": 1,
    }


def matrix(*series: tuple[dict[str, str], list]) -> bytes:
    """An answer of the API."""
    result = [{"metric": labels, "values": values} for labels, values in series]
    answer = {"status": "success", "data": {"resultType": "matrix", "result": result}}
    return json.dumps(answer, indent=1).encode()


UTIL = {"__name__": "DCGM_FI_DEV_GPU_UTIL", "gpu": "0", "Hostname": "n1"}
TEMP = {"__name__": "DCGM_FI_DEV_GPU_TEMP", "gpu": "0", "Hostname": "n1"}


def test_query_results_of_several_files_are_merged_by_host(tmp_path: Path) -> None:
    gathered_tables = gathered(
        tmp_path,
        util__json=matrix((UTIL, [[T, "100"], [T + 15.5, "NaN"], [T + 30, "7"]])),
        temp__json=matrix((TEMP, [[T, "31"]]), ({"__name__": "up"}, [[T, "1"]])),
        lines__json=b'{"metric":{"__name__":"DCGM_FI_DEV_SM_CLOCK","gpu":"0","Hostname":"n1"},'
        b'"values":[1],"timestamps":[1711034567000]}\n',
    )
    assert gathered_tables["n1"].series == {
        "gpu.busy_ratio gpu0": [(T * S, 1.0), (T * S + 15_500_000_000, None), ((T + 30) * S, 0.07)],
        "gpu.temperature_celsius gpu0": [(T * S, 31.0)],
        "gpu.sm_clock_hertz gpu0": [(T * S, 1e6)],
    }


def test_a_long_query_result_is_read_in_blocks(tmp_path: Path) -> None:
    points = [[T + second, "50"] for second in range(60_000)]
    data = matrix((UTIL, points), (TEMP, [[T, "31"]]))
    assert len(data) > 2 << 20  # more than two blocks
    node = gathered(tmp_path, long=data)["n1"]
    assert len(node.series["gpu.busy_ratio gpu0"]) == 60_000
    assert node.series["gpu.temperature_celsius gpu0"] == [(T * S, 31.0)]


def test_a_truncated_query_result_is_read_to_its_last_series(tmp_path: Path) -> None:
    data = matrix((TEMP, [[T, "31"]]), (UTIL, [[T, "100"], [T + 15, "99"]]))
    (node,), (account,) = import_files(Prometheus(), tmp_path, cut=data[:-60])
    assert node.series == {"gpu.temperature_celsius gpu0": [(T * S, 31.0)]}
    assert account.cut.startswith("damaged or cut off within a series")


def test_bad_samples_are_counted(tmp_path: Path) -> None:
    text = b"""DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="n1"} 40 1711034582000
DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="n1"} 20 1711034567000
DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="n1"} 30 1711034567000
DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="n1"} -1 1711034569000
DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="n1"} 1e400 1711034570000
DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="n1"} 300 1711034571000
DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="n1"} 30 -5
DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="n1"} 30 99999999999999999999999999
DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="n1"} many
DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="n1"}
\x00\xff\xfe rubbish
"""
    (node,), (account,) = import_files(Prometheus(), tmp_path, bad=text)
    second = T * S
    assert node.series == {
        "gpu.busy_ratio gpu0": [
            (second, 0.3),
            (second + 2 * S, None),
            (second + 3 * S, None),
            (second + 4 * S, None),
            (second + 15 * S, 0.4),
        ]
    }
    assert account.skipped == {
        "samples with an impossible time": 2,
        "samples whose value or time is not a number": 2,
        "lines that are not samples": 1,
        "values out of range or not available": 3,
        "readings at the same time as a later one": 1,
    }


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"{}",
        b"[]",
        b"\x00" * 100,
        b"\xff\xfe{",
        b"hello world 5\n",
        b"42\n",
        b'{"traceEvents": []}',
        b'{"resultType": "vector"}',
        b"rank,step\n0,1\n",
    ],
)
def test_other_files_are_not_recognised(head: bytes) -> None:
    assert not Prometheus().recognizes(head, Path("x"))


def test_a_file_without_known_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotImportError, match="no known metric"):
        import_files(Prometheus(), tmp_path, other=b"# TYPE up gauge\nup 1\n")
    deep = b'{"data":{"resultType":"matrix","result":[' + b'{"metric":' * 50_000
    with pytest.raises(CannotImportError, match="no known metric"):
        import_files(Prometheus(), tmp_path, deep=deep)


IDLE = SHARED / "dcgm-prometheus/h100_eks_2026-03"


@pytest.mark.skipif(not IDLE.exists(), reason="the real captures do not lie beside the repository")
def test_real_idle_nodes_give_known_values_without_findings() -> None:
    known = json.loads((IDLE / "known.json").read_text())["files"]
    queries = {name: (IDLE / name).read_bytes() for name in known if name.startswith("query")}
    from clusterprof.analysis.importers.core.base import Account
    from clusterprof.analysis.importers.core.byte_sources import open_sources
    from tests.support.metric_imports import collect_node

    sources = [source for name in sorted(queries) for source in open_sources(IDLE / name)]
    nodes = Prometheus().nodes(sources, [Account(source.path) for source in sources])
    by_name = {item.name: item for item in map(collect_node, nodes)}
    scale = {
        "gpu.busy_ratio": 0.01,
        "gpu.memory_used_bytes": 1 << 20,
        "gpu.temperature_celsius": 1,
        "gpu.power_watts": 1,
    }
    for (name, content), signal in zip(sorted(known.items())[1:], scale):
        numbers = {}
        for series in json.loads(queries[name])["data"]["result"]:
            labels = series["metric"]
            numbers[f"{labels['Hostname']}/gpu{labels['gpu']}"] = (
                labels["Hostname"],
                labels["UUID"],
            )
        for who, value in content["values"].items():
            host, uuid = numbers[who]
            ((_, ours),) = by_name[host].series[f"{signal} {uuid}"]
            assert ours == float(value) * scale[signal], (name, who)
    report = analyze(IDLE)
    assert [node.name for node in report.nodes] == ["gpu-node-1", "gpu-node-2"]
    assert (report.findings, report.ranks, report.lost_ns) == ((), (), 0)
