"""The chart and the examples of deploy/kubernetes: rights of pods, and words that `record` takes.

The chart is rendered by Helm, or by its library for Python, where one is installed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from clusterprof.agent.options import parse_record_arguments
from clusterprof.probe.layout import VARIABLES

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "kubernetes/chart"
EXAMPLES = sorted((DEPLOY / "kubernetes/examples").glob("*.yaml"))
EVERYTHING = {
    "node": {
        "enabled": True,
        "runtimeClassName": "nvidia",
        "tolerations": [{"operator": "Exists"}],
    },
    "fleet": {"gpuPricePerHour": 2.5},
}
LAUNCHER = "/opt/clusterprof/bin/clusterprof"
OWN_IMAGES = ("registry.example/clusterprof:", "registry.example/clusterprof-agent:")


def find_pod_specs(document: Any) -> Iterator[dict[str, Any]]:
    """Yield every pod spec in a manifest, wherever its kind keeps it."""
    if isinstance(document, dict):
        if "containers" in document:
            yield document
        for value in document.values():
            yield from find_pod_specs(value)
    elif isinstance(document, list):
        for value in document:
            yield from find_pod_specs(value)


def list_containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


def load_documents(path: Path) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all(path.read_text(encoding="utf-8")) if item]


@cache
def render_chart(values: str) -> list[dict[str, Any]]:
    """Render the chart with values (JSON)."""
    if shutil.which("helm"):
        command = ["helm", "template", "rel", str(CHART), "--namespace", "ops", "--values", "-"]
        done = subprocess.run(command, input=values, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        texts = [done.stdout]
    else:
        helm = pytest.importorskip("helm_python", reason="needs helm, or helm-python-sdk")
        chart = helm.Chart.load(str(CHART))
        rendered = chart.render(json.loads(values), name="rel", namespace="ops")
        texts = [text for name, text in rendered.items() if name.endswith(".yaml")]
    return [item for text in texts for item in yaml.safe_load_all(text) if item]


def test_chart_files_agree_with_each_other() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert (chart["apiVersion"], chart["name"]) == ("v2", "clusterprof")
    assert set(values) == set(schema["properties"]) - {"global"}
    for name, part in values.items():
        if isinstance(part, dict):
            assert set(part) == set(schema["properties"][name]["properties"]), name
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    unused = [
        f"{name}.{key}"
        for name, part in values.items()
        if isinstance(part, dict)
        for key in part
        if f".Values.{name}.{key}" not in text
    ]
    assert unused == []


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["default", "everything"])
def test_rendered_manifests_are_valid_and_minimally_privileged(values: dict[str, Any]) -> None:
    documents = render_chart(json.dumps(values))
    kinds = {(item["kind"], item["metadata"]["name"]) for item in documents}
    assert ("Deployment", "rel-fleet") in kinds and ("CronJob", "rel-retention") in kinds
    assert (("DaemonSet", "rel-node") in kinds) == bool(values)
    for spec in (spec for item in documents for spec in find_pod_specs(item)):
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert not spec.get("hostPID") and not spec.get("hostIPC")
        assert not any("hostPath" in volume for volume in spec["volumes"])
        mounted = {volume["name"] for volume in spec["volumes"]}
        for container in list_containers(spec):
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
            added = ["DAC_OVERRIDE"] if container["name"] == "retention" else None
            assert rights["capabilities"] == {"drop": ["ALL"]} | ({"add": added} if added else {})
            assert set(container["resources"]) == {"requests", "limits"}
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= mounted


def test_manifests_match_the_kubernetes_schemas() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for item in render_chart(json.dumps(EVERYTHING)):
        for version in ("1.25", "1.34"):
            validate(item, version, strict=True)
    for path in EXAMPLES:
        for item in load_documents(path):
            if item["apiVersion"] in ("v1", "batch/v1"):
                validate(item, "1.34", strict=True)


def test_commands_of_the_chart_exist(tmp_path: Path) -> None:
    """The recorder of a node runs with the words and the profile of the chart."""
    documents = render_chart(json.dumps(EVERYTHING))
    (node,) = (item for item in documents if item["kind"] == "DaemonSet")
    (spec,) = find_pod_specs(node)
    (recorder,) = spec["containers"]
    words = [*recorder["command"], *recorder["args"]]
    options = parse_record_arguments(words[2:])
    assert options is not None and words[:2] == ["clusterprof", "record"]
    assert (options.command, options.mode, options.hz) == ([], "0750", 1.0)
    (profile,) = (item["data"] for item in documents if "node.yaml" in item.get("data", {}))
    (tmp_path / "node.yaml").write_text(profile["node.yaml"])
    (site,) = (item["data"] for item in documents if "site.yaml" in item.get("data", {}))
    (tmp_path / "site.yaml").write_text(site["site.yaml"])
    for name in ("node.yaml", "site.yaml"):
        command = [sys.executable, "-m", "clusterprof", "doctor", "--profile", name, "--json"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    (fleet,) = (item for item in documents if item["kind"] == "Deployment")
    (spec,) = find_pod_specs(fleet)
    (container,) = spec["containers"]
    names = {word.partition("=")[0] for word in container["args"][1:]}
    assert names == {"--watch", "--every", "--db", "--format", "--output", "--profile"}


def test_retention_removes_only_old_recordings(tmp_path: Path) -> None:
    """The script of the CronJob, in a folder that stands for the volume."""
    text = (CHART / "templates/retention.yaml").read_text()
    script = text.split("- |\n", 1)[1].split("              env:")[0]
    script = script.replace("cd /recordings", f"cd {tmp_path}")
    long_ago = time.time() - 40 * 86400
    new, old, kept = "jobs/new", "jobs/old", "jobs/kept"
    for run in (new, old, kept, "jobs/team/old", "nodes", "jobs/no-recording"):
        folder = tmp_path / run / "node-a"
        folder.mkdir(parents=True)
        (folder / ("notes" if "no-" in run else "000001.cpf")).write_bytes(b"x")
    (tmp_path / kept / "keep").touch()
    outside = tmp_path / "outside"
    (outside / "node-a").mkdir(parents=True)
    (outside / "node-a/000001.cpf").touch()
    (tmp_path / "jobs/link").symlink_to(outside)
    for path in tmp_path.rglob("*"):
        if new not in str(path):
            subprocess.run(["touch", "-h", "-d", f"@{long_ago:.0f}", str(path)], check=True)
    done = subprocess.run(
        ["sh", "-c", script],
        env={"DAYS": "30", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(
        ["removing", "removing", "removing", "jobs/old/", "jobs/team/old/", "nodes/node-a/"]
    )
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*")}
    assert left == {new, kept, "jobs/team", "jobs/no-recording", "jobs/link", "outside/node-a"}
    assert (outside / "node-a/000001.cpf").exists()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_pods_have_volumes_and_variables_for_recording(path: Path) -> None:
    specs = [spec for item in load_documents(path) for spec in find_pod_specs(item)]
    assert specs
    for spec in specs:
        install = spec["initContainers"][0]
        assert install["command"] == ["cp", "-a", "/opt/clusterprof/.", "/install/"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert {"clusterprof", "recordings", "shm"} <= volumes
        assert spec["securityContext"]["fsGroup"] == 2000
        for container in list_containers(spec):
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert set(mounts) <= volumes
            if container["image"].startswith(OWN_IMAGES):
                rights = container["securityContext"]
                assert rights["runAsNonRoot"] and rights["capabilities"] == {"drop": ["ALL"]}
            else:
                assert mounts["clusterprof"] == "/opt/clusterprof"
        for variable in (entry["name"] for item in spec["containers"] for entry in item["env"]):
            assert variable in VARIABLES, variable


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_commands_are_valid_record_commands(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    commands = [
        container["command"]
        for item in load_documents(path)
        for spec in find_pod_specs(item)
        for container in spec["containers"]
        if LAUNCHER in container.get("command", ())
    ]
    if not commands:  # within a text that a shell or Ray reads
        line = text.split(LAUNCHER, 1)[1].split("torchrun", 1)[0].split("-- python")[0]
        commands = [[LAUNCHER, *line.replace('"', "").split(), "train"]]
    for words in commands:
        options = parse_record_arguments(words[2:])
        assert words[:2] == [LAUNCHER, "record"] and options is not None
        assert str(options.out).startswith("/recordings/") and options.mode == "0750"
        assert options.command
