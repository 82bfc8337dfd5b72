"""The list of guards stays true: each stands in the source, and belongs to a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.faults.guards import GUARDS, Guard, remove_guard
from tests.scenarios.faults.registry import FAULTS
from tests.scenarios.faults.results import ROOT


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: f"{guard.fault}-{guard.file}")
def test_a_guard_stands_in_the_source_and_its_fault_exists(guard: Guard, tmp_path: Path) -> None:
    source = ROOT / "clusterprof" / guard.file
    copy = tmp_path / "copy.py"
    copy.write_text(source.read_text())
    remove_guard(guard, copy)
    assert copy.read_text() != source.read_text()
    compile(copy.read_text(), str(source), "exec")
    assert guard.fault in {fault.name for fault in FAULTS}


def test_a_guard_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("")
    with pytest.raises(ValueError, match="0 times"):
        remove_guard(GUARDS[0], path)
