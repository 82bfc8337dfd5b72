"""The rules of the tests' own layout: folders of the package, and who may import whom."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "clusterprof"
LAB = TESTS.parent / "lab" / "clusterprof_lab"

DATA = {"hosts", "golden", "recordings", "analysis/importers/seeds", "analysis/importers/fuzzed"}
DATA |= {"lab/rivals/fixtures", "scenarios/training/scripts", "support/accelerators/site"}
"""Folders of files that tests read or run in a process of their own: no packages."""
OTHER_FOLDERS = {"deploy", "docs", "lab", "scenarios", "support", "tools"}
"""Files to deploy, the manual, the lab beside the package, whole stories, shared factories,
scripts."""
FREE_BELOW = {"scenarios", "support"}
"""Folders whose subfolders need no folder of the package."""


def list_test_files() -> list[Path]:
    """List the Python files below tests, without those in folders of data."""
    return [
        path
        for path in sorted(TESTS.rglob("*.py"))
        if not any(path.is_relative_to(TESTS / folder) for folder in DATA)
    ]


def list_folders() -> list[str]:
    folders = {path.parent.relative_to(TESTS).as_posix() for path in list_test_files()}
    return sorted(folders - {"."})


@cache
def list_imported_modules(path: Path) -> list[tuple[int, str]]:
    """List the line and the full name of every module that a file may import."""
    package = ("tests", *path.relative_to(TESTS).parts[:-1])
    imported = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*base, *([node.module] if node.module else [])])
            imported.append((node.lineno, source))
            imported += [(node.lineno, f"{source}.{alias.name}") for alias in node.names]
    return imported


def fail_with(offenders: list[str]) -> None:
    if offenders:
        pytest.fail("\n".join([f"{len(offenders)} found:", *offenders]), pytrace=False)


def test_no_module_imports_a_test_module() -> None:
    """What tests share is in tests.support or a fixture of a conftest.py."""
    test_modules = {path.stem for path in list_test_files() if path.stem.startswith("test_")}
    fail_with(
        [
            f"{path.relative_to(TESTS.parent)}:{line}: {name}"
            for path in list_test_files()
            for line, name in list_imported_modules(path)
            if set(name.split(".")) & test_modules
        ]
    )


def test_helpers_of_tests_are_imported_by_absolute_names() -> None:
    """A bare name would need its folder on the import path, and hide a module of that name."""
    own = {path.stem for path in list_test_files()} - {"__init__"} - sys.stdlib_module_names
    fail_with(
        [
            f"{path.relative_to(TESTS.parent)}:{line}: {name}"
            for path in list_test_files()
            for line, name in list_imported_modules(path)
            if name.split(".")[0] in own
        ]
    )


def test_folders_of_tests_mirror_the_package() -> None:
    offenders = []
    for folder in list_folders():
        top, _, below = folder.partition("/")
        mirrored = LAB / below if top == "lab" else PACKAGE / folder
        listed = folder in OTHER_FOLDERS or top in FREE_BELOW
        if not listed and not mirrored.is_dir():
            offenders.append(f"tests/{folder}: no folder of the package is called so")
        if not (TESTS / folder / "__init__.py").exists():
            offenders.append(f"tests/{folder}: no __init__.py")
    fail_with(offenders)


def test_every_listed_test_folder_exists() -> None:
    missing = [folder for folder in DATA | OTHER_FOLDERS if not (TESTS / folder).is_dir()]
    assert missing == []
