"""`clusterprof doctor`: every source looked at once, in a real process, with a remedy's owner."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.collectors.gpu.nvml_counters import GPM_OFF
from clusterprof.agent.collectors.registry import select_collectors
from clusterprof.agent.linux.files import Roots
from tests.support.commands import run_command
from tests.support.nvml.healthy import NO_PERIOD
from tests.support.nvml.simulated import Scenario, build_library, make_environment, make_uuid

NAMES = [kind.name for kind in select_collectors(Roots())]  # type: ignore[attr-defined]
OTHERS = ["spans", "fabric", "host"]


def looks(**changes: str) -> dict[str, dict[str, object]]:
    done = run_command("doctor", "--json", **changes)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert (document["format"], document["schema_version"]) == ("clusterprof-doctor", 1)
    assert [look["name"] for look in document["collectors"]] == [*NAMES, *OTHERS]
    return {look["name"]: look for look in document["collectors"]}


def test_json_lists_every_collector_and_a_reason_for_each_gap() -> None:
    for name, look in looks().items():
        assert set(look) == {
            "name",
            "status",
            "found",
            "message",
            "remedy",
            "owner",
            "missing",
            "holes",
            "elsewhere",
        }
        if look["status"] == "available":
            assert look["found"] and not look["message"] and not look["owner"], name
        else:
            assert look["status"] in ("absent", "denied", "failed")
            assert look["message"] and not look["found"], name
            assert look["owner"] in ("you", "cluster admin", "impossible here")
            assert bool(look["remedy"]) == (look["owner"] != "impossible here")


def test_the_table_lists_and_counts_every_source_of_the_node() -> None:
    away = {name: look["elsewhere"] for name, look in looks().items() if look["elsewhere"]}
    done = run_command("doctor", COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    headline, _, *lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    table, last = "\n".join(lines).rsplit("\n\n", 1)
    rows = [line.split() for line in table.splitlines() if line and not line.startswith(" ")]
    here = {*NAMES, *OTHERS} - set(away)
    assert {row[0] for row in rows} == here and len(rows) == len(here)
    seen = sum(row[1] == "available" for row in rows)
    assert headline == f"{seen} of the {len(here)} sources of this node can be recorded."
    assert " ".join(last.split()) == f"Not on this node: {', '.join(map(str, away.values()))}."


@pytest.fixture
def gpus(tmp_path: Path) -> tuple[Scenario, dict[str, str]]:
    scenario = Scenario(tmp_path / "scenario", devices=2)
    made = make_environment(build_library(tmp_path / "lib"), scenario)
    return scenario, {name: made[name] for name in ("LD_LIBRARY_PATH", "FAKENVML_CTL")}


def test_doctor_queries_gpus_through_the_helper_process(
    gpus: tuple[Scenario, dict[str, str]],
) -> None:
    scenario, changes = gpus
    scenario.write()
    look = looks(**changes)["gpu_nvidia"]
    assert look["status"] == "available"
    assert f"of {make_uuid(0)}, {make_uuid(1)}" in str(look["found"])


@pytest.mark.parametrize("trouble", ["* Init hang", "* Init segv"])
def test_a_hanging_or_crashing_driver_is_reported_in_the_table(
    gpus: tuple[Scenario, dict[str, str]], trouble: str
) -> None:
    scenario, changes = gpus
    scenario.write(trouble)
    result = looks(**changes)
    assert result["gpu_nvidia"]["status"] == "failed"
    assert result["cpu"]["status"] == "available"
    scenario.write()  # so that a helper that hangs may leave


def test_a_missing_value_is_named_with_its_reason(gpus: tuple[Scenario, dict[str, str]]) -> None:
    scenario, changes = gpus
    scenario.write("* GetPowerUsage error 3")
    look = looks(**changes)["gpu_nvidia"]
    assert look["status"] == "available"
    assert [line for line in look["missing"] if line.startswith("gpu.power_watts: ")]  # type: ignore[attr-defined]


def test_profile_values_are_listed_with_their_origins(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: ci\ngate:\n  min_steps: 7\n")
    done = run_command("doctor", "--profile", "mine.yaml", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    values = json.loads(done.stdout)["values"]
    assert values["gate.min_steps"] == {"value": 7, "origin": "mine.yaml:3"}
    assert values["gate.min_coverage_ratio"]["origin"].startswith("profiles/ci.yaml:")
    assert values["recording.max_bytes"]["origin"].startswith("profiles/default.yaml:")
    plain = run_command("doctor", "--profile", "mine.yaml", cwd=tmp_path).stdout.splitlines()
    assert plain[0] == "profile mine.yaml"
    assert [line.split() for line in plain if line.startswith("gate.min_steps")] == [
        ["gate.min_steps", "7", "(mine.yaml:3)"]
    ]


def test_an_unknown_profile_suggests_the_nearest_name() -> None:
    done = run_command("doctor", "--profile", "cii")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean 'ci'?" in done.stderr
    as_json = run_command("doctor", "--profile", "cii", "--json")
    assert json.loads(as_json.stdout)["exit_code"] == 2


def test_in_a_job_doctor_maps_devices_to_ranks(gpus: tuple[Scenario, dict[str, str]]) -> None:
    scenario, changes = gpus
    scenario.write()
    ranks = {
        "RANK": "5",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "8",
        "CUDA_VISIBLE_DEVICES": make_uuid(1),
    }
    ranks["TORCHELASTIC_RUN_ID"] = f"doctor-{os.getpid()}"  # no other ranks here are of this job
    done = run_command("doctor", "--job", "--json", "--path", "tests", **changes, **ranks)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert (document["format"], document["schema_version"]) == ("clusterprof-doctor-job", 1)
    assert set(document) == {
        "format",
        "schema_version",
        "job",
        "processes",
        "processes_from",
        "devices",
        "affinity",
        "files",
        "fabric",
        "settings",
        "changes",
        "collectors",
    }
    (here,) = [process for process in document["processes"] if process["here"]]
    assert (here["rank"], here["chosen"]["CUDA_VISIBLE_DEVICES"]) == (5, make_uuid(1))
    by_key = {device["id"]: device for device in document["devices"]}
    assert (by_key[make_uuid(0)]["visible"], by_key[make_uuid(0)]["users"]) == (False, [])
    (user,) = by_key[make_uuid(1)]["users"]
    assert (user["rank"], user["how"], user["here"]) == (5, "the only one it may see", True)
    allowed = document["affinity"]["cpus_allowed_count"]
    assert allowed == len(os.sched_getaffinity(0))
    assert [file["what"] for file in document["files"]][-1] == "data"


def test_in_a_job_the_doctor_text_fits_the_terminal() -> None:
    done = run_command("doctor", "--job", COLUMNS="80", TORCHELASTIC_RUN_ID="r7", RANK="0")
    assert (done.returncode, done.stderr) == (0, "")
    titles = [line for line in done.stdout.splitlines() if line and not line.startswith(" ")]
    assert titles[0] == "Job" and titles[-5:] == [
        "Accelerators",
        "CPUs",
        "Files",
        "Fabric",
        "Sources",
    ]
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "launcher        torchrun" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--job", "--path", "no/such/data"), "--path no/such/data: there is no such file"),
        (("--path", "tests"), "--path applies to --job only"),
        (("--job", "--profile", "ci"), "--profile and --job cannot be combined"),
    ],
)
def test_invalid_doctor_arguments_are_a_usage_error(arguments: tuple[str, ...], text: str) -> None:
    done = run_command("doctor", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr


def test_doctor_opens_only_counters_that_a_recording_would_open(
    gpus: tuple[Scenario, dict[str, str]], tmp_path: Path
) -> None:
    scenario, changes = gpus
    scenario.gpm = True
    scenario.write()
    holes: dict[str, set[tuple[str, ...]]] = {}
    for gpm in ("true", "false"):
        profile = tmp_path / "counters.yaml"
        profile.write_text(f"extends: default\nsampling: {{gpm: {gpm}}}\n")
        source: Any = looks(**changes, CLUSTERPROF_PROFILE=str(profile))["gpu_nvidia"]
        holes[gpm] = {(*hole["signals"], hole["message"]) for hole in source["holes"]}
    assert holes == {
        "true": set(),
        # Busy time then comes from the driver's buffer, which is empty here.
        "false": {
            ("gpu.sm_active_ratio", GPM_OFF.message),
            ("gpu.busy_until_ns", NO_PERIOD.message),
        },
    }
