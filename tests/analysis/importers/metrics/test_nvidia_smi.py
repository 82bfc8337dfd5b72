"""Output of nvidia-smi and dcgmi: every form by hand, real documents by their known fields."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.base import Account, CannotImportError
from clusterprof.analysis.importers.core.byte_sources import open_sources
from clusterprof.analysis.importers.metrics.nvidia_smi import NvidiaSmi
from clusterprof.analysis.pipeline import analyze
from tests.support.metric_imports import SHARED, collect_node, import_files

S = 1_000_000_000
T = 1_767_712_383 * S  # 2026-01-06 15:13:03, were it UTC
MIB = 1 << 20


def test_query_csv_with_units_is_read(tmp_path: Path) -> None:
    text = b"""timestamp, index, name, utilization.gpu [%], memory.used [MiB], power.draw [W], \
clocks.current.sm [MHz], clocks_throttle_reasons.active, ecc.errors.corrected.volatile.total
2026/01/06 15:13:03.389, 0, NVIDIA H100, 97 %, 2 MiB, 612.40 W, 1980 MHz, 0x0000000000000040, 1
2026/01/06 15:13:03.391, 1, NVIDIA H100, [N/A], 3 MiB, [Unknown Error], 345 MHz, 0x1, [N/A]
2026/01/06 15:13:04.389, 0, NVIDIA H100, 0 %, 2 MiB, 70.00 W, 345 MHz, 0x0000000000000001, 1
2026/01/06 15:13:04.391, 1, NVIDIA H100
"""
    (node,), (account,) = import_files(NvidiaSmi(), tmp_path, host3__csv=text)
    a, b, c = T + 389_000_000, T + 391_000_000, T + S + 389_000_000
    assert (node.name, node.wall) == ("host3", False)  # nobody says in which zone
    assert node.devices == [
        {"id": "gpu0", "vendor": "nvidia", "name": "NVIDIA H100"},
        {"id": "gpu1", "vendor": "nvidia", "name": "NVIDIA H100"},
    ]
    assert node.series == {
        "gpu.busy_ratio gpu0": [(a, 0.97), (c, 0.0)],
        "gpu.memory_used_bytes gpu0": [(a, 2.0 * MIB), (c, 2.0 * MIB)],
        "gpu.memory_used_bytes gpu1": [(b, 3.0 * MIB)],
        "gpu.power_watts gpu0": [(a, 612.4), (c, 70.0)],
        "gpu.sm_clock_hertz gpu0": [(a, 1.98e9), (c, 3.45e8)],
        "gpu.sm_clock_hertz gpu1": [(b, 3.45e8)],
        "gpu.throttle_bits gpu0": [(a, 64.0), (c, 1.0)],
        "gpu.throttle_bits gpu1": [(b, 1.0)],
        "gpu.ecc_corrected_total gpu0": [(a, 1.0), (c, 1.0)],
    }
    assert account.skipped == {
        "rows with more or fewer columns than the first line": 1,
        "values out of range or not available": 3,
    }


def test_query_csv_without_units_and_device_is_read(tmp_path: Path) -> None:
    text = b"""timestamp, utilization.gpu, temperature.gpu
2026/01/06 15:13:03.000, 10, 40
2026/01/06 15:13:03.004, 20, 41
2026/01/06 15:13:04.000, 30, 42
2026/01/06 15:13:04.004, 40, 43
"""
    (node,), _ = import_files(NvidiaSmi(), tmp_path, log=text)
    assert node.series["gpu.busy_ratio gpu0"] == [(T, 0.1), (T + S, 0.3)]
    assert node.series["gpu.temperature_celsius gpu1"] == [
        (T + 4_000_000, 41.0),
        (T + S + 4_000_000, 43.0),
    ]


def test_query_csv_after_other_output_is_read(tmp_path: Path) -> None:
    """A script ran `nvidia-smi` first; a second one emptied the file while the first wrote it."""
    table = b"Sun Nov 21 14:02:20 2021\n" + b"|  0  Tesla V100  On |  0%  Default |\n" * 40
    heads = b"index, name, utilization.gpu [%]\n"
    text = table + heads + b"0, V100, 40 %\n" + b"\0" * 9000 + b"0, V100, 60 %\n"
    assert NvidiaSmi().recognizes(text, Path("gpu_stats.csv"))
    (node,), _ = import_files(NvidiaSmi(), tmp_path, gpu_stats__csv=text)
    assert [value for _, value in node.series["gpu.busy_ratio gpu0"]] == [0.4, 0.6]


DMON = b"""#Date       Time        gpu    pwr  gtemp     sm    mem  rxpci
#YYYYMMDD   HH:MM:SS    Idx      W      C      %      %   MB/s
 20260106   15:13:03      0    612     61     97     41      5
 20260106   15:13:03      1      -     40      0      0      0
