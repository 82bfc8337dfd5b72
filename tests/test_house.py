"""The rules of the repository: size, layout, names, docstrings, registries, import contracts."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.collectors.registry import COLLECTORS
from clusterprof.analysis.detectors.cross_rank import PEER_CAUSES
from clusterprof.analysis.detectors.pages import build_page
from clusterprof.analysis.detectors.registry import DETECTORS
from clusterprof.cli.commands import COMMANDS
from clusterprof.config import load_profile
from clusterprof.output.renderers.base import RENDERERS
from clusterprof.signals import CATALOG, Signal

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "clusterprof"
SOURCE_FOLDERS = ("clusterprof", "tests", "bench", "lab")
NAMED_FOLDERS = ("clusterprof", "bench", "lab")
"""Folders without private words in names; in tests, names of test functions are sentences."""
STORED_KEYS = {PACKAGE / "report" / "document.py", PACKAGE / "report" / "document_base.py"}
"""Their fields are keys of stored reports, which keep their names."""

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_TEST_FUNCTION_LINES = 120  # tests and their factories contain whole records
MAX_MODULES = 460
"""Modules of the package, without `__init__.py` files that hold only a docstring."""
MAX_CHILDREN = 14
"""Files and folders in one folder of the package; more need a subfolder."""
UNCOUNTED_CHILDREN = {"__init__.py", "__main__.py", "py.typed", "__pycache__", "assets"}
MIN_VERB_RATIO = 0.9
# A hook per seam; a renderer per format; two modules beside the folders of the package: the Python
# interface, the trackers.
ALLOWED_CHILDREN = {".": 17, "probe/hooks": 24, "cli": 16, "agent/collectors": 15}
ALLOWED_CHILDREN["output/renderers"] = 15

_VERBS = """
add align allocate analyze append apply assign attach attribute begin blame bound build can cap
check choose clear close collect combine compare compute concat confirm convert count create
decide decode describe detect draw drop encode ensure escape estimate evaluate expand explain
export fill filter find finish fit format get group guess handle has import index infer insert
install is iterate join judge label limit list load locate main make map mark match measure merge
move normalize observe open order pack pad parse pick plan print propagate quote rank read record
register release remove render replace report require resolve restore revert round run sample
scale scan select send set settle shift show skip sort split start stop strip subtract sum
summarize take trim unpack update validate wait watch with wrap write
"""
VERBS = frozenset(_VERBS.split())
"""First words of module-level functions: verb + object (CONTRIBUTING.md, Names)."""

_PRIVATE_WORDS = """
alike beside besides blinds borne doubts felt frontier hosting likeness mover movers painted
painting perhaps person seat sighting slab slabs sooner tentative told underfill underfilled
underfilling whose witness won worth yardstick yardsticks
"""
PRIVATE_WORDS = frozenset(_PRIVATE_WORDS.split())
"""Invented words that names used to have; docs/glossary.md has the term of the field for each."""

VAGUE_VARIABLES = frozenset({"one", "some", "told", "said", "found", "every"})
"""These do not name a thing. Write `rank`, `finding`, `culprit`, `rows`."""

ARRAY_FACT = re.compile(
    r"\b(u?int|float|bool)(8|16|32|64|_)?\b|\w\[[^\]]+\]|%|µs|0 to 1"
    r"|(?<!['’])\b(ns|us|ms|s|(nano|micro|milli)?seconds?|bytes?|[KMG]i?B|Hz)\b"
    r"|\b(ratios?|shares?|fractions?|percent)\b"
)
"""A dtype, a shape in brackets, or a unit."""

COLLECTOR_SECTIONS = ["## Source", "## Privilege", "## Cost", "## Where it is blind"]
CAUSE_SECTIONS = [
    "## What it sees",
    "## Why the GPU waits",
    "## How it decides",
    "## What to do",
    "## Where it is blind",
]
MAX_COLLECTOR_PERCENT = 2.0
"""Percent of one core that a collector may cost at its default rate."""
SHARED_BY_DETECTORS = {"phases.blocked_files", "storage.evidence"}
"""Modules in a family's folder that are not a cause."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


