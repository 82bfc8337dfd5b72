"""Tables of GPU readings and Dynolog's log: every form, values by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.base import CannotImportError
from clusterprof.analysis.importers.metrics.dynolog import Dynolog
from clusterprof.analysis.importers.metrics.gpu_tables import GpuTables
from clusterprof.analysis.importers.registry import find_importer
from tests.support.metric_imports import import_files

S = 1_000_000_000
T = 1_711_034_567


def test_dcgm_field_columns_are_read(tmp_path: Path) -> None:
    text = b"""timestamp,Hostname,gpu,DCGM_FI_DEV_GPU_UTIL,DCGM_FI_DEV_POWER_USAGE,DCGM_FI_DEV_NAME
1711034567,n1,0,97,612.5,H100
1711034567,n2,0,5,70,H100
1711034582,n1,0,,N/A,H100
later,n1,0,1,1,H100
1711034582,n1
"""
    nodes, (account,) = import_files(GpuTables(), tmp_path, dcgm__csv=text)
    assert {node.name: (node.wall, node.series) for node in nodes} == {
        "n1": (
            True,
            {
                "gpu.busy_ratio gpu0": [(T * S, 0.97)],
                "gpu.power_watts gpu0": [(T * S, 612.5), ((T + 15) * S, None)],
            },
        ),
        "n2": (
            True,
            {"gpu.busy_ratio gpu0": [(T * S, 0.05)], "gpu.power_watts gpu0": [(T * S, 70.0)]},
        ),
    }
    assert account.skipped == {
        "rows with an impossible time": 1,
        "lines that are not rows of the table": 1,
        "values out of range or not available": 1,
    }


def test_labelled_legends_are_read_as_column_heads(tmp_path: Path) -> None:
    text = (
        b'Time,"DCGM_FI_DEV_GPU_UTIL{Hostname=""n1"", gpu=""0""}",'
        b'"DCGM_FI_DEV_GPU_UTIL{Hostname=""n1"", gpu=""1""}"\n'
        b"2024-03-21T15:22:47Z,10,20\n"
    )
    (node,), _ = import_files(GpuTables(), tmp_path, export__csv=text)
    assert node.series == {
        "gpu.busy_ratio gpu0": [(T * S, 0.1)],
        "gpu.busy_ratio gpu1": [(T * S, 0.2)],
    }


def test_amd_smi_tables_are_read(tmp_path: Path) -> None:
    text = b"""'CTRL' + 'C' to stop watching output:
timestamp,gpu,gfx_activity,umc_activity,socket_power,gfx_0_clk,hotspot
1711034567,0,42,1,550,2100,60
1711034567,1,N/A,N/A,140,132,40
"""
    (node,), _ = import_files(GpuTables(), tmp_path, amd__csv=text)
    assert node.devices == [{"id": "gpu0", "vendor": "amd"}, {"id": "gpu1", "vendor": "amd"}]
    assert node.series == {
        "gpu.busy_ratio gpu0": [(T * S, 0.42)],
        "gpu.memory_busy_ratio gpu0": [(T * S, 0.01)],
        "gpu.power_watts gpu0": [(T * S, 550.0)],
        "gpu.power_watts gpu1": [(T * S, 140.0)],
        "gpu.sm_clock_hertz gpu0": [(T * S, 2.1e9)],
        "gpu.sm_clock_hertz gpu1": [(T * S, 1.32e8)],
        "gpu.temperature_celsius gpu0": [(T * S, 60.0)],
        "gpu.temperature_celsius gpu1": [(T * S, 40.0)],
    }


def test_omnistat_tables_are_read(tmp_path: Path) -> None:
    text = b"""metric,rocm_utilization_percentage,rocm_utilization_percentage,rocm_num_gpus
