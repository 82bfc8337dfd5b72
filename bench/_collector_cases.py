"""Where collectors are measured: this machine, fixture hosts, simulated libraries and tools."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.threads import ThreadsCollector
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.network.netdev import EthtoolStatistics
from clusterprof.errors import Unavailable

HOSTS = Path(__file__).resolve().parent.parent / "tests/hosts"
FIXTURE_PIDS = [4711, 4712]
ALWAYS_HERE = (
    "cpu",
    "cores",
    "pressure",
    "memory",
    "cgroup",
    "threads",
    "processes",
    "disk",
    "network",
    "sockets",
    "placement",
    "kernel_threads",
    "reclaim",
    "shm",
    "portable",
    "portable_processes",
)
WITH_THREADS = ("processes", "sockets")  # take what `threads` has read in the same tick
FIXTURES = {
    "cgroup": ("h100-node", "cgroup-v1"),
    "disk": ("h100-node", "lustre-nfs"),
    "mounts": ("h100-node", "lustre-nfs"),
    "lustre": ("lustre-nfs",),
    "cifs": ("lustre-nfs",),
    "network": ("h100-node",),
    "kernel_log": ("h100-node",),
    "gpu_amd": ("mi300x-node",),
    "gpu_intel": ("intel-max-node",),
}
_PATIENCE_S = 10.0
STATISTICS = 800  # of a card of mlx5 with 64 queues, about
Made = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Case:
    """A collector on one kind of node."""

    where: str
    made: Made
    """Gives the collector, and closes it."""
    company: Callable[[], AbstractContextManager[Any]]
    """Gives what is called before each sample and not counted, or None."""
    here: bool = False


def list_cases(kind: Any, folder: Path, pids: list[int]) -> list[Case]:
    """Return what a collector is measured on; of one that is not known here the first host it
    finds something on."""
    special: dict[str, Callable[[Any, Path, list[int]], list[Case]]] = {
        "ethtool": _make_ethtool_cases,
        "rdma": _make_rdma_cases,
        "gpu_nvidia": _make_nvidia_cases,
        "gpu_gaudi": _make_gaudi_cases,
        "gpu_neuron": _make_neuron_cases,
        "gpu_tpu": _make_tpu_cases,
        "gpu_emulated": _make_emulated_cases,
    }
    if kind.name in special:
        return special[kind.name](kind, folder, pids)
    chosen = [_make_local_case(kind, pids)] if kind.name in ALWAYS_HERE else []
    hosts = FIXTURES.get(kind.name, ())
    if not chosen and not hosts:
        try:
            probe = kind(Context(Roots(), None, lambda: pids))
            probe.open()
            probe.close()
            return [_make_local_case(kind, pids)]
        except Unavailable:
            hosts = tuple(name for name in sorted(os.listdir(HOSTS)) if _can_open(kind, name))[:1]
    return chosen + [_make_fixture_case(kind, name) for name in hosts]


def _can_open(kind: Any, name: str) -> bool:
    collector = kind(_make_fixture(name))
    try:
        collector.open()
    except Exception:
        return False
    collector.close()
    return True


def _make_fixture(name: str) -> Context:
    return Context(Roots(HOSTS / name / "proc", HOSTS / name / "sys"), None, lambda: FIXTURE_PIDS)


@contextmanager
def do_nothing() -> Iterator[None]:
    """Nothing is called before a sample."""
    yield None


def _make_case(where: str, collector: Callable[[], Any], here: bool = False) -> Case:
    @contextmanager
    def made() -> Iterator[Any]:
        opened = collector()
        try:
            yield opened
        finally:
            opened.close()

    return Case(where, made, do_nothing, here)


def _make_local_case(kind: Any, pids: list[int]) -> Case:
    around = Context(Roots(), None, lambda: pids)

    @contextmanager
    def company() -> Iterator[Any]:
        threads = ThreadsCollector(around)
        threads.open()
        yield threads.sample
        threads.close()

    made = _make_case("this machine", lambda: kind(around), True)
    companion = company if kind.name in WITH_THREADS else do_nothing
    return Case(made.where, made.made, companion, True)


def _make_fixture_case(kind: Any, name: str) -> Case:
    return _make_case(name, lambda: kind(_make_fixture(name)))


class SimulatedCard(EthtoolStatistics):
    """A network card with many statistics behind the real reader; only the ioctl is replaced."""

    def __init__(self) -> None:
        self._buffer = array("Q")
        self._names = [f"rx{i}_cache_full".encode() for i in range(STATISTICS - 4)]
        self._names += [b"rx_prio3_pause", b"tx_prio3_pause", b"rx_discards_phy", b"rx_ecn_mark"]

    def close(self) -> None:
        """There is no socket."""

    def _request(self, nic: str, request: Any) -> None:
        command = struct.unpack_from("=I", request)[0]
        if request.typecode == "Q":
            struct.pack_into("=II", request, 0, command, STATISTICS)
            for index in range(STATISTICS):
                request[1 + index] = index
        elif len(request) > 64:
            struct.pack_into("=I", request, 8, STATISTICS)
            for index, name in enumerate(self._names):
                request[12 + 32 * index : 12 + 32 * index + len(name)] = array("B", name)
        else:
            struct.pack_into("=I", request, 16, STATISTICS)


def _make_rdma_cases(kind: Any, folder: Path, pids: list[int]) -> list[Case]:
    return [
        _make_case(
            "rdma-zoo", lambda: kind(_make_fixture("rdma-zoo"), first_wait_seconds=_PATIENCE_S)
        )
    ]


def _make_ethtool_cases(kind: Any, folder: Path, pids: list[int]) -> list[Case]:
    more = {"statistics": SimulatedCard, "first_wait_seconds": _PATIENCE_S}
    return [
        _make_case("rdma-zoo, simulated cards", lambda: kind(_make_fixture("rdma-zoo"), **more))
    ]


def _make_isolated_case(name: str, environment: dict[str, str], sure: bool = False) -> Any:
    from clusterprof.agent.isolation.collector import IsolatedCollector

    more = {"absent": lambda environ: None} if sure else {}
    return IsolatedCollector(
        name,
        Context(Roots(), None, list),
        environment={**os.environ, **environment},
        first_wait_seconds=_PATIENCE_S,
        **more,
    )


# The simulated NVML reads its text at every call, which costs more than what is measured: here each
# answer is looked up once by a thread and kept.
_FIND = "static int find(long device, const char *call, int value, char *rest, size_t size) {"
_KEPT = """
static int find(long device, const char *call, int value, char *rest, size_t size) {
    static __thread struct { long device; int value, found; char call[64], rest[4096]; } *kept;
    unsigned long at = device * 31 + value;
    for (const char *c = call; *c; c++) at = at * 131 + (unsigned char)*c;
    if (!kept && !(kept = calloc(1024, sizeof *kept))) abort();
    for (at %= 1024; kept[at].call[0]; at = (at + 1) % 1024)
        if (kept[at].device == device && kept[at].value == value && !strcmp(kept[at].call, call)) {
            strncpy(rest, kept[at].rest, size - 1)[size - 1] = 0;
            return kept[at].found;
        }
    kept[at].device = device, kept[at].value = value;
    strncpy(kept[at].call, call, sizeof kept[at].call - 1);
    kept[at].found = find_once(device, call, value, kept[at].rest, sizeof kept[at].rest);
    strncpy(rest, kept[at].rest, size - 1)[size - 1] = 0;
    return kept[at].found;
}
"""


def _build_nvml(folder: Path) -> Path:
    from tests.support.nvml.simulated import SOURCE

    text = SOURCE.read_text()
    assert _FIND in text, "the simulated NVML is made otherwise now"
    declared = f"{_FIND.removesuffix(' {')};\n{_FIND.replace('find(', 'find_once(')}"
    folder.mkdir()
    (folder / "sim.c").write_text(text.replace(_FIND, declared) + _KEPT)
    library = folder / "libnvidia-ml.so.1"
    command = ["cc", "-shared", "-fPIC", "-O2", "-w", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([*command, "-o", str(library), str(folder / "sim.c")], check=True)
    return library


def _make_nvidia_cases(kind: Any, folder: Path, pids: list[int]) -> list[Case]:
    from tests.support.nvml.simulated import Scenario, make_environment

    library = _build_nvml(folder / "nvml")
    scenario = Scenario(folder / "scenario", devices=8)
    variables = make_environment(library, scenario)
    return [_make_case("8 simulated", lambda: _make_isolated_case(kind.name, variables))]


def _make_gaudi_cases(kind: Any, folder: Path, pids: list[int]) -> list[Case]:
    from tests.support.accelerators.simulated import prepend_to_path

    path = {"PATH": prepend_to_path(HOSTS / "gaudi-node/tools")}
    return [_make_case("gaudi-node", lambda: _make_isolated_case(kind.name, path))]


def _make_neuron_cases(kind: Any, folder: Path, pids: list[int]) -> list[Case]:
    from tests.support.accelerators.simulated import prepend_to_path, write_tool

    tools = HOSTS / "trn1-node/tools"
    report = (tools / "reports.jsonl").read_text().splitlines()[0]
    (folder / "report.jsonl").write_text(report + "\n")
    own = write_tool(folder / "neuron", "neuron-ls", f'exec {tools}/neuron-ls "$@"')
    write_tool(own, "neuron-monitor", f"while :; do cat {folder}/report.jsonl; sleep 1; done")
    return [
        _make_case(
            "trn1-node", lambda: _make_isolated_case(kind.name, {"PATH": prepend_to_path(own)})
        )
    ]


def _make_tpu_cases(kind: Any, folder: Path, pids: list[int]) -> list[Case]:
    from tests.support.accelerators.simulated import SITE, write_tpu

    write_tpu(folder / "tpu")
    sys.path.append(str(SITE))  # a helper looks where its recorder does
    variables = {"FAKETPU": str(folder / "tpu")}
    return [_make_case("2 simulated", lambda: _make_isolated_case(kind.name, variables, sure=True))]


def _make_emulated_cases(kind: Any, folder: Path, pids: list[int]) -> list[Case]:
    from clusterprof.demo.accelerator import EmulatedAccelerator

    devices = folder / "run/devices"
    devices.mkdir(parents=True, mode=0o700)
    made = [EmulatedAccelerator(devices / f"{index}.emulated") for index in range(8)]
    around = Context(Roots(), folder / "run", lambda: pids)
    _EMULATED.extend(made)
    return [_make_case("8 emulated", lambda: kind(around))]


_EMULATED: list[Any] = []  # their pages live as long as they do