# --- reading the source ---


def list_python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def parse_file(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def list_nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(parse_file(path)))


@pytest.fixture(scope="module", autouse=True)
def forget_sources() -> Iterator[None]:
    """Give the trees back: 400 MB, through which every later collection of garbage would go."""
    yield
    list_nodes.cache_clear()
    parse_file.cache_clear()


def get_place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]


def get_module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_docstring_only(path: Path) -> bool:
    """Return whether a file holds nothing, or nothing but a docstring."""
    body = parse_file(path).body
    return not body or (len(body) == 1 and ast.get_docstring(parse_file(path)) is not None)


def list_package_functions() -> list[tuple[Path, Function]]:
    """List the module-level functions of the package, private ones included."""
    return [
        (path, node)
        for path in list_python_files("clusterprof")
        for node in parse_file(path).body
        if isinstance(node, Function)
    ]


def list_public_functions() -> list[tuple[Path, Function]]:
    """List the public module-level functions, without commands: their docstring is a help text."""
    commands = {(command.__module__, command.__name__) for command in COMMANDS.values()}
    return [
        (path, node)
        for path, node in list_package_functions()
        if not node.name.startswith("_") and (get_module_name(path), node.name) not in commands
    ]


def fail_with(offenders: list[str]) -> None:
    """Fail with the number of offenders and one line for each."""
    if offenders:
        pytest.fail("\n".join([f"{len(offenders)} found:", *offenders]), pytrace=False)


# --- size and layout ---


def test_no_file_exceeds_the_line_limit() -> None:
    offenders = []
    for path in list_python_files(*SOURCE_FOLDERS):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            offenders.append(f"{path.relative_to(ROOT)}: {lines} lines")
    fail_with(offenders)


def test_no_function_exceeds_the_line_limit() -> None:
    offenders = []
    for path in list_python_files(*SOURCE_FOLDERS):
        limit = MAX_TEST_FUNCTION_LINES if "tests" in path.parts else MAX_FUNCTION_LINES
        for node in list_nodes(path):
            if isinstance(node, Function):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > limit:
                    offenders.append(f"{get_place(path, node)}: {node.name}, {lines} lines")
    fail_with(offenders)


def test_no_statement_disables_the_formatter() -> None:
    marker = re.compile(r"#\s*fmt:\s*(skip|off)\b")
    fail_with(
        [
            f"{path.relative_to(ROOT)}:{number}"
            for path in list_python_files(*SOURCE_FOLDERS)
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            if marker.search(line)
        ]
    )


def test_the_package_has_a_bounded_number_of_modules() -> None:
    modules = [path for path in list_python_files("clusterprof") if not is_docstring_only(path)]
    assert len(modules) <= MAX_MODULES


def test_no_folder_exceeds_the_limit_of_children() -> None:
    offenders = []
    for folder in [PACKAGE, *PACKAGE.rglob("*/")]:
        if not folder.is_dir() or UNCOUNTED_CHILDREN & set(folder.relative_to(PACKAGE).parts):
            continue
        children = {child.name for child in folder.iterdir()} - UNCOUNTED_CHILDREN
        name = folder.relative_to(PACKAGE).as_posix()
        if len(children) > ALLOWED_CHILDREN.get(name, MAX_CHILDREN):
            offenders.append(f"{name}: {len(children)} children")
    fail_with(sorted(offenders))


# --- imports ---