instance,node01,node02,node01
card,0,0,0
timestamp,,,
2024-03-21 15:22:47,100.0,50.0,3
2024-03-21 15:23:02,,25.0,3
"""
    nodes, _ = import_files(GpuTables(), tmp_path, omnistat__csv=text)
    assert {node.name: (node.wall, node.series) for node in nodes} == {
        "node01": (False, {"gpu.busy_ratio gpu0": [(T * S, 1.0)]}),
        "node02": (False, {"gpu.busy_ratio gpu0": [(T * S, 0.5), ((T + 15) * S, 0.25)]}),
    }


def test_weights_and_biases_logs_are_read(tmp_path: Path) -> None:
    rows = [
        {"_timestamp": T, "system.cpu": 3.0},
        {"_timestamp": T, "system.gpu.0.gpu": 88, "system.gpu.1.powerWatts": 300.5},
        {"_timestamp": T + 15, "system.gpu.0.gpu": None, "system.gpu.1.powerWatts": 301},
    ]
    lines = "\n".join(map(json.dumps, rows)).encode() + b"\nrubbish\n[1]\n"
    (node,), (account,) = import_files(GpuTables(), tmp_path, wandb__jsonl=lines)
    assert node.series == {
        "gpu.busy_ratio gpu0": [(T * S, 0.88)],
        "gpu.power_watts gpu1": [(T * S, 300.5), ((T + 15) * S, 301.0)],
    }
    assert account.skipped == {"lines without readings": 2, "lines that are not JSON": 1}


DYNOLOG = b"""I20240321 15:22:47.100000 12 Logger.cpp:52] Logging : 9 values
I20240321 15:22:47.1 12 Logger.cpp:53] time = 2024-03-21T15:22:47.000Z data = \
{"cpu_u_ms":100,"cpu_n_ms":5,"cpu_s_ms":7,"cpu_w_ms":1,"rx_bytes_eth0":10,"rx_bytes_lo":9}
I20240321 15:22:47.1 12 Logger.cpp:53] time = 2024-03-21T15:22:47.000Z data = \
{"device":1,"gpu_device_utilization":97,"gpu_power_draw":"612.500","sm_active_ratio":"0.810"}
I20240321 15:23:47.1 12 Logger.cpp:53] time = 2024-03-21T15:23:47.000Z data = \
{"cpu_u_ms":50,"cpu_n_ms":0,"cpu_s_ms":7,"cpu_w_ms":2,"rx_bytes_eth0":30,"rx_bytes_lo":9}
I20240321 15:23:47.1 12 Logger.cpp:53] time = never data = {}
"""


def test_dynolog_differences_become_counters(tmp_path: Path) -> None:
    (node,), (account,) = import_files(Dynolog(), tmp_path, dynolog__log=DYNOLOG)
    a, b = T * S, (T + 60) * S
    assert (node.name, node.wall) == ("dynolog", False)  # it calls local time UTC
    assert node.series == {
        "cpu.user_ns_total all": [(a, 105e6), (b, 155e6)],
        "cpu.iowait_ns_total all": [(a, 1e6), (b, 3e6)],
        "network.receive_bytes_total eth0": [(a, 10.0), (b, 40.0)],
        "gpu.busy_ratio gpu1": [(a, 0.97)],
        "gpu.power_watts gpu1": [(a, 612.5)],
        "gpu.sm_active_ratio gpu1": [(a, 0.81)],
    }
    assert account.read == {"samples": 3}
    assert account.skipped == {
        "lines without a sample": 2,
        "values without the other parts of cpu.system_ns_total": 1,
    }


def test_dynolog_json_lines_are_read(tmp_path: Path) -> None:
    lines = b'{"timestamp":1711034567,"data":{"device":0,"gpu_device_utilization":"x"}}\n' + (
        b'{"timestamp":1711034568,"device":0,"gpu_device_utilization":50,"gpu_uuid":"GPU-a"}\n'
    )
    (node,), (account,) = import_files(Dynolog(), tmp_path, d__jsonl=lines)
    assert (node.wall, node.series) == (True, {"gpu.busy_ratio GPU-a": [((T + 1) * S, 0.5)]})
    assert account.skipped == {"values that are not numbers": 1}


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"timestamp,a,b\n1,2,3\n",
        b"Relative time,Step,Value\n1,2,3\n",
        b"metric,x\n",
        b'{"timestamp": 5}\n',
        b"[[1, 2, 3]]",
        b'"' * 1000,
        b"time = x data = {}\n",
    ],
)
def test_other_files_are_not_recognised(head: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(head)
    assert find_importer(head, path) is None


def test_tables_without_a_reading_are_reported(tmp_path: Path) -> None:
    with pytest.raises(CannotImportError, match="no GPU readings"):
        import_files(GpuTables(), tmp_path, empty__csv=b"timestamp,DCGM_FI_DEV_GPU_UTIL\n")
    short = b"metric,rocm_utilization_percentage\ncard,0\ntimestamp\n1711034567\n"
    assert not GpuTables().recognizes(short, Path("x"))
    with pytest.raises(CannotImportError, match="no known sample"):
        import_files(
            Dynolog(), tmp_path, empty=b'{"time": 5, "device": 0, "gpu_power_draw": "x"}\n'
        )


def test_quantities_with_units_and_relative_times_are_read(tmp_path: Path) -> None:
    """A quoted cell with a line break is one cell: its first line is the reading."""
    text = b"""elapsed_sec,gpu_util_pct,mem_used_mb,temp_c,power_w
