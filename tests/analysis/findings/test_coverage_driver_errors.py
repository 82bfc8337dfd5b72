"""Notes of the report about errors that drivers reported while the job ran."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from clusterprof.analysis.findings.coverage import describe_driver_errors
from clusterprof.trace.schema import Event

S = 1_000_000_000
GPU = {"id": "GPU-7", "index": 3, "pci_bus_id": "00000000:3B:00.0"}
SLICE = {"id": "MIG-1", "index": 8, "pci_bus_id": "00000000:3B:00.0", "parent": "GPU-7"}


def node(name: str, *events: Event) -> Any:
    header = SimpleNamespace(started={"monotonic_ns": 100 * S}, devices=[SLICE, GPU])
    loaded = SimpleNamespace(header=header, events=events)
    return SimpleNamespace(facts=SimpleNamespace(name=name), loaded=loaded)


def xid(second: int, code: int, **more: Any) -> Event:
    about = {"pci": "0000:3b:00", "code": code, "text": "", "logged_ns": 0, "count": 1, **more}
    return Event((100 + second) * S, "gpu-xid", about)


def test_driver_errors_are_grouped_by_kind_and_device() -> None:
    lost = {"collector": "gpu_nvidia", "device": "GPU-7", "message": "GPU is lost", "call": "x"}
    switch = {"pci": "0000:c1:00.0", "code": 28006, "text": "Link 46", "count": 1}
    nodes = [
        node("n1"),
        node(
            "n2",
            xid(5, 31, text="MMU Fault"),
            Event(106 * S, "oom-kill", {}),
            xid(7, 31, count=2),
            xid(9, 79, pci="0000:86:00"),
            xid(9, 13, gpu_instance=3),
            Event(110 * S, "device-lost", lost),
            Event(111 * S, "nvswitch-sxid", switch),
        ),
    ]
    stated = "the NVIDIA driver reported"
    assert describe_driver_errors(nodes) == (
        f"{stated} Xid 31 of GPU 3 (GPU-7, 0000:3b:00) on n2 after 5 s, 3 times: MMU Fault",
        f"{stated} Xid 79 of the GPU at 0000:86:00 on n2 after 9 s",
        f"{stated} Xid 13 of GPU 3 (GPU-7, 0000:3b:00), GPU instance 3 on n2 after 9 s",
        "GPU-7 on n2 was lost after 10 s: GPU is lost",
        f"{stated} SXid 28006 of NVSwitch 0000:c1:00.0 on n2 after 11 s: Link 46",
    )


def test_many_driver_errors_are_summarized_and_malformed_errors_are_kept() -> None:
    many = describe_driver_errors([node("n", *(xid(1, code) for code in range(20)))])
    assert len(many) == 9
    assert many[-1] == "12 more kinds of driver errors were recorded"
    odd = Event(100 * S, "gpu-xid", {"pci": None, "count": "many"})
    assert describe_driver_errors([node("n", odd)]) == (
        "the NVIDIA driver reported Xid None of the GPU at None on n after 0 s",
    )