def iterate_import_time_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run at import: no function bodies, nothing under TYPE_CHECKING."""
    for node in body:
        if isinstance(node, Function):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from iterate_import_time_statements(node.orelse)
            continue
        yield node
        for field in ("body", "orelse", "finalbody"):
            yield from iterate_import_time_statements(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from iterate_import_time_statements(handler.body)


def list_imports(path: Path, modules: set[str]) -> set[str]:
    """List the modules of the package that a file imports when it is imported itself."""
    name = get_module_name(path)
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    imported = set()
    for node in iterate_import_time_statements(parse_file(path).body):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                imported.add(submodule if submodule in modules else source)
    return (imported & modules) - {name}


def test_no_modules_have_circular_imports() -> None:
    paths = list_python_files("clusterprof")
    modules = {get_module_name(path) for path in paths}
    graph = {get_module_name(path): list_imports(path, modules) for path in paths}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' <- '.join(error.args[1])}", pytrace=False)


def run_tool(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_the_import_contracts_hold() -> None:
    done = run_tool(str(Path(sys.executable).with_name("lint-imports")), "--no-cache")
    assert done.returncode == 0, done.stdout
    assert re.search(r"Contracts: \d+ kept, 0 broken", done.stdout)


def test_the_probe_imports_only_the_standard_library() -> None:
    """It runs inside the job, in the job's Python. Hooks get their framework as an argument."""
    allowed = sys.stdlib_module_names | {"sitecustomize"}  # the job's own, which ours replaces
    offenders = []
    for path in list_python_files("clusterprof/probe"):
        for node in iterate_import_time_statements(parse_file(path).body):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            offenders += [
                f"{get_place(path, node)}: {name}"
                for name in names
                if name.split(".")[0] not in allowed
                and not f"{name}.".startswith("clusterprof.probe.")
            ]
    fail_with(offenders)


def test_the_probe_is_valid_python_3_8() -> None:
    for path in list_python_files("clusterprof/probe"):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))


def test_only_the_command_line_prints_or_exits() -> None:
    programs = {"cli", "demo"}  # the demo's ranks are programs of their own
    entry_points = {"__main__.py", "helper.py"}
    fail_with(
        [
            f"{get_place(path, node)}: {ast.unparse(node.func)}"
            for path in list_python_files("clusterprof")
            if path.relative_to(PACKAGE).parts[0] not in programs and path.name not in entry_points
            for node in list_nodes(path)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("print", "sys.exit", "exit")
        ]
    )


# --- names ---


def get_first_word(name: str) -> str:
    return name.lstrip("_").split("_")[0].lower()


def test_functions_begin_with_a_verb() -> None:
    functions = [
        (path, node) for path, node in list_package_functions() if not node.name.startswith("__")
    ]
    others = [
        f"{get_place(path, node)}: {node.name}"
        for path, node in functions
        if get_first_word(node.name) not in VERBS
    ]
    ratio = 1 - len(others) / len(functions)
    if ratio < MIN_VERB_RATIO:
        fail_with([f"{ratio:.1%} of {len(functions)} functions begin with a verb", *others])


def test_every_verb_is_in_use() -> None:
    used = {get_first_word(node.name) for _, node in list_package_functions()}
    assert sorted(VERBS - used) == []


def iterate_names(path: Path) -> Iterator[tuple[ast.AST, str, bool]]:
    """Yield the names that a file defines, and whether each is a variable or parameter."""
    fields = {
        id(child)
        for node in list_nodes(path)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for child in ast.walk(statement)
    }
    for node in list_nodes(path):
        if isinstance(node, Function | ast.ClassDef):
            yield node, node.name, False
        elif isinstance(node, ast.arg):
            yield node, node.arg, True
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node, node.id, id(node) not in fields
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node, node.attr, False


