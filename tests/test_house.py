"""The rules of the house: what a newcomer may rely on, and what the build says when it breaks."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import clusterprof.collectors
import clusterprof.detectors
import clusterprof.renderers
from clusterprof.signals import CATALOGUE

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "clusterprof"
LONGEST_FILE = 300
LONGEST_FUNCTION = 60
PAGE_SECTIONS = [
    "## What it sees",
    "## Why the GPU waits",
    "## How it decides",
    "## What to do",
    "## Where it is blind",
]


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def modules_of(package: object, leave_out: set[str]) -> set[str]:
    names = {module.name for module in pkgutil.iter_modules(package.__path__)}  # type: ignore[attr-defined]
    return names - leave_out


@pytest.mark.parametrize("path", python_files("clusterprof", "tests", "bench", "lab"), ids=str)
def test_no_file_and_no_function_is_long(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= LONGEST_FILE
    long = [
        f"{node.name}: {lines} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := node.end_lineno - node.lineno + 1) > LONGEST_FUNCTION  # type: ignore[operator]
    ]
    assert long == []


def test_no_two_test_files_bear_one_name() -> None:
    """Without packages pytest imports them by name, and the second ends the whole run."""
    names = [path.name for path in python_files("tests") if path.name.startswith("test_")]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


def test_every_collector_is_registered_under_its_file_name() -> None:
    from clusterprof.collectors.registry import COLLECTORS

    names = [collector.name for collector in COLLECTORS]
    assert len(set(names)) == len(names)
    bindings = {"nvml", "hlml", "neuron", "tpu"}
    files = modules_of(clusterprof.collectors, {"base", "registry"} | bindings)
    assert files == set(names)


def test_every_collector_says_its_source_privilege_cost_and_where_it_is_blind() -> None:
    from clusterprof.collectors.registry import COLLECTORS

    sections = ["## Source", "## Privilege", "## Cost", "## Where it is blind"]
    for collector in COLLECTORS:
        doc = sys.modules[collector.__module__].__doc__ or ""
        assert re.findall(r"^## .*$", doc, re.MULTILINE) == sections, collector.name
        parts = re.split(r"^## .*$", doc, flags=re.MULTILINE)
        assert all(part.strip() for part in parts), collector.name
        page = (ROOT / f"docs/collectors/{collector.name}.md").read_text(encoding="utf-8")
        signals = page.partition("## Source")[0].rpartition("|---|")[2]
        assert signals.count("\n| `") >= 1, f"{collector.name}: its page names no signals"


def test_what_a_collector_costs_is_in_the_bench() -> None:
    from clusterprof.collectors.registry import COLLECTORS

    text = (ROOT / "bench/README.md").read_text(encoding="utf-8")
    table = text.partition("== collector_cost")[2].partition("\n== ")[0]
    rows = [line.split() for line in table.splitlines() if line.startswith("  ")]
    percents: dict[str, list[float]] = {}
    for words in rows:
        percents.setdefault(words[0], []).append(float(words[-1]))
    names = {collector.name for collector in COLLECTORS}
    assert names - set(percents) == set(), "run `python -m bench collector_cost` and save it"
    over = {name for name in names if max(percents[name]) > 2.0}  # % of one core, by default
    assert over == set()


def test_every_cause_is_registered_under_its_file_name_and_has_a_whole_page() -> None:
    from clusterprof.detectors.registry import DETECTORS

    ids = [detector.cause.id for detector in DETECTORS]
    assert len(set(ids)) == len(ids)
    shared = {"asleep", "pauses", "base", "registry", "pages", "peers", "network", "storage",
              "storage_others"}  # fmt: skip
    files = modules_of(clusterprof.detectors, shared)
    assert {name.replace("_", "-") for name in files} == set(ids)
    for name in files:
        page = importlib.import_module(f"clusterprof.detectors.{name}").__doc__ or ""
        assert re.findall(r"^## .*$", page, re.MULTILINE) == PAGE_SECTIONS, name
        assert all(part.strip() for part in re.split(r"^## .*$", page, flags=re.MULTILINE)), name


def test_every_cause_between_ranks_has_a_whole_page() -> None:
    from clusterprof.detectors.pages import page
    from clusterprof.detectors.peers import PEER_CAUSES

    for cause in PEER_CAUSES:
        sections = re.findall(r"^## .*$", page(cause.id), re.MULTILINE)
        assert sections == PAGE_SECTIONS, cause.id


def test_every_output_is_registered_under_its_word() -> None:
    from clusterprof.renderers.registry import RENDERERS

    names = [renderer.name for renderer in RENDERERS]
    assert len(set(names)) == len(names)
    for renderer in RENDERERS:
        assert renderer.__module__.startswith(f"clusterprof.renderers.{renderer.name}"), (
            renderer.name
        )


def test_every_signal_is_named_once_and_says_its_unit() -> None:
    names = [signal.name for signal in CATALOGUE]
    assert len(set(names)) == len(names)
    for signal in CATALOGUE:
        assert re.fullmatch(r"[a-z]+\.[a-z0-9_]+", signal.name)
        assert signal.unit  # raises when the name promises none
        assert signal.doc.endswith(".")


def test_a_signal_without_a_unit_cannot_be_made() -> None:
    from clusterprof.signals import Signal

    with pytest.raises(ValueError, match="does not end with its unit"):
        Signal("disk.speed", "disk", "How fast it is.")


def commands() -> Iterator[str]:
    from clusterprof.cli.commands import COMMANDS

    yield from COMMANDS


@pytest.mark.parametrize("command", sorted(commands()))
def test_every_command_has_help_and_stands_in_the_readme(command: str) -> None:
    run = [sys.executable, "-m", "clusterprof", command, "--help"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert command in done.stdout
    assert f"clusterprof {command}" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted((ROOT / "profiles").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_profile_loads(path: Path, tmp_path: Path) -> None:
    from clusterprof.profiles import load

    by_name = load(path.stem, environ={}, cwd=tmp_path)
    assert by_name.effective() == load(str(path), environ={}, cwd=tmp_path).effective()


def run_tool(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_import_contracts_hold() -> None:
    lint_imports = Path(sys.executable).with_name("lint-imports")
    done = run_tool(str(lint_imports), "--no-cache")
    assert done.returncode == 0, done.stdout
    assert re.search(r"Contracts: \d+ kept, 0 broken", done.stdout)


def test_generated_pages_are_current() -> None:
    done = run_tool(sys.executable, "tests/tools/generate_docs.py", "--check")
    assert done.returncode == 0, done.stdout


def test_the_probe_speaks_the_python_of_its_hosts() -> None:
    for path in python_files("clusterprof/probe"):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))


def test_nothing_prints_or_exits_below_the_command_line() -> None:
    guests = ("cli", "demo")  # the demo's ranks are programs of their own
    offenders = []
    for path in python_files("clusterprof"):
        part = path.relative_to(PACKAGE).parts[0]
        if part in guests or path.name in ("agent.py", "__main__.py", "helper.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "print",
                "sys.exit",
                "exit",
            ):
                offenders.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert offenders == []


def test_the_project_speaks_only_of_itself() -> None:
    listed = run_tool("git", "ls-files", "-z")
    if listed.returncode != 0:
        pytest.skip("not a git checkout: there is no list of the project's files")
    foreign = re.compile(r"/(?:work|home|Users)/\w|/tmp/bash_jobs|site-packages/")
    offenders = [
        name
        for name in listed.stdout.split("\0")
        if name
        and (ROOT / name).is_file()
        and not name.startswith(("tests/hosts/", "tests/recordings/"))
        and name != "tests/test_house.py"
        and foreign.search((ROOT / name).read_text(encoding="utf-8", errors="replace"))
    ]
    assert offenders == []
