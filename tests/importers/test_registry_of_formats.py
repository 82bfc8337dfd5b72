"""Every line of the registry is a whole importer; a file loads no more of them than it needs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from clusterprof.importers import registry
from clusterprof.importers.base import Importer
from clusterprof.importers.registry import IMPORTERS, importer_named


@pytest.mark.parametrize("one", IMPORTERS, ids=lambda one: one.name)
def test_every_format_is_a_whole_importer(one: Importer) -> None:
    assert one.name
    assert one.title
    assert isinstance(one.together, bool)
    for method in ("recognises", "nodes"):
        theirs = inspect.signature(getattr(type(one), method))
        assert list(theirs.parameters) == list(
            inspect.signature(getattr(Importer, method)).parameters
        )
    assert importer_named(one.name) is one


def test_names_are_given_once() -> None:
    names = [one.name for one in IMPORTERS]
    assert len(set(names)) == len(names) == len(IMPORTERS)
    assert importer_named("") is None
    assert IMPORTERS[0] is next(iter(IMPORTERS))
    assert IMPORTERS[-2:] == tuple(IMPORTERS)[-2:]


def test_every_importer_that_there_is_stands_in_it() -> None:
    folder = Path(registry.__file__).parent
    there = {
        path for path in folder.rglob("*.py")
        if "def recognises(" in path.read_text(encoding="utf-8") and path.name != "base.py"
    }  # fmt: skip
    assert {Path(inspect.getfile(type(one))) for one in IMPORTERS} == there


def test_what_stands_behind_the_format_of_a_file_is_not_loaded() -> None:
    code = (
        "import sys; from pathlib import Path; from clusterprof.importers import registry;"
        "print(registry.importer_of(b'{\"traceEvents\": [', Path('x.json')).name,"
        " 'clusterprof.importers.mllog' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "kineto False\n"