def split_words(name: str) -> set[str]:
    """Split a name at underscores and capitals: `WaitTimeBins`, `wait_time_bins`."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def test_no_name_uses_a_private_word() -> None:
    offenders = []
    for path in sorted(set(list_python_files(*NAMED_FOLDERS)) - STORED_KEYS):
        if split_words(path.stem) & PRIVATE_WORDS:
            offenders.append(f"{path.relative_to(ROOT)}: file name")
        for node, name, _ in iterate_names(path):
            if split_words(name) & PRIVATE_WORDS:
                offenders.append(f"{get_place(path, node)}: {name}")
    fail_with(offenders)


def test_no_variable_has_a_vague_name() -> None:
    fail_with(
        [
            f"{get_place(path, node)}: {name}"
            for path in list_python_files(*SOURCE_FOLDERS)
            for node, name, names_value in iterate_names(path)
            if names_value and name in VAGUE_VARIABLES
        ]
    )


# --- docstrings ---


@cache
def list_array_types() -> frozenset[str]:
    """List the names that stand for numpy arrays, with aliases: `Int = NDArray[np.int64]`."""
    types = {"NDArray", "ndarray"}
    assigned = [
        (node.targets[0].id, set(re.findall(r"\w+", ast.unparse(node.value))))
        for path in list_python_files("clusterprof")
        for node in parse_file(path).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Subscript | ast.BinOp)
    ]
    while aliases := {name for name, words in assigned if words & types} - types:
        types |= aliases  # an alias may stand for another one
    return frozenset(types)


def has_arrays(function: Function) -> bool:
    """Return whether a function takes or returns numpy arrays, by its annotations."""
    arguments = function.args
    annotations = [
        argument.annotation
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    ]
    words = {
        word
        for annotation in (*annotations, function.returns)
        if annotation is not None
        for word in re.findall(r"\w+", ast.unparse(annotation))
    }
    return bool(words & list_array_types())


def has_raise(function: Function) -> bool:
    """Return whether the body raises an exception of its own; nested functions do not count."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Raise) and node.exc is not None:
            return True
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return False


def test_functions_on_arrays_name_shape_dtype_or_unit() -> None:
    functions = [(path, node) for path, node in list_public_functions() if has_arrays(node)]
    assert len(functions) > 100  # the annotations are recognized
    fail_with(
        [
            f"{get_place(path, node)}: {node.name}"
            for path, node in functions
            if not ARRAY_FACT.search(ast.get_docstring(node) or "")
        ]
    )


def test_functions_that_raise_document_their_exceptions() -> None:
    functions = [(path, node) for path, node in list_public_functions() if has_raise(node)]
    assert len(functions) > 50
    fail_with(
        [
            f"{get_place(path, node)}: {node.name}"
            for path, node in functions
            if "Raises:" not in (ast.get_docstring(node) or "")
        ]
    )


# --- registries ---


def list_submodules(package: str) -> list[str]:
    """List the modules below a package, without the package's name before them."""
    paths = importlib.import_module(package).__path__
    return [
        module.name.removeprefix(f"{package}.")
        for module in pkgutil.walk_packages(paths, f"{package}.")
        if not module.ispkg
    ]


def get_page(collector: type[Any]) -> str:
    """Return the page of a collector: the docstring of its class, or else of its module."""
    class_doc = inspect.cleandoc(collector.__doc__ or "")
    if "## " in class_doc:
        return class_doc
    return inspect.cleandoc(sys.modules[collector.__module__].__doc__ or "")


def check_sections(name: str, page: str, sections: list[str]) -> None:
    """Check that a page has exactly these sections and that none of its parts is empty."""
    assert re.findall(r"^## .*$", page, re.MULTILINE) == sections, name
    parts = re.split(r"^## .*$", page, flags=re.MULTILINE)
    assert all(part.strip() for part in parts), name


def test_every_collector_is_registered() -> None:
    names = [collector.name for collector in COLLECTORS]
    assert len(set(names)) == len(names)
    package = "clusterprof.agent.collectors"
    defined = {
        member
        for module in list_submodules(package)
        if module not in ("base", "registry")
        for member in vars(importlib.import_module(f"{package}.{module}")).values()
        if inspect.isclass(member)
        and member.__module__ == f"{package}.{module}"
        and isinstance(getattr(member, "name", None), str)
        and hasattr(member, "interval_ns")
    }
    assert {member.__qualname__ for member in defined ^ set(COLLECTORS)} == set()
    for collector in COLLECTORS:
        _, is_gpu, module = collector.__module__.rpartition(".collectors.gpu.")
        assert collector.name == f"gpu_{module}" if is_gpu else "gpu" not in collector.name


def test_every_collector_documents_source_privilege_cost_and_limits() -> None:
    for collector in COLLECTORS:
        check_sections(collector.name, get_page(collector), COLLECTOR_SECTIONS)
        page = (ROOT / f"docs/collectors/{collector.name}.md").read_text(encoding="utf-8")
        signals = page.partition("## Source")[0].rpartition("|---|")[2]
        assert signals.count("\n| `") >= 1, f"{collector.name}: its page names no signals"


