"""The list of guards stays true: each stands in the source, and belongs to a fault."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.scenarios.faults.guards import GUARDS, UNGUARDED, Guard, remove_guard
from tests.scenarios.faults.registry import FAULTS
from tests.scenarios.faults.results import ROOT


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: f"{guard.fault}-{guard.file}")
def test_every_guard_exists_in_the_source_and_names_a_fault(guard: Guard, tmp_path: Path) -> None:
    for file, *_ in ((guard.file,), *guard.also):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "clusterprof" / file, tmp_path / file)
    remove_guard(guard, tmp_path)
    for file, *_ in ((guard.file,), *guard.also):
        source, without = (ROOT / "clusterprof" / file).read_text(), (tmp_path / file).read_text()
        assert without != source
        compile(without, file, "exec")
    assert guard.fault in {fault.name for fault in FAULTS}


def test_every_fault_has_a_guard_or_a_stated_exception() -> None:
    guarded = {guard.fault for guard in GUARDS}
    assert {fault.name for fault in FAULTS} == guarded | UNGUARDED.keys()
    assert not guarded & UNGUARDED.keys()


def test_a_missing_guard_is_refused(tmp_path: Path) -> None:
    path = tmp_path / GUARDS[0].file
    path.parent.mkdir(parents=True)
    path.write_text("")
    with pytest.raises(ValueError, match="0 times"):
        remove_guard(GUARDS[0], tmp_path)