#Date       Time        gpu    pwr  gtemp     sm    mem  rxpci
#YYYYMMDD   HH:MM:SS    Idx      W      C      %      %   MB/s
 20260106   15:13:04      0    600     61     96     41      5
"""


def test_dmon_output_with_date_and_time_is_read(tmp_path: Path) -> None:
    (node,), _ = import_files(NvidiaSmi(), tmp_path, dmon=DMON)
    assert node.series == {
        "gpu.power_watts gpu0": [(T, 612.0), (T + S, 600.0)],
        "gpu.temperature_celsius gpu0": [(T, 61.0), (T + S, 61.0)],
        "gpu.temperature_celsius gpu1": [(T, 40.0)],
        "gpu.busy_ratio gpu0": [(T, 0.97), (T + S, 0.96)],
        "gpu.busy_ratio gpu1": [(T, 0.0)],
        "gpu.memory_busy_ratio gpu0": [(T, 0.41), (T + S, 0.41)],
        "gpu.memory_busy_ratio gpu1": [(T, 0.0)],
        "gpu.pcie_receive_bytes_per_second gpu0": [(T, 5e6), (T + S, 5e6)],
        "gpu.pcie_receive_bytes_per_second gpu1": [(T, 0.0)],
    }


def test_dmon_output_without_dates_is_read(tmp_path: Path) -> None:
    plain = b"# gpu   sm\n# Idx    %\n    0   10\n    1   20\n    0   30\n    1   40\n    x\n"
    (node,), (account,) = import_files(NvidiaSmi(), tmp_path, plain=plain)
    assert node.series == {
        "gpu.busy_ratio gpu0": [(0, 0.1), (S, 0.3)],
        "gpu.busy_ratio gpu1": [(0, 0.2), (S, 0.4)],
    }
    assert account.notes[0].startswith(
        "the file shows no times: its 2 sweeps are assumed a second apart"
    )
    assert account.skipped == {"lines that are not rows of a table": 1}
    late = b"#Time        gpu    sm\n#HH:MM:SS    Idx     %\n 23:59:59 0 10\n 00:00:00 0 20\n"
    (node,), _ = import_files(NvidiaSmi(), tmp_path, clock=late)
    day = 86_400 * S
    assert node.series == {"gpu.busy_ratio gpu0": [(day - S, 0.1), (day, 0.2)]}


def test_pmon_counts_the_processes_of_each_device(tmp_path: Path) -> None:
    text = b"""# gpu        pid  type    sm   mem   command
# Idx          #   C/G     %     %   name
    0       1001     C    40    10   python
    0       1002     C    41    10   python
    1          -     -     -     -   -
    0       1001     C    40    10   python
    1       1003     C     1     1   python
"""
    (node,), _ = import_files(NvidiaSmi(), tmp_path, pmon=text)
    assert node.series == {
        "gpu.processes_count gpu0": [(0, 2.0), (S, 1.0)],
        "gpu.processes_count gpu1": [(0, 0.0), (S, 1.0)],
    }


def test_dcgmi_dmon_output_is_read(tmp_path: Path) -> None:
    text = b"""#Entity   GPUTL   SMACT   POWER
ID                            W
GPU 0     97      0.81    612.4
GPU 1     N/A     0.00    70.0
GPU 0     50      0.40    300.0
"""
    (node,), _ = import_files(NvidiaSmi(), tmp_path, dcgmi=text)
    assert node.series == {
        "gpu.busy_ratio gpu0": [(0, 0.97), (S, 0.5)],
        "gpu.sm_active_ratio gpu0": [(0, 0.81), (S, 0.4)],
        "gpu.sm_active_ratio gpu1": [(0, 0.0)],
        "gpu.power_watts gpu0": [(0, 612.4), (S, 300.0)],
        "gpu.power_watts gpu1": [(0, 70.0)],
    }


def document(when: str, util: str, more: str = "") -> bytes:
    """One document of `-q -x`."""
    return f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>{when}<gpu id="00000000:01:00.0"><product_name>NVIDIA H100</product_name>
<uuid>GPU-x</uuid><utilization><gpu_util>{util}</gpu_util></utilization>{more}</gpu>
</nvidia_smi_log>
""".encode()


FIRST = "<timestamp>Tue Jan  6 15:13:03 2026</timestamp>"
SECOND = "<timestamp>Tue Jan  6 15:13:08 2026</timestamp>"


