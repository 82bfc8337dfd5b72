"""Profiles: precedence, origins, and a complaint with line and nearest key for everything wrong."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from clusterprof.config import build_limits, check_collectors, list_shipped_profiles, load_profile
from clusterprof.config.yaml_file import KEYS
from clusterprof.errors import UsageError

SHIPPED = Path(__file__).parents[2] / "profiles"


@dataclass(frozen=True, slots=True)
class Limits:
    waited_at_least_ratio: float = 0.1
    longer_than_ns: int = 5_000_000
    strict: bool = False


KNOWN = {"storage-local": Limits, "cpu-gc": Limits}


def refused(tmp_path: Path, text: str | bytes) -> str:
    (tmp_path / "p.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as caught:
        load_profile("p.yaml", {}, tmp_path)
    assert caught.value.exit_code == 2
    return caught.value.message


def loaded(tmp_path: Path, text: str):  # type: ignore[no-untyped-def]
    (tmp_path / "p.yaml").write_text(text, encoding="utf-8")
    return load_profile("p.yaml", {}, tmp_path)


def test_every_shipped_profile_loads_and_binds(tmp_path: Path) -> None:
    assert set(list_shipped_profiles()) == {path.stem for path in SHIPPED.glob("*.yaml")}
    assert {"default", "ci"} <= set(list_shipped_profiles())
    for name in list_shipped_profiles():
        profile = load_profile(name, {}, tmp_path)
        assert not any(key.startswith("limits.") for key in profile.values)
        assert build_limits(profile, KNOWN) == {"storage-local": Limits(), "cpu-gc": Limits()}


def test_the_default_profile_documents_every_key_and_its_default(tmp_path: Path) -> None:
    written, silent = load_profile("default", {}, tmp_path), load_profile(None, {}, tmp_path)
    assert written.values == silent.values
    assert set(silent.origins.values()) == {"default"}
    fixed = {key for key in KEYS if "*" not in key and key != "extends"}
    assert set(written.values) == fixed
    lines = (SHIPPED / "default.yaml").read_text(encoding="utf-8").splitlines()
    for key in fixed:
        file, line = written.origins[key].split(":")
        assert file == "profiles/default.yaml"
        at = int(line) - 1
        assert lines[at].strip().startswith(key.rpartition(".")[2] + ":")
        assert lines[at - 1].strip().startswith("#"), f"{key} has no comment"


def test_a_profile_overrides_values_of_its_base_profile(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("extends: ci\nsampling: {hz: 5}\n", encoding="utf-8")
    profile = loaded(
        tmp_path,
        "extends: base.yaml\n"
        "gate:\n"
        "  min_steps: 7\n"
        "sampling:\n"
        "  collectors:\n"
        "    mounts: {hz: 0.5}\n"
        "    network: {enabled: false}\n",
    )
    assert profile.values["gate.min_steps"] == 7
    assert profile.origins["gate.min_steps"] == "p.yaml:3"
    assert profile.origins["sampling.hz"] == "base.yaml:2"
    assert profile.origins["gate.assertions"].startswith("profiles/ci.yaml:")
    assert profile.origins["recording.max_bytes"].startswith("profiles/default.yaml:")
    assert profile.section("sampling") == {
        "hz": 5.0,
        "gpm": "auto",
        "collectors": {"mounts": {"hz": 0.5}, "network": {"enabled": False}},
    }
    assert profile.effective()["gate"]["assertions"][0] == "gpu.busy_ratio >= 70%"


def test_the_given_profile_precedes_environment_and_folder(tmp_path: Path) -> None:
    def hz(given: str | None, environ: dict[str, str]) -> float:
        return float(load_profile(given, environ, tmp_path).values["sampling.hz"])

    for name, rate in (("a", 1), ("b", 2), ("clusterprof", 3)):
        (tmp_path / f"{name}.yaml").write_text(f"sampling: {{hz: {rate}}}", encoding="utf-8")
    assert hz("a.yaml", {"CLUSTERPROF_PROFILE": "b.yaml"}) == 1
    assert hz(None, {"CLUSTERPROF_PROFILE": "b.yaml"}) == 2
    assert hz(None, {"CLUSTERPROF_PROFILE": ""}) == 3
    (tmp_path / "clusterprof.yaml").unlink()
    assert hz(None, {}) == 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sampling:\n  hzz: 1\n", "p.yaml:2: unknown key 'sampling.hzz'; did you mean 'hz'?"),
        ("\n\nsampels: {}\n", "p.yaml:3: unknown key 'sampels'; did you mean 'sampling'?"),
        (
            "sampling:\n  collectors:\n    cpu:\n      hertz: 1\n",
            "p.yaml:4: unknown key 'sampling.collectors.cpu.hertz'; did you mean 'hz'?",
        ),
        ("gate: {min_step: 1}", "p.yaml:1: unknown key 'gate.min_step'; did you mean 'min_steps'?"),
        ("sampling:\n  hz: fast", "p.yaml:2: sampling.hz must be a number"),
        ("sampling:\n  hz: yes", "p.yaml:2: sampling.hz must be a number"),
        ("sampling: {hz: 0}", "p.yaml:1: sampling.hz must be from 0.01 to 1000"),
        ("sampling: {hz: .nan}", "p.yaml:1: sampling.hz must be a number"),
        (f"sampling: {{hz: 1{'0' * 400}}}", "p.yaml:1: sampling.hz is too large"),
        ("sampling: 5", "p.yaml:1: sampling must be a mapping of keys to values"),
        ("- 1", "p.yaml:1: a profile must be a mapping of keys to values"),
        ("gate: {min_steps: 1.5}", "p.yaml:1: gate.min_steps must be a whole number, 0 or more"),
        ("gate:\n  min_steps: 1\n  min_steps: 2", "p.yaml:3: gate.min_steps is set twice"),
        (
            f"gate: {{min_coverage_ratio: {'9' * 60_000}x y}}",  # no time is spent on it
            f"p.yaml:1: gate.min_coverage_ratio '{'9' * 20}…' is not a number with a unit",
        ),
        ("gate: {min_coverage_ratio: 90}", "p.yaml:1: gate.min_coverage_ratio must be from 0 to 1"),
        (
            "gate: {assertions: gpu}",
            "p.yaml:1: gate.assertions must be a list of texts, each in quotes",
        ),
        (
            "gate: {on_inconclusive: wran}",
            "p.yaml:1: gate.on_inconclusive must be one of fail, warn, pass; did you mean 'warn'?",
        ),
        ("recording:\n  max_bytes: 2 parsecs", "p.yaml:2: recording.max_bytes 'parsecs' is not"),
        ("recording: {max_bytes: 5 ms}", "p.yaml:1: recording.max_bytes must be a size"),
        ("facts: {currency: 3}", "p.yaml:1: facts.currency must be text"),
        ("extends: cii", "p.yaml:1: unknown profile 'cii'; did you mean 'ci'?"),
        ("extends: other.yaml", "p.yaml:1: cannot read the profile other.yaml: no such file"),
        ("extends: p.yaml", "p.yaml:1: profiles extend each other in a cycle"),
        ("extends: [a, b]", "p.yaml:1: extends must be text"),
        ("a.b: 1", "p.yaml:1: unknown key 'a.b'"),
        ("? [a]\n: 1", "p.yaml:1: unknown key 'None'"),
        ("a: [", "p.yaml:1: expected the node content"),
        ("a: b: c", "p.yaml:1: mapping values are not allowed here"),
        ("gate: {min_steps: " + "9" * 5000 + "}", "p.yaml:1: gate.min_steps"),
        ("facts: {currency: 2026-99-99}", "p.yaml:1: facts.currency"),
        ("sampling: {hz: !!python/object/apply:os.system [ls]}", "p.yaml:1: could not determine"),
        ("limits: {storage-local: {x: [1]}}", "p.yaml:1: limits.storage-local.x must be a number"),
        ("x: 1\n---\ny: 2", "p.yaml:2: but found another document"),
        (b"\xff\xfe\x00", "p.yaml: is not UTF-8 text"),
        ("x: \x07", "p.yaml: special characters are not allowed"),
        ("# " + "x" * (64 << 10), "p.yaml: a profile may have at most 64 KiB"),
    ],
)
def test_errors_in_a_profile_name_their_line(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    assert message in refused(tmp_path, text)


def test_yaml_aliases_are_refused_before_expansion(tmp_path: Path) -> None:
    """Ten lines that YAML would turn into 10^9 strings."""
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert refused(tmp_path, "\n".join(lines)) == "p.yaml:2: aliases are not allowed in a profile"


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_deep_nesting_is_refused(tmp_path: Path, opening: str) -> None:
    assert refused(tmp_path, opening * 5000) == "p.yaml:1: nested too deeply"


def test_unknown_profiles_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown profile 'defualt'; did you mean 'default'\?"):
        load_profile("defualt", {}, tmp_path)
    with pytest.raises(UsageError, match=r"cannot read the profile x/y\.yaml: no such file"):
        load_profile("x/y.yaml", {}, tmp_path)
    with pytest.raises(UsageError, match="cannot read the profile"):
        load_profile(f"{tmp_path}/", {}, tmp_path)
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(UsageError, match="is not a regular file"):
        load_profile("pipe.yaml", {}, tmp_path)


def test_an_empty_profile_changes_nothing(tmp_path: Path) -> None:
    for text in ("", "# nothing\n", "gate:\n  # min_steps: 1\n"):
        assert loaded(tmp_path, text).values == load_profile(None, {}, tmp_path).values


def test_limits_of_a_profile_are_assigned_to_causes(tmp_path: Path) -> None:
    profile = loaded(
        tmp_path,
        "limits:\n"
        "  storage-local:\n"
        "    waited_at_least_ratio: 20%\n"
        "    longer_than_ns: 250 ms\n"
        "  cpu-gc: {waited_at_least_ratio: 1, strict: true}\n",
    )
    assert build_limits(profile, KNOWN) == {
        "storage-local": Limits(0.2, 250_000_000),
        "cpu-gc": Limits(1.0, strict=True),
    }
    assert type(build_limits(profile, KNOWN)["cpu-gc"].waited_at_least_ratio) is float


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "limits:\n  storge-local: {strict: true}",
            "p.yaml:2: unknown cause 'storge-local'; did you mean 'storage-local'?",
        ),
        (
            "limits:\n  cpu-gc:\n    waited_at_lest_ratio: 1",
            "p.yaml:3: the cause cpu-gc has no limit 'waited_at_lest_ratio';"
            " did you mean 'waited_at_least_ratio'?",
        ),
        ("limits: {cpu-gc: {longer_than_ns: 5%}}", "p.yaml:1: the limit longer_than_ns is given"),
        ("limits: {cpu-gc: {longer_than_ns: 1.5}}", "must have the type of its default, 5000000"),
        ("limits: {cpu-gc: {longer_than_ns: true}}", "must have the type of its default"),
        ("limits: {cpu-gc: {strict: 1}}", "must have the type of its default, False"),
        ("limits: {cpu-gc: {waited_at_least_ratio: -1}}", "must be 0 or more"),
        ("limits: {cpu-gc: {waited_at_least_ratio: often}}", "'often' is not a number"),
    ],
)
def test_an_invalid_limit_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_limits(loaded(tmp_path, text), KNOWN)
    assert message in caught.value.message


def test_an_unknown_collector_is_refused(tmp_path: Path) -> None:
    profile = loaded(tmp_path, "sampling:\n  collectors:\n    presure: {hz: 1}\n")
    check_collectors(profile, ["presure"])
    with pytest.raises(UsageError) as caught:
        check_collectors(profile, ["pressure", "disk"])
    assert caught.value.message == (
        "p.yaml:3: unknown collector 'presure'; did you mean 'pressure'?"
    )
