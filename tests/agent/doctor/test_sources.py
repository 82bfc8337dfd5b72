"""What `doctor` makes of collectors that see all, some or nothing, or fall over."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from clusterprof.agent.doctor.sources import SourceCheck, check_sources, check_spans, find_owner
from clusterprof.errors import Unavailable
from clusterprof.signals import DISK_READS, DISK_WRITES

WHY = Unavailable("denied", "/proc/x: permission denied", "run as root")


class Disks:
    """Two signals of two disks; a test changes what happens."""

    name: ClassVar[str] = "disks"
    isolated: ClassVar[bool] = False
    answer: ClassVar[Any] = [1, 2, 3, 4]
    closed: ClassVar[int] = 0

    def __init__(self, context: Any) -> None:
        pass

    def open(self) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return [(signal, disk) for disk in ("vda", "vdb") for signal in (DISK_READS, DISK_WRITES)]

    def sample(self) -> Any:
        return self.answer

    def close(self) -> None:
        type(self).closed += 1


def look(answer: Any) -> SourceCheck:
    kind = type("Disks", (Disks,), {"answer": answer})
    (result,) = check_sources([kind])
    assert kind.closed == (0 if isinstance(answer, BaseException) else 1)
    return result


def test_a_source_with_all_values_is_available() -> None:
    assert look([1, 2, 3, 4]) == SourceCheck(
        "disks", "available", "2 signals of vda, vdb", "", "", ""
    )


def test_a_source_with_missing_values_lists_the_reasons() -> None:
    outcomes = look([1, WHY, 3, WHY])
    assert outcomes.status == "available"
    assert outcomes.missing == ("disk.writes_total: /proc/x: permission denied",)


def test_a_source_without_values_reports_the_reason() -> None:
    expected = SourceCheck("disks", "denied", "", WHY.message, "run as root", "cluster admin")
    assert look([WHY] * 4) == expected
    assert look(WHY) == expected


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), MemoryError()])
def test_a_crashing_collector_is_reported_as_a_clusterprof_bug(error: BaseException) -> None:
    outcomes = look(error)
    assert (outcomes.status, outcomes.owner) == ("failed", "you")
    assert outcomes.message.startswith(type(error).__name__)


@pytest.mark.parametrize(
    ("why", "owner"),
    [
        (Unavailable("absent", "no NFS is mounted"), "impossible here"),
        (Unavailable("absent", "missing", "pip install nvidia-ml-py", True), "you"),
        (Unavailable("absent", "no PSI", "boot with psi=1"), "cluster admin"),
        # The field counts, not the words: this option is one of the kernel's.
        (Unavailable("absent", "no PSI", "set psi=1 at boot"), "cluster admin"),
        (Unavailable("denied", "hidden", "mount /proc without hidepid"), "cluster admin"),
        (Unavailable("failed", "broken", "report this as a bug", True), "you"),
    ],
)
def test_the_owner_of_a_remedy_is_identified(why: Unavailable, owner: str) -> None:
    assert find_owner(why) == owner


def test_spans_are_available_on_this_machine() -> None:
    result = check_spans({})
    assert (result.name, result.status) == ("spans", "available")
