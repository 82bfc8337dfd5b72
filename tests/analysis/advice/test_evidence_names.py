"""Every name that a report can print as evidence has a page."""

from __future__ import annotations

import ast
import re

import pytest

from clusterprof.analysis.advice.evidence_names import build_evidence_page
from clusterprof.analysis.advice.pages import build_metric_page
from clusterprof.cli.explain import _find_page
from clusterprof.units import infer_unit
from tests.support.commands import TESTS

_NAME = re.compile(r"[a-z0-9][a-z0-9_]*(\.[a-z0-9_]+)+")
_FOLDERS = ("detectors", "attribution", "cross_rank", "job", "findings", "advice")


def list_printed_names() -> list[str]:
    """Return the dotted literals with a unit in the folders that make evidence."""
    names = set()
    for folder in _FOLDERS:
        for path in (TESTS.parent / "clusterprof" / "analysis" / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    names.add(node.value)
    return sorted(name for name in names if _NAME.fullmatch(name) and has_unit(name))


def has_unit(name: str) -> bool:
    try:
        infer_unit(name)
    except ValueError:
        return False
    return True


def test_every_name_in_the_code_that_makes_evidence_has_a_page() -> None:
    names = list_printed_names()
    assert len(names) > 100 and "worker.on_cpu_ratio" in names
    missing = [name for name in names if not (build_evidence_page(name) or build_metric_page(name))]
    assert missing == []


@pytest.mark.parametrize(
    ("name", "origin", "about"),
    [
        (
            "worker.on_cpu_ratio",
            "a number derived from the recording, in ratio",
            "Share of the waits for data in which the loading thread computed. High values mean"
            " that preparing the batches takes the time, not reading them.",
        ),
        (
            "host.asleep_ratio",
            "a number derived from the recording, in ratio",
            "Share of the lost time of the finding in which the training thread slept, or waited"
            " for a lock or a connection.",
        ),
    ],
)
def test_an_evidence_page_states_origin_and_meaning_of_the_number(
    name: str, origin: str, about: str
) -> None:
    assert _find_page(name) == (
        f"# {name}: {origin}\n\n{about}\n\nA finding shows it as evidence."
        " `clusterprof explain CAUSE` says how it is weighed.\n"
    )
