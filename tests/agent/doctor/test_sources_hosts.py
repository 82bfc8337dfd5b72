"""What `doctor` says of fixture machines: their whole output, at 80 columns.

CLUSTERPROF_ACCEPT_GOLDEN=1 writes tests/hosts/<name>/doctor.txt anew; look at the diff.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.collectors.registry import COLLECTORS
from clusterprof.agent.doctor.sources import SourceCheck, check_sources
from clusterprof.agent.linux.files import Roots
from clusterprof.cli.doctor import format_source_checks

HOSTS = Path(__file__).parents[2] / "hosts"

# what asks this machine, and not the fixture's files
ASKS_ELSEWHERE = (
    "sockets",
    "ethtool",
    "kernel_log",
    "gpu_nvidia",
    "gpu_gaudi",
    "gpu_neuron",
    "gpu_tpu",
    "portable",
    "portable_processes",
)
KINDS = [kind for kind in COLLECTORS if kind.name not in ASKS_ELSEWHERE]  # type: ignore[attr-defined]
HERE = {
    "h100-node": KINDS,
    "rdma-zoo": [kind for kind in KINDS if kind.name == "rdma"],  # type: ignore[attr-defined]
    "two-nics-one-down": [kind for kind in KINDS if kind.name == "network"],  # type: ignore[attr-defined]
}
"""What a fixture has files for: others of its collectors would only miss them."""


def looked(roots: Roots, kinds: Sequence[Any]) -> list[SourceCheck]:
    return check_sources(kinds, roots, pids=[4711])


@pytest.mark.parametrize("name", HERE)
def test_doctor_output_matches_the_golden_file(name: str, host: Callable[[str], Roots]) -> None:
    text = format_source_checks(looked(host(name), HERE[name]))
    path = HOSTS / name / "doctor.txt"
    if os.environ.get("CLUSTERPROF_ACCEPT_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_fit_the_terminal_and_reasons_are_not_cut(
    width: int, host: Callable[[str], Roots]
) -> None:
    looks = looked(host("rdma-zoo"), HERE["rdma-zoo"])
    text = format_source_checks(looks, width)
    assert max(map(len, text.splitlines())) <= width
    reasons = {hole.message for look in looks for hole in look.holes}
    assert len(reasons) > 6
    words = " ".join(text.split())
    assert sum(" ".join(reason.split()) in words for reason in reasons) == 6
    assert f"{len(reasons) - 6} more groups of missing signals: see --json" in words


def test_absent_hardware_shares_a_line_and_missing_sources_come_first() -> None:
    looks = [
        SourceCheck("cpu", "available", "7 signals of all", "", "", ""),
        SourceCheck("gpu_amd", "available", "24 signals of GPU-1", "", "", ""),
        SourceCheck("lustre", "absent", "", "no Lustre", "", "impossible here", elsewhere="Lustre"),
        SourceCheck("pressure", "absent", "", "no PSI", "boot with psi=1", "cluster admin"),
        SourceCheck("gpu_tpu", "absent", "", "no TPU", "", "impossible here", elsewhere="TPU"),
    ]
    assert format_source_checks(looks) == (
        "2 of the 3 sources of this node can be recorded.\n"
        "\n"
        "pressure  absent     no PSI\n"
        "                     cluster admin: boot with psi=1\n"
        "\n"
        "gpu_amd   available  24 signals of GPU-1\n"
        "\n"
        "cpu       available  7 signals of all\n"
        "\n"
        "Not on this node: Lustre, TPU.\n"
    )
