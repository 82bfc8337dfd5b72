"""Advice contexts made by hand: one finding with its numbers, on a node of 16 CPUs with free
capacity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from clusterprof.analysis.advice.context import (
    AdviceContext,
    Disk,
    LoaderSettings,
    Machine,
    Mount,
    RankSetup,
)
from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.report.model import UNKNOWN_RESOURCE, Culprit, Evidence, Finding
from clusterprof.units import infer_unit

S = 1_000_000_000
GIB = 1 << 30
MACHINE = Machine(
    "node-a",
    "",
    cpus=16,
    numa_nodes=2,
    memory_bytes=256 * GIB,
    min_available_bytes=200 * GIB,
    other_processes_cpu_ratio=0.3,
    disks=(Disk("nvme0n1", False), Disk("sda", True)),
    mounts=(Mount("/data", "nfs4", "filer:/export/data", 1),),
    hcas=("mlx5_0", "mlx5_1"),
)
LOADER = LoaderSettings(4, prefetch=2, pinned=False, persistent=False)
SETUP = RankSetup(
    LOADER, 8, 8, 1, 1, gpu_memory_free_ratio=0.5, step_ns=S // 2, steps=400, own_loss_ratio=0.4
)


def make_finding(cause: str, **changes: Any) -> Finding:
    """Make a finding: rank 3 of node-a lost 40 s of 100 s in steps, and a fix saves all of it."""
    culprit = Culprit("node-a", 3, "GPU-3", "", own_ns=40 * S)
    made = Finding(CAUSES[cause], 40 * S, 0.4, 40 * S, 0.9, "A", False, False, culprits=(culprit,))
    return replace(made, **changes)


def make_evidence(**values: float) -> tuple[Evidence, ...]:
    """Make evidence without notes; a double underscore stands for the dot in a name."""
    named = {name.replace("__", "."): value for name, value in values.items()}
    return tuple(
        Evidence(name, value, infer_unit(name.replace(".", "_"))) for name, value in named.items()
    )


def make_context(cause: str, evidence: tuple[Evidence, ...] = (), **changes: Any) -> AdviceContext:
    """Make the advice context of a job of one rank; keywords set fields of finding, machine and
    setup."""
    about = {name: changes.pop(name) for name in list(changes) if name in Finding.__slots__}
    if "resource" in changes:
        facts = changes.pop("resource_facts", UNKNOWN_RESOURCE)
        text = changes.pop("resource")
        culprit = Culprit("node-a", 3, "GPU-3", text, own_ns=40 * S, resource_facts=facts)
        about["culprits"] = (culprit,)
    setup = {name: changes.pop(name) for name in list(changes) if name in RankSetup.__slots__}
    machine = {name: changes.pop(name) for name in list(changes) if name in Machine.__slots__}
    return AdviceContext(
        make_finding(cause, **about),
        evidence,
        replace(SETUP, **setup),
        replace(MACHINE, **machine),
        **changes,
    )
