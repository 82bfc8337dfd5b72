"""GPUs of makers of which a node has none are not missed; a GPU that cannot be read is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from clusterprof.analysis.findings.coverage import list_coverage_gaps
from clusterprof.errors import DEVICES_RELEASED
from clusterprof.trace.reader import Damage, SkippedInput
from clusterprof.trace.schema import Event, Gap
from tests.support.builders import make_header

AMD = {"id": "GPU-1f", "vendor": "amd", "emulated": False}
EMULATED = {"id": "emulated-0", "emulated": True}


def node(name: str, devices: list[dict[str, Any]], *gaps: Gap) -> Any:
    loaded = SimpleNamespace(
        header=replace(make_header(), devices=devices),
        gaps=gaps,
        damage=Damage(),
        dropped_spans=0,
        events=(),
    )
    return SimpleNamespace(loaded=loaded, facts=SimpleNamespace(name=name))


def unseen_on(*nodes: Any) -> list[tuple[str, str]]:
    """Notes about sources, without those about causes that could not be evaluated."""
    sources = ("gpu", "lustre", "mounts", "rdma")
    coverage_gaps = list_coverage_gaps(nodes, [], {}, [])
    return [(gap.what, gap.message) for gap in coverage_gaps if gap.what.startswith(sources)]


def unseen(devices: list[dict[str, Any]], *gaps: Gap) -> list[tuple[str, str]]:
    return unseen_on(node("node-1", devices, *gaps))


def gap(collector: str, kind: Any, message: str, signal: str = "", device: str = "") -> Gap:
    return Gap(5, collector, signal, device, kind, message, "")


RELEASED = gap("gpu_amd", "failed", DEVICES_RELEASED.message)


def released(*events: tuple[float, str]) -> list[tuple[str, str, str]]:
    """Gaps of a node whose recording began at 2 s and that had these (time, event)."""
    made = node("node-1", [AMD], RELEASED)
    made.loaded.header = replace(made.loaded.header, started={"monotonic_ns": 2 * 10**9})
    made.loaded.events = tuple(
        Event(round(seconds * 1e9), kind, {"collectors": ["gpu_amd"]}) for seconds, kind in events
    )
    gaps = list_coverage_gaps([made], [], {}, [])
    return [(gap.what, gap.message, gap.remedy) for gap in gaps if gap.what == "gpu_amd"]


def test_files_that_were_changed_are_listed_as_lost() -> None:
    made = node("node-1", [])
    made.loaded.damage = Damage(altered_segments=2, altered_example="000003.cpf")
    (gap,) = [gap for gap in list_coverage_gaps([made], [], {}, []) if gap.kind == "lost"]
    assert (gap.what, gap.remedy) == ("recording of node-1", "analyze the original recording")
    assert gap.message == (
        "2 files are not as the recorder closed them (SHA256SUMS); the first: 000003.cpf"
    )


OFF, ON = "devices-released", "devices-resumed"


def test_a_release_of_devices_is_reported_with_its_times() -> None:
    twice = "from 1.5 s to 10.0 s, from 20.0 s to the end"
    assert released((3.5, OFF), (12.0, ON)) == [
        ("gpu_amd", "released on SIGUSR2 from 1.5 s to 10.0 s", "")
    ]
    assert released((3.5, OFF), (12.0, ON), (22.0, OFF)) == [
        ("gpu_amd", f"released on SIGUSR2 {twice}", "send SIGUSR2 to the recorder again")
    ]


def test_of_many_releases_the_first_are_listed() -> None:
    events = [(2 + n + half / 2, (OFF, ON)[half]) for n in range(6) for half in (0, 1)]
    shown = ", ".join(f"from {n}.0 s to {n}.5 s" for n in range(4))
    assert released(*events) == [("gpu_amd", f"released on SIGUSR2 {shown}, and 2 more times", "")]


def test_a_release_whose_events_are_missing_is_reported_without_times() -> None:
    assert released() == [("gpu_amd", "released on SIGUSR2", "")]


NO_NFS = gap("mounts", "absent", "no NFS file system is mounted")
NO_LUSTRE = gap("lustre", "absent", "no Lustre file system is mounted")


NO_NVIDIA = gap("gpu_nvidia", "absent", "no library")
NO_INTEL = gap("gpu_intel", "absent", "no device of the driver i915 or xe")
NO_AMD = gap("gpu_amd", "absent", "no device of the driver amdgpu")


def test_gpu_makers_absent_from_a_node_are_not_reported() -> None:
    assert unseen([AMD], NO_NVIDIA, NO_INTEL) == []


def test_a_node_without_gpus_reports_a_single_gap() -> None:
    for devices in ([], [EMULATED]):
        assert unseen(devices, NO_NVIDIA, NO_INTEL, NO_AMD) == [("gpu_nvidia", "no library")]


def test_gaps_of_a_present_gpu_are_reported() -> None:
    silent = gap("gpu_amd", "failed", "the driver does not answer")
    table = gap("gpu_amd", "absent", "v1.3 does not tell it", "gpu.energy_joules_total", "GPU-1f")
    assert unseen([AMD], silent, table) == [
        ("gpu.energy_joules_total", "v1.3 does not tell it"),
        ("gpu_amd", "the driver does not answer"),
    ]


def test_file_systems_absent_on_all_nodes_are_not_listed() -> None:
    bare = [node(f"node-{number}", [AMD], NO_NFS, NO_LUSTRE) for number in (1, 2)]
    assert unseen_on(*bare) == []


def test_a_mount_that_only_some_nodes_lack_is_reported() -> None:
    nodes = node("node-1", [AMD], NO_NFS, NO_LUSTRE), node("node-2", [AMD], NO_LUSTRE)
    assert unseen_on(*nodes) == [("mounts", "no NFS file system is mounted (on node-1)")]


def test_a_present_but_unreadable_source_is_reported() -> None:
    denied = gap("lustre", "denied", "debugfs is root's")
    asked = Gap(5, "gpu_neuron", "", "", "absent", "neuron-monitor was not found", "install it")
    assert unseen([AMD], NO_NFS, denied, asked) == [
        ("gpu_neuron", "neuron-monitor was not found"),
        ("lustre", "debugfs is root's"),
    ]


def test_what_is_missing_is_known_by_its_source_and_not_by_its_name() -> None:
    """Advice asks for the source; a folder of the user may be called like one."""
    gaps = (
        gap("gpu_amd", "failed", "the driver does not answer", "gpu.energy_joules_total"),
        gap("lustre", "failed", "its counters cannot be read"),
    )
    left_out = SkippedInput(Path("disk"), "no recording", "leave it out", is_copy=False)
    listed = list_coverage_gaps([node("node-1", [AMD], *gaps)], [], {}, [left_out])
    sources = {blind.what: blind.source for blind in listed}
    assert sources == {"disk": "", "gpu.energy_joules_total": "gpu", "lustre": "lustre"}