0.5,17,576,29,"26.11
0"
1.5,19,600,30,"70.00
0"
2.5,20,"600,30,71
3.5,21,600,31,72
"""
    (node,), (account,) = import_files(GpuTables(), tmp_path, usage__csv=text)
    assert node.wall is False
    assert node.series == {
        "gpu.busy_ratio gpu0": [(S // 2, 0.17), (3 * S // 2, 0.19), (7 * S // 2, 0.21)],
        "gpu.memory_used_bytes gpu0": [(S // 2, 576e6), (3 * S // 2, 6e8), (7 * S // 2, 6e8)],
        "gpu.temperature_celsius gpu0": [(S // 2, 29.0), (3 * S // 2, 30.0), (7 * S // 2, 31.0)],
        "gpu.power_watts gpu0": [(S // 2, 26.11), (3 * S // 2, 70.0), (7 * S // 2, 72.0)],
    }
    assert account.skipped == {
        "line breaks within a cell": 2,
        "lines that are not rows of the table": 1,
    }
    assert account.notes[0] == (
        "line 6 is the first that is not a row of the table: 3 cells below 5 heads"
    )


@pytest.mark.parametrize(
    "heads",
    [
        b"time,utilization,power_w",  # of what? the machine may have one, too
        b"elapsed_sec,temp_c,power_w",  # of what?
        b"gpu_util_pct,power_w",  # no time
    ],
)
def test_ambiguous_column_heads_are_not_recognised(heads: bytes) -> None:
    assert not GpuTables().recognizes(heads + b"\n0.5,17,26\n", Path("usage.csv"))


@pytest.mark.parametrize(
    ("text", "device"),
    [
        (b"Time,GPU_ID,Utilization\n1700000000.5,3,0\n1700000001.5,3,69\n", "gpu3"),
        (b"timestamp,gpu_utilization,memory_used\n1700000000.5,0, 7\n1700000001.5,69, 7\n", "gpu0"),
        (
            b'{"time": "2023-11-14 22:13:20.5", "cpu_usage": 3.0, "gpu_usage:7": 0}\n'
            b'{"time": "2023-11-14 22:13:21.5", "cpu_usage": 3.0, "gpu_usage:7": 69}\n',
            "gpu7",
        ),
    ],
)
def test_an_unlabelled_share_with_large_values_is_read_as_percent(
    tmp_path: Path, text: bytes, device: str
) -> None:
    assert GpuTables().recognizes(text, Path("usage.csv"))
    (node,), _ = import_files(GpuTables(), tmp_path, usage__csv=text)
    assert [value for _, value in node.series[f"gpu.busy_ratio {device}"]] == [0.0, 0.69]


def test_an_ambiguous_share_without_a_unit_is_not_read(tmp_path: Path) -> None:
    """1 may be all, or one percent."""
    text = b"time,gpu_util,power_w\n1700000000,0,60\n1700000001,1,61\n"
    (node,), (account,) = import_files(GpuTables(), tmp_path, usage__csv=text)
    assert list(node.series) == ["gpu.power_watts gpu0"]
    assert account.skipped == {"shares without a unit, none above 1": 2}