def test_concatenated_xml_documents_are_read(tmp_path: Path) -> None:
    more = """<clocks_event_reasons><clocks_event_reason_sw_power_cap>Active
</clocks_event_reason_sw_power_cap><clocks_event_reason_hw_slowdown>Active
</clocks_event_reason_hw_slowdown></clocks_event_reasons>
<ecc_errors><volatile><sram_correctable>1</sram_correctable><dram_correctable>2</dram_correctable>
</volatile></ecc_errors>
<processes><process_info><pid>1</pid></process_info><process_info/></processes>
<mig_devices><mig_device><fb_memory_usage><used>9 MiB</used></fb_memory_usage></mig_device>
</mig_devices>"""
    data = document(FIRST, "97 %", more) + document(SECOND, "N/A") + document(SECOND, "5 %")[:200]
    (node,), (account,) = import_files(NvidiaSmi(), tmp_path, smi__xml=data)
    assert node.devices == [
        {
            "id": "GPU-x",
            "vendor": "nvidia",
            "name": "NVIDIA H100",
            "uuid": "GPU-x",
            "pci_address": "00000000:01:00.0",
        }
    ]
    assert node.series == {
        "gpu.busy_ratio GPU-x": [(T, 0.97), (T + 5 * S, None)],
        "gpu.throttle_bits GPU-x": [(T, 12.0)],
        "gpu.ecc_corrected_total GPU-x": [(T, 3.0)],
        "gpu.processes_count GPU-x": [(T, 2.0)],
    }
    assert account.read["documents"] == 2
    assert account.cut.startswith("damaged or cut off within a document")


def test_xml_entities_and_deep_nesting_are_refused(tmp_path: Path) -> None:
    laughs = b"""<?xml version="1.0"?>
<!DOCTYPE nvidia_smi_log [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]>
<nvidia_smi_log><gpu id="0"><uuid>&b;</uuid></gpu></nvidia_smi_log>"""
    with pytest.raises(CannotImportError, match="declares an entity"):
        import_files(NvidiaSmi(), tmp_path, bomb__xml=laughs)
    with pytest.raises(CannotImportError, match="no GPU readings"):
        import_files(
            NvidiaSmi(), tmp_path, o__xml=b"<?xml version='1.0' encoding='x'?><nvidia_smi_log/>"
        )
    with pytest.raises(CannotImportError, match="no GPU readings"):
        import_files(NvidiaSmi(), tmp_path, deep__xml=b"<nvidia_smi_log>" + b"<a>" * 100_000)


@pytest.mark.parametrize(
    "head", [b"", b"\x00" * 64, b"# gpu\n", b"# a comment\n", b"timestamp, name\n", b"<html>"]
)
def test_other_files_are_not_recognised(head: bytes) -> None:
    assert not NvidiaSmi().recognizes(head, Path("x"))


REAL = SHARED / "nvidia-smi-xml"


@pytest.mark.skipif(not REAL.exists(), reason="the real documents do not lie beside the repository")
def test_real_documents_give_known_values_without_findings() -> None:
    known = json.loads((REAL / "known.json").read_text())["files"]
    fields = {
        "util": ("gpu.busy_ratio", 0.01),
        "mem_util": ("gpu.memory_busy_ratio", 0.01),
        "fb_used": ("gpu.memory_used_bytes", MIB),
        "fb_total": ("gpu.memory_total_bytes", MIB),
        "tx": ("gpu.pcie_transmit_bytes_per_second", 1e3),
        "rx": ("gpu.pcie_receive_bytes_per_second", 1e3),
        "sm": ("gpu.sm_clock_hertz", 1e6),
        "power": ("gpu.power_watts", 1),
    }
    for name, content in known.items():
        (source,) = open_sources(REAL / name)
        (node,) = map(collect_node, NvidiaSmi().nodes([source], [Account(source.path)]))
        ((gpu, device),) = zip(content["gpus"], node.devices, strict=True)
        assert device["name"] == gpu["name"]
        for field, (signal, scale) in fields.items():
            readings = node.series.get(f"{signal} {device['id']}")
            if gpu[field] == "N/A":
                assert readings is None, (name, field)
            elif gpu[field] is not None:  # what was not looked up
                expected = float(gpu[field].split()[0]) * scale
                assert readings is not None
                assert readings[0][1] == pytest.approx(expected, rel=1e-12), (name, field)
    report = analyze(REAL)
    assert (report.findings, report.lost_ns, len(report.nodes)) == ((), 0, 4)
