"""What `doctor` says of the fabric of fixture machines, and what a recording of them holds.

CLUSTERPROF_ACCEPT_GOLDEN=1 writes tests/hosts/<name>/{doctor,recording}.txt anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.network import EthtoolCollector, NetworkCollector
from clusterprof.agent.collectors.rdma import RdmaCollector
from clusterprof.agent.doctor.sources import check_fabric, check_sources
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.sampling.collector_runner import CollectorRunner
from clusterprof.agent.sampling.inventory import build_host_inventory
from clusterprof.cli.doctor import _print_source_checks
from clusterprof.errors import Unavailable
from tests.support.golden_hosts import PATIENCE, S, format_record, read_golden

HOSTS = Path(__file__).parents[2] / "hosts"

NAMES = ("dgx-h100-ib", "roce-cloud-node")


class Drivers:
    """What drivers count, from files as `ethtool -S` prints it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self, nic: str) -> list[str]:
        return [name for name, _ in self._lines(nic)]

    def values(self, nic: str, indices: Sequence[int], count: int) -> list[int]:
        numbers = [number for _, number in self._lines(nic)]
        assert len(numbers) == count
        return [numbers[index] for index in indices]

    def close(self) -> None:
        pass

    def _lines(self, nic: str) -> list[tuple[str, int]]:
        path = self._folder / nic
        if not path.exists():
            raise Unavailable("absent", f"the driver of {nic} keeps no statistics of its own", "")
        pairs = [line.rpartition(":") for line in path.read_text().splitlines()[1:]]
        return [(name.strip(), int(number)) for name, _, number in pairs]


def kinds(name: str) -> list[Any]:
    """The collectors of a fabric, in no hurry; cards answer from the fixture's files."""

    class Rdma(RdmaCollector):
        def __init__(self, context: Context) -> None:
            super().__init__(context, first_wait_seconds=PATIENCE)

    class Ethtool(EthtoolCollector):
        def __init__(self, context: Context) -> None:
            drivers = Drivers(HOSTS / name / "ethtool")
            super().__init__(context, statistics=lambda: drivers, first_wait_seconds=PATIENCE)

    return [NetworkCollector, Ethtool, Rdma]


@pytest.mark.parametrize("name", NAMES)
def test_doctor_reports_the_expected_lines(
    name: str, host: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    roots = host(name)
    _print_source_checks([*check_sources(kinds(name), roots), check_fabric(roots)], as_json=False)
    read_golden(name, "doctor.txt", capsys.readouterr().out)


@pytest.mark.parametrize("name", NAMES)
def test_the_recording_matches_the_golden_file(name: str, host: Any) -> None:
    read_golden(name, "recording.txt", "\n".join(recorded(name, host(name))) + "\n")


def recorded(name: str, roots: Roots) -> Iterator[str]:
    """The inventory of the header and one sample of each collector, as lines."""
    inventory = build_host_inventory(roots)
    for part in ("nics", "hcas", "rails", "gpu_nics"):
        for entry in inventory[part]:
            yield f"{part} {json.dumps(entry)}"
    yield f"gpudirect {json.dumps(inventory['gpudirect'])}"
    for kind in kinds(name):
        slot = CollectorRunner(kind(Context(roots, None, list)), S, pytest.fail)
        slot.open(S)
        slot.tick(S)
        for record in slot.take(S):
            yield from format_record(record)
        slot.close()
