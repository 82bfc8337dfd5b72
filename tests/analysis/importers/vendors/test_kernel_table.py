"""Tables with a row per kernel: nsys stats, nvprof, Ascend; every figure by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.base import CannotImportError
from clusterprof.analysis.importers.registry import find_importer
from clusterprof.probe import layout
from tests.support.kineto_traces import list_busy_ns, list_spans
from tests.support.trace_imports import import_files, list_ranks

US = 1_000
NSYS = """\
Generating SQLite file report1.sqlite from report1.nsys-rep
Processing [report1.sqlite] with [cuda_gpu_trace.py]...
Start (ns),Duration (ns),CorrId,GrdX,Bytes (MB),SrcMemKd,DstMemKd,Device,Ctx,Strm,Name
1000000,20000,11,,4.0,Pageable,Device,NVIDIA A100 (1),1,7,[CUDA memcpy Host-to-Device]
1050000,30000,12,64,,,,NVIDIA A100 (1),1,7,"void gemm<float, 4>(int)"
1070000,30000,13,64,,,,NVIDIA A100 (1),1,8,relu
"""
NVPROF_CSV = """\
==70== NVPROF is profiling process 70, command: python train.py
==70== Profiling result:
"Start","Duration","Grid X","Size","Device","Context","Stream","Name","Correlation_ID"
s,ms,,MB,,,,,
0.001,0.02,,4.0,"NVIDIA Tegra X1 (1)","1","7","[CUDA memcpy HtoD]",11
0.00105,0.03,64,,"NVIDIA Tegra X1 (1)","1","7","void gemm<float, 4>(int)",12
0.00107,0.03,64,,"NVIDIA Tegra X1 (1)","1","8","relu",13
"""
NVPROF_TEXT = """\
==70== Profiling result:
   Start  Duration            Grid Size      Block Size      Size           Device   Context    Stream  Name
1.00000ms  20.000us                    -               -  4.0000MB     Tesla K40 (1)         1         7  [CUDA memcpy HtoD]
1.05000ms  30.000us             (64 1 1)       (256 1 1)         -     Tesla K40 (1)         1         7  void gemm<float, 4>(int) [12]
1.07000ms  30.000us             (64 1 1)       (256 1 1)         -     Tesla K40 (1)         1         8  relu [13]

Regs: Number of registers used per CUDA thread.
"""  # noqa: E501 - as nvprof writes it
ASCEND = """\
Step Id,Task ID,Stream ID,Name,Type,Accelerator Core,Start Time(us),Duration(us),Wait Time(us)
1,1,16,MatMul1,MatMul,AI_CORE,1699529622790000.5\t,30.0,0
1,2,N/A,hcom_allReduce__1,hcom_allReduce_,HCCL,1699529622790040.5\t,50.0,0
2,3,16,MatMul1,MatMul,AI_CORE,1699529622790100.5\t,30.0,0
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "kernels.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", [NSYS, NVPROF_CSV, NVPROF_TEXT], ids=["nsys", "nvprof", "text"])
def test_three_table_formats_give_the_same_profile(tmp_path: Path, text: str) -> None:
    (node,), (account,) = import_files([write(tmp_path, text)])
    assert list_ranks(node) == [(1, None, None, "gpu1")]
    # from 1.00 to 1.10 ms: a copy of 20 us, and 50 us of two kernels that overlap by 10 us
    assert list_busy_ns(node, "gpu1")[-1] == (100 * US, 70 * US)
    assert (account.read["kernels"], account.read["copies"]) == (2, 1)
    assert node.wall_minus_own_ns is None


def test_ascend_table_steps_and_communication_are_read(tmp_path: Path) -> None:
    (node,), _ = import_files([write(tmp_path, ASCEND)])
    assert [span[:3] for span in list_spans(node, layout.STEP, 1)] == [
        (0, 100 * US, 1),
        (100 * US, 130 * US, 2),
    ]
    assert list_busy_ns(node, "gpu0")[-1] == (130 * US, 110 * US)
    assert [span[:2] for span in list_spans(node, layout.EXPOSED_COLLECTIVE, 1)] == [
        (40_000, 90_000)
    ]
    assert node.wall_minus_own_ns == 1_699_529_622_790_000_500


@pytest.mark.parametrize(
    "text",
    [
        "Time (%),Total Time (ns),Instances,Avg (ns),Name\n100.0,5,1,5,gemm\n",
        "name,start,duration,owner\nplan,1,2,me\n",
        "Start (ns),Duration (ns),Name,Result,CorrID,Pid,Tid\n1,2,cudaMalloc,0,1,7,7\n",
    ],
    ids=["sums", "plan", "calls"],
)
def test_other_tables_are_not_recognised(tmp_path: Path, text: str) -> None:
    importer = find_importer(text.encode(), tmp_path / "x.csv")
    assert importer is None or importer.name != "kernel-table"


def test_a_table_without_units_or_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotImportError, match="does not state the units"):
        import_files([write(tmp_path, NVPROF_CSV.replace("s,ms,,MB,,,,,\n", ""))])
    head = NSYS.splitlines(keepends=True)[2]
    with pytest.raises(CannotImportError, match="no row has the time of a kernel"):
        import_files([write(tmp_path, f"{head}soon,later,,,,,,,1,7,gemm\n1,2\n")])
