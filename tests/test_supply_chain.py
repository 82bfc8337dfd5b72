"""What CI installs for a release is pinned with hashes, and the pins are what the package needs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest needs it there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
AGREED = {"nvidia-ml-py", "msgspec", "typer", "rich", "psutil", "pyyaml", "numpy"}
"""The dependencies of the package. Another one is a decision, not a commit."""
PIN_FILES = {"requirements.txt": "dependencies", "tools.txt": "release"}
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
RELEASE = ROOT / ".github/workflows/release.yml"
_COMMIT = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+")


@cache
def read_pins(name: str) -> tuple[tuple[Requirement, tuple[str, ...]], ...]:
    """Read a file of pins: each requirement with its hashes."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (ROOT / ".ci" / name).read_text(encoding="utf-8"))
    lines = text.replace("\\\n", " ").splitlines()
    split = [line.split("--hash=") for line in lines if line.strip()]
    return tuple((Requirement(words[0]), tuple(words[1:])) for words in split)


def make_environment(python: str) -> dict[str, str]:
    """Return what markers are compared with on Linux."""
    values = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    return values | {"sys_platform": "linux", "os_name": "posix", "platform_system": "Linux"}


def select(requirements: list[Requirement], python: str) -> list[Requirement]:
    """Return those that hold for a Python on Linux."""
    environment = make_environment(python)
    return [
        value for value in requirements if not value.marker or value.marker.evaluate(environment)
    ]


def list_declared(name: str) -> list[Requirement]:
    """Return what pyproject.toml asks for, of which a file has the pins."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = {"dependencies": document["project"]["dependencies"], **document["dependency-groups"]}
    return [Requirement(text) for text in groups[PIN_FILES[name]]]


def test_the_package_has_exactly_the_agreed_dependencies() -> None:
    names = [canonicalize_name(value.name) for value in list_declared("requirements.txt")]
    assert sorted(names) == sorted(AGREED)


@pytest.mark.parametrize("name", PIN_FILES)
def test_every_pin_is_one_version_with_hashes(name: str) -> None:
    for requirement, hashes in read_pins(name):
        assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), requirement
        assert hashes, f"{requirement} has no hash"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}\s*", value) for value in hashes), requirement


@pytest.mark.parametrize("name", PIN_FILES)
def test_pins_name_no_registry(name: str) -> None:
    """Pip's own settings say from where; a mirror is as good, since the hashes are compared."""
    text = (ROOT / ".ci" / name).read_text(encoding="utf-8")
    assert "://" not in text
    assert set(re.findall(r"(?m)^\s*(--?\w[\w-]*)", text)) == {"--hash"}


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", PIN_FILES)
def test_the_pins_satisfy_what_is_declared(name: str, python: str) -> None:
    pins = select([requirement for requirement, _ in read_pins(name)], python)
    versions = {canonicalize_name(pin.name): str(pin.specifier)[2:] for pin in pins}
    assert len(versions) == len(pins), "two pins of one package"
    for requirement in list_declared(name):
        version = versions.get(canonicalize_name(requirement.name))
        assert version and requirement.specifier.contains(version), requirement
    assert find_missing(versions, python) == []


def find_missing(versions: dict[str, str], python: str) -> list[str]:
    """Find what pinned packages need but no pin satisfies; known of installed versions only."""
    missing = []
    for name, version in versions.items():
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if distribution.version != version:
            continue
        for need in select([Requirement(text) for text in distribution.requires or ()], python):
            pinned = versions.get(canonicalize_name(need.name))
            if pinned is None or not need.specifier.contains(pinned):
                missing.append(f"{name} needs {need}")
    return missing


def test_a_need_without_a_pin_is_found() -> None:
    version = metadata.version("rich")
    assert any("markdown-it-py" in text for text in find_missing({"rich": version}, "3.12"))


def test_no_package_is_pinned_without_need() -> None:
    """A pin that nothing leads to is from an older run of `make pins`."""
    for name in PIN_FILES:
        text = (ROOT / ".ci" / name).read_text(encoding="utf-8")
        names = {canonicalize_name(requirement.name) for requirement, _ in read_pins(name)}
        declared = {canonicalize_name(value.name) for value in list_declared(name)}
        via = re.findall(r"(?m)^    # via (\S+)|^    #   (\S+)", text)
        assert {canonicalize_name(a or b) for a, b in via} <= names | {"clusterprof"}
        assert declared <= names


def list_steps(path: Path) -> Iterator[dict[str, Any]]:
    """Return the steps of a workflow or an action."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    for job in document["jobs"].values() if "jobs" in document else [document["runs"]]:
        yield from job["steps"]


@pytest.mark.parametrize("path", [*WORKFLOWS, ROOT / "action.yml"], ids=lambda path: path.name)
def test_every_action_is_pinned_by_its_commit(path: Path) -> None:
    stated = re.findall(r"(?m)^\s*(?:- )?uses: (.+)$", path.read_text(encoding="utf-8"))
    assert len(stated) == len([step for step in list_steps(path) if "uses" in step]) > 0
    assert [text for text in stated if not _COMMIT.fullmatch(text)] == []


def test_an_action_has_one_commit() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (*WORKFLOWS, ROOT / "action.yml")]
    used = {action for text in texts for action in re.findall(r"uses: (\S+)@(\S+)", text)}
    assert len(dict(used)) == len(used)


def list_release_commands() -> list[str]:
    """Return the commands of a release, those of .ci/wheel too."""
    script = (ROOT / ".ci/wheel").read_text(encoding="utf-8")
    options = re.search(r"(?m)^pinned=\((.*)\)$", script)
    assert options
    script = script.replace('"${pinned[@]}"', options[1])
    runs = [step["run"] for step in list_steps(RELEASE) if "run" in step]
    assert ".ci/wheel" in runs
    return "\n".join([*runs, script]).replace("\\\n", " ").splitlines()


def test_what_a_release_installs_is_pinned() -> None:
    installs = [
        line for line in list_release_commands() if re.search(r"\bpip\b.*\binstall\b", line)
    ]
    assert len(installs) >= 5
    for line in installs:
        from_registry = "--no-index" not in line or "--no-deps" not in line
        assert not from_registry or ("--require-hashes" in line and "--only-binary" in line), line


def test_a_release_is_audited_attested_and_uploaded_without_a_secret() -> None:
    commands = list_release_commands()
    text = RELEASE.read_text(encoding="utf-8")
    audits = [line for line in commands if line.startswith("pip-audit")]
    # without --strict it passes when it could look up nothing
    assert audits and all("--strict" in line and "--require-hashes" in line for line in audits)
    assert all(f".ci/{name}" in line for line in audits for name in PIN_FILES)
    assert "uv publish --trusted-publishing always dist/*" in commands
    assert text.count("uses: actions/attest@") == 2 and "sbom-path: build/sbom.cdx.json" in text
    assert "secrets." not in text and "password" not in text
    document = yaml.safe_load(text)
    assert document["permissions"] == {"contents": "read"}
    assert document["jobs"]["publish"]["needs"] == "build"
    assert document["jobs"]["publish"]["environment"] == "release"
