"""XSpace profiles: devices, steps and launches of profiles built by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.base import CannotImportError
from clusterprof.analysis.pipeline import analyze
from clusterprof.probe import layout
from tests.support.kineto_traces import list_busy_ns, list_spans
from tests.support.trace_imports import import_files, list_ranks
from tests.support.vendor_traces import Lines, encode_xspace

TPU: Lines = {
    "XLA Modules": [("jit_step(7)", 0, 100, {}), ("jit_step(7)", 300, 100, {})],
    "XLA Ops": [
        ("while.1", 0, 100, {}),
        ("fusion.2", 10, 40, {}),
        ("all-reduce-done.3", 60, 30, {}),
        ("infeed.4", 100, 50, {}),
        ("fusion.5", 300, 100, {}),
    ],
}
"""A loop of 100 ns with an all-reduce of 30, a wait for the host, and a run of 100 ns."""


def write(folder: Path, data: bytes) -> Path:
    path = folder / "host-a.xplane.pb"
    path.write_bytes(data)
    return path


def test_a_tpu_is_busy_in_operations_and_steps_are_those_of_the_program(tmp_path: Path) -> None:
    host: Lines = {
        "python": [("train", 0, 290, {"step_num": 4}), ("train", 290, 130, {"step_num": 5})]
    }
    path = write(tmp_path, encode_xspace({"/device:TPU:0": TPU, "/host:CPU": host}))
    (node,), (account,) = import_files([path])
    assert (node.name, node.wall_minus_own_ns) == ("host-a", None)
    assert list_ranks(node) == [(1, None, None, "tpu0")]
    assert list_busy_ns(node, "tpu0")[-1] == (420, 200)
    assert [span[3] for span in list_spans(node, layout.EXPOSED_COLLECTIVE, 1)] == [30]
    assert [span[:3] for span in list_spans(node, layout.STEP, 1)] == [(0, 290, 4), (290, 420, 5)]
    assert account.skipped == {"operations that wait for the host": 1}


def test_gpu_streams_are_merged_and_launches_found(tmp_path: Path) -> None:
    gpu: Lines = {
        "Stream #7(Compute)": [("gemm", 50, 20, {"correlation_id": 3})],
        "Stream #8(MemcpyH2D)": [("MemcpyH2D", 60, 20, {"correlation_id": 4})],
        "XLA Ops": [("fusion", 50, 30, {})],
        "Steps": [("1", 0, 100, {}), ("2", 120, 80, {})],
    }
    host: Lines = {
        "tf_XLA/70": [("cuLaunchKernel", 30, 10, {"correlation_id": 3})],
        "python": [("$train.py:1 main", 0, 200, {}), ("PjitFunction(step)", 25, 20, {})],
    }
    path = write(
        tmp_path, encode_xspace({"/device:GPU:2": gpu, "/host:CPU": host}, begin_ns=2 * 10**18)
    )
    (node,), (account,) = import_files([path])
    assert node.wall_minus_own_ns == 2 * 10**18
    assert list_ranks(node) == [(1, None, None, "gpu2")]
    assert list_busy_ns(node, "gpu2")[-1] == (200, 30)
    assert [span[:3] for span in list_spans(node, layout.STEP, 1)] == [(0, 120, 1), (120, 200, 2)]
    assert account.read == {
        "kernels": 1,
        "copies": 1,
        "operators": 1,
        "runtime calls": 1,
        "steps": 2,
        "gaps with a late host": 0,
        "waits for data": 0,
    }


def test_a_profile_without_a_device_is_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path, encode_xspace({"/host:CPU": {"python": [("step", 0, 10, {"step_num": 1})]}})
    )
    with pytest.raises(CannotImportError) as caught:
        import_files([path])
    assert caught.value.message == (
        "host-a.xplane.pb: no work of a TPU or GPU in the profile; profile on the device, until"
        " after block_until_ready"
    )


def test_a_damaged_profile_is_read_partly_or_refused(tmp_path: Path) -> None:
    whole = encode_xspace({"/device:TPU:0": TPU}) + encode_xspace({"/device:TPU:1": TPU})
    (node,), (account,) = import_files([write(tmp_path, whole[:-40])])
    assert list_busy_ns(node, "tpu0")[-1][1] == 200
    assert account.cut == "damaged: a field is cut off; everything before was read"
    with pytest.raises(
        CannotImportError, match=r"in the profile.*a field is cut off.*copy it again"
    ):
        import_files([write(tmp_path, whole[:60])])


@pytest.mark.parametrize("executors", [False, True])
def test_the_host_plane_gives_host_activity_and_process_start(
    tmp_path: Path, executors: bool
) -> None:
    """Two devices of one process, the second without work until 45 ms.

    One thread executes from 2 to 50 ms, and waits in block_until_ready from 52 to 99 ms. A thread
    for each device allocates until shortly before its second launch, at 51 and 45 ms. Without
    marked steps the one step begins with the first work of any device.
    """
    ms = 1_000_000
    launches = {0: [(0, 3), (51 * ms, 4), (100 * ms, 5)], 1: [(45 * ms, 6), (100 * ms + 9, 7)]}
    planes: dict[str, Lines] = {}
    host: Lines = {
        "python": [
            ("$train.py:9 main", 0, 110 * ms, {}),
            ("PjRtExecutable::Execute", 2 * ms, 48 * ms, {}),
            ("$api.py:3154 block_until_ready", 52 * ms, 47 * ms, {}),
            ("$api.py:3165 try_to_block", 53 * ms, 45 * ms, {}),
        ]
    }
    for device, calls in launches.items():
        kernels = [(f"k{link}", at + 10, ms, {"correlation_id": link}) for at, link in calls]
        planes[f"/device:GPU:{device}"] = {"Stream #7(Kernel)": kernels}
        host[f"Host Threads/{device}"] = [
            ("hipModuleLaunchKernel", at, 4, {"correlation_id": link}) for at, link in calls
        ]
        if executors:
            thunks = [("ExecuteThunks", max(at - ms // 10, 0), ms // 5, {}) for at, _ in calls]
            allocated = (50 if device == 0 else 44) * ms
            allocation = ("Build buffer allocations", 3 * ms, allocated - 3 * ms, {})
            host[f"py_xla_execute/{device}"] = [allocation, *thunks]
    path = write(tmp_path, encode_xspace({**planes, "/host:CPU": host}))
    (node,), _ = import_files([path])
    for pid in (1, 1 + (1 << 23)):
        (step,) = list_spans(node, layout.STEP, pid)
        assert step[:2] == (10, 101 * ms + 19)
    report = analyze(path)
    assert not [finding for finding in report.findings if finding.cause.id == "startup"]
    reasons = {name: round(ns / ms) for name, ns in report.unattributed_reasons}
    assert reasons["on-host:api.py(3165): try_to_block"] == 2 * 45
    if executors:  # device 0 from 3 to 50, device 1 from 3 to 44 ms
        assert reasons["on-host:Build buffer allocations"] == 47 + 41
        # device 1: from 2 to 3, 44 to 44.9, 46 to 50; of device 0 three others are longer
        assert reasons["on-host:PjRtExecutable::Execute"] == 6
    else:  # from 2 to 50; device 1 works from 45 to 46
        assert reasons["on-host:PjRtExecutable::Execute"] == 48 + 47


_F32 = "f32[8]{0:T(8)}"
_HOST = "f32[8]{0:T(8)S(5)}"
_CHIP = "f32[8]{0:T(8)S(1)}"


def done(kind: str, result: str, operand: str, more: str = "") -> str:
    return f"%{kind}.1 = {result} {kind}(({result}, {operand}, u32[]{{:S(2)}}) %start.1){more}"


@pytest.mark.parametrize(
    ("operation", "busy", "to_device", "communicated"),
    [
        (done("copy-done", _F32, _HOST), 100, 10_000, 0),
        (done("copy-done", _HOST, _F32), 100, 0, 0),
        (done("copy-done", _CHIP, _F32), 100, None, 0),  # a prefetch of the chip itself
        (done("slice-done", _F32, _HOST), 100, 10_000, 0),
        (done("send-done", "token[]", _F32), 100, None, 10_000),
        (done("recv-done", _F32, "token[]"), 100, None, 10_000),
        (done("recv-done", _F32, "token[]", ", is_host_transfer=true"), 100, 10_000, 0),
        (done("send-done", "token[]", _F32, ", is_host_transfer=true"), 100, 0, 0),
        ("async-done.3", 90, None, 0),  # a wait for work without a name
        (done("all-gather-done", _F32, _F32), 100, None, 10_000),
    ],
)
def test_asynchronous_operation_ends_count_as_core_waits(
    tmp_path: Path, operation: str, busy: int, to_device: int | None, communicated: int
) -> None:
    """A step of 100 us: 40 of work, 10 in the end of the operation, 50 of work."""
    us = 1_000
    plane: Lines = {
        "Steps": [("1", 0, 100 * us, {})],
        "XLA Ops": [
            ("fusion.1", 0, 40 * us, {}),
            (operation, 40 * us, 10 * us, {}),
            ("fusion.2", 50 * us, 50 * us, {}),
        ],
    }
    (node,), _ = import_files([write(tmp_path, encode_xspace({"/device:TPU:0": plane}))])
    assert list_busy_ns(node, "tpu0")[-1] == (100 * us, busy * us)
    copies = [(*span[:2], span[3]) for span in list_spans(node, layout.EXPOSED_COPY, 1)]
    assert copies == ([] if to_device is None else [(40 * us, 50 * us, to_device)])
    waits = list_spans(node, layout.EXPOSED_COLLECTIVE, 1)
    assert sum(span[3] for span in waits) == communicated


def test_host_memory_waits_are_lost_time_with_xla_advice(tmp_path: Path) -> None:
    """Of each of 40 steps of 10 ms the core waits 9 ms for a copy from the host."""
    ms = 1_000_000
    operations, steps = [], []
    for number in range(40):
        at = number * 10 * ms
        steps.append((str(number), at, 10 * ms, {}))
        operations.append((done("copy-done", _F32, _HOST), at, 9 * ms, {}))
        operations.append(("fusion.1", at + 9 * ms, ms, {}))
    plane: Lines = {"Steps": steps, "XLA Ops": operations}
    report = analyze(write(tmp_path, encode_xspace({"/device:TPU:0": plane})))
    (finding, *_) = report.findings
    assert finding.cause.id == "h2d-copy-bound"
    assert finding.lost_ns == 360 * ms
    assert "cuda" not in str(finding)


def test_devices_with_copies_alone_do_not_become_ranks(tmp_path: Path) -> None:
    """Devices 4 and 6 work one after the other, 300 and 400 ns; device 1 only copies."""
    planes: dict[str, Lines] = {
        "/device:GPU:1": {"Stream #1(MemcpyH2D)": [("MemcpyH2D", 2000, 10, {})]},
        "/device:GPU:4": {
            "Stream #2(Compute)": [("gemm", 0, 270, {})],
            "Steps": [("0", 0, 300, {})],
        },
        "/device:GPU:6": {
            "Stream #3(Compute)": [("gemm", 1000, 300, {})],
            "Steps": [("0", 1000, 400, {})],
        },
    }
    (node,), (account,) = import_files([write(tmp_path, encode_xspace(planes))])
    assert [device for *_, device in list_ranks(node)] == ["gpu4", "gpu6"]
    assert "devices that only copied are no ranks: 1" in account.notes
    first, second = (
        [span[:3] for span in list_spans(node, layout.STEP, pid)] for pid in (1, 1 + (1 << 23))
    )
    assert (first, second) == ([(0, 300, 0)], [(1000, 1400, 0)])
