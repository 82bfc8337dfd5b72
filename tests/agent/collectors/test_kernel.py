"""Errors of GPUs out of the kernel's log: counted, recorded as events, and rate-limited."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.kernel import KernelLogCollector
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.kernel_log import KernelLog
from clusterprof.errors import Unavailable
from clusterprof.signals import KERNEL_GPU_ERRORS


def xid(code: int, text: str = "text", pci: str = "0000:3b:00", us: int = 7) -> bytes:
    return f"3,1,{us},-;NVRM: Xid (PCI:{pci}): {code}, {text}\n".encode()


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text("NVRM version: 570.00.01\n")
    return Roots(tmp_path, tmp_path)


def opened(roots: Roots, records: list[bytes]) -> KernelLogCollector:
    def read(fd: int, size: int) -> bytes:
        if not records:
            raise BlockingIOError(errno.EAGAIN, "nothing")
        return records.pop(0)

    context = Context(roots, None, lambda: [])
    collector = KernelLogCollector(context, lambda: KernelLog("/dev/null", read))
    assert collector.open() == [(KERNEL_GPU_ERRORS, "")]
    return collector


def test_kernel_log_errors_are_counted_and_reported_once(roots: Roots) -> None:
    records: list[bytes] = []
    collector = opened(roots, records)
    assert (collector.sample(), collector.events()) == ((0,), [])
    records += [
        xid(31, "MMU Fault", us=5),
        b"6,2,6,-;eth0: link up\n",
        xid(31, "MMU Fault again"),
        xid(79),
        xid(31, pci="0000:86:00 GPU-I:03"),
        b"4,9,8,-;nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Non-fatal\n",
    ]
    assert collector.sample() == (5,)
    reported = {"pci": "0000:3b:00", "count": 1, "logged_ns": 7000, "text": "text"}
    assert collector.events() == [
        ("gpu-xid", {**reported, "code": 31, "text": "MMU Fault", "logged_ns": 5000, "count": 2}),
        ("gpu-xid", {**reported, "code": 79}),
        ("gpu-xid", {**reported, "code": 31, "pci": "0000:86:00", "gpu_instance": 3}),
        (
            "nvswitch-sxid",
            {
                "pci": "0000:c1:00.0",
                "code": 12028,
                "text": "Non-fatal",
                "logged_ns": 8000,
                "count": 1,
            },
        ),
    ]
    assert (collector.sample(), collector.events()) == ((5,), [])
    collector.close()


def test_many_errors_are_all_counted_but_only_32_reported(roots: Roots) -> None:
    collector = opened(roots, [xid(code) for code in range(1, 101)])
    assert collector.sample() == (100,)
    assert [about["code"] for _, about in collector.events()] == list(range(1, 33))
    collector.close()


def test_a_node_without_the_nvidia_driver_is_absent(host: Callable[[str], Roots]) -> None:
    collector = KernelLogCollector(Context(host("vm-two-cores"), None, lambda: []))
    with pytest.raises(Unavailable) as raised:
        collector.open()
    assert raised.value == Unavailable("absent", "the NVIDIA driver is not loaded")
    collector.close()