def test_the_cost_of_every_collector_is_measured_and_small() -> None:
    text = (ROOT / "bench/README.md").read_text(encoding="utf-8")
    table = text.partition("== collector_cost")[2].partition("\n== ")[0]
    percents: dict[str, list[float]] = {}
    for line in table.splitlines():
        if line.startswith("  "):
            words = line.split()
            percents.setdefault(words[0], []).append(float(words[-1]))
    names = {collector.name for collector in COLLECTORS}
    assert names - set(percents) == set(), "run `python -m bench collector_cost --save`"
    assert {name for name in names if max(percents[name]) > MAX_COLLECTOR_PERCENT} == set()


def test_every_cause_is_registered_under_its_family_and_file_name() -> None:
    """analysis/detectors/cpu/gil.py is `cpu-gil`, device/h2d_copy.py is `h2d-copy`."""
    package = "clusterprof.analysis.detectors"
    ids = {}
    for detector in DETECTORS:
        module = type(detector).__module__.removeprefix(f"{package}.")
        assert module not in ids, f"{module}: one cause, one file"
        ids[module] = detector.cause.id
        name = module.replace(".", "-").replace("_", "-")
        assert detector.cause.id in (name, name.partition("-")[2]), module
    assert len(set(ids.values())) == len(ids)
    files = {module for module in list_submodules(package) if "." in module}
    assert files - SHARED_BY_DETECTORS == set(ids)


def test_every_cause_has_a_complete_page() -> None:
    for cause in (*(detector.cause for detector in DETECTORS), *PEER_CAUSES):
        check_sections(cause.id, build_page(cause.id), CAUSE_SECTIONS)


def test_every_renderer_is_registered_under_its_name() -> None:
    names = [renderer.name for renderer in RENDERERS]
    assert len(set(names)) == len(names)
    for renderer in RENDERERS:
        module = f"{renderer.__module__}."
        assert module.startswith(f"clusterprof.output.renderers.{renderer.name}.")


def test_every_signal_is_unique_and_has_a_unit() -> None:
    names = [signal.name for signal in CATALOG]
    assert len(set(names)) == len(names)
    for signal in CATALOG:
        assert re.fullmatch(r"[a-z]+\.[a-z0-9_]+", signal.name)
        assert signal.unit  # raises when the name does not end with a unit
        assert signal.doc.endswith(".")
    with pytest.raises(ValueError, match="does not end with its unit"):
        Signal("disk.speed", "disk", "How fast it is.")


def test_every_command_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [command for command in COMMANDS if f"clusterprof {command}" not in text] == []


@pytest.mark.parametrize("path", sorted((ROOT / "profiles").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_profile_loads(path: Path, tmp_path: Path) -> None:
    by_name = load_profile(path.stem, environ={}, cwd=tmp_path)
    assert by_name.effective() == load_profile(str(path), environ={}, cwd=tmp_path).effective()


def test_generated_pages_are_current() -> None:
    done = run_tool(sys.executable, "tests/tools/generate_docs.py", "--check")
    assert done.returncode == 0, done.stdout


def test_no_file_contains_a_path_of_a_foreign_machine() -> None:
    listed = run_tool("git", "ls-files", "-z")
    if listed.returncode != 0:
        pytest.skip("not a git checkout: the list of the project's files is missing")
    foreign = re.compile(
        r"/(?:work|home|Users)/\w|/tmp/bash_jobs|/(?:root|usr|opt)/[^\s\"']*site-packages/"
    )
    fixtures = ("tests/hosts/", "tests/recordings/", "tests/test_house.py")
    fail_with(
        [
            name
            for name in listed.stdout.split("\0")
            if name
            and (ROOT / name).is_file()
            and not name.startswith(fixtures)
            and foreign.search((ROOT / name).read_text(encoding="utf-8", errors="replace"))
        ]
    )
