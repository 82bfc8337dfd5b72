"""Forged recordings: the same number is the same input, and the analysis ends in a report."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.scenarios.fuzz.forge import forge_recording
from tests.scenarios.fuzz.run_forged import RECORDINGS, prepare_process, run_limited, try_forged

FORMER = (144, 3005, 3421, 3532, 4614)
"""Numbers that once ended in a traceback, or did not end."""


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_forged_recordings_end_in_a_report_or_a_refusal(first: int) -> None:
    prepare_process()
    numbers = range(first, first + 10)
    assert [(number, *try_forged(number)) for number in numbers] == [
        (number, "", "") for number in numbers
    ]


def test_formerly_failing_forgeries_are_handled() -> None:
    prepare_process()
    assert [try_forged(number) for number in FORMER] == [("", "")] * len(FORMER)


def test_a_seed_number_gives_the_same_forgery(tmp_path: Path) -> None:
    contents = []
    for name in ("a", "b"):
        shutil.copytree(RECORDINGS / "v1", tmp_path / name)
        forge_recording(tmp_path / name, 3)
        contents.append([path.read_bytes() for path in sorted((tmp_path / name).rglob("*.cpf"))])
    original = [path.read_bytes() for path in sorted((RECORDINGS / "v1").rglob("*.cpf"))]
    assert contents[0] == contents[1] != original


def test_crashes_and_missing_answers_are_findings() -> None:
    assert run_limited(lambda: ("KeyError at waits.py:205", "trace"))[0].startswith("KeyError")
    assert run_limited(lambda: [bytearray(1 << 40)] and ("", ""))[0] == "no answer"
