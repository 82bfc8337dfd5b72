"""Every line of the registry is a whole importer; a file loads no more of them than it needs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from clusterprof.analysis.importers import registry
from clusterprof.analysis.importers.core.base import Importer
from clusterprof.analysis.importers.registry import IMPORTERS, get_importer


@pytest.mark.parametrize("importer", IMPORTERS, ids=lambda item: item.name)
def test_every_registered_format_implements_the_importer_interface(importer: Importer) -> None:
    assert importer.name
    assert importer.title
    assert isinstance(importer.combines_files, bool)
    for method in ("recognizes", "nodes"):
        theirs = inspect.signature(getattr(type(importer), method))
        assert list(theirs.parameters) == list(
            inspect.signature(getattr(Importer, method)).parameters
        )
    assert get_importer(importer.name) is importer


def test_importer_names_are_unique() -> None:
    names = [importer.name for importer in IMPORTERS]
    assert len(set(names)) == len(names) == len(IMPORTERS)
    assert get_importer("") is None
    assert IMPORTERS[0] is next(iter(IMPORTERS))
    assert IMPORTERS[-2:] == tuple(IMPORTERS)[-2:]


def test_every_importer_is_registered() -> None:
    folder = Path(registry.__file__).parent
    there = {
        path
        for path in folder.rglob("*.py")
        if "def recognizes(" in path.read_text(encoding="utf-8") and path.name != "base.py"
    }
    assert {Path(inspect.getfile(type(importer))) for importer in IMPORTERS} == there


def test_unneeded_importers_are_not_loaded() -> None:
    code = (
        "import sys; from pathlib import Path; from clusterprof.analysis.importers import registry;"
        "print(registry.find_importer(b'{\"traceEvents\": [', Path('x.json')).name,"
        " 'clusterprof.analysis.importers.workloads.mllog' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "kineto False\n"
