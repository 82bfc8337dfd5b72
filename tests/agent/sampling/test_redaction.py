"""What `record --redact` hides and what it keeps."""

from __future__ import annotations

import json
import os
import re
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from clusterprof.agent.launch.identity import is_job_name
from clusterprof.agent.sampling.redaction import Redactor
from clusterprof.trace.dump import export_records
from clusterprof.trace.schema import Columns, Event, Gap, Rows
from tests.support.recording_runs import PYTHON, make_environment, make_job_id, record
from tests.support.trace_samples import HEADER

HIDDEN = re.compile(r"h[0-9a-f]{8}")
HOST = "gpu-17.example.org"


@pytest.fixture
def redactor() -> Redactor:
    return Redactor("train-of-alice", [HOST])


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("/scratch/alice/x.bin", rf"/{HIDDEN.pattern}"),
        ("cannot open /scratch/alice/x.bin: denied", rf"cannot open /{HIDDEN.pattern}: denied"),
        ("/", "/"),
        ("/proc/self/io and /sys/block and /dev/nvidia0", None),
        ("bytes/s, 3/4, km/h", None),
        ("10.1.2.3", HIDDEN.pattern),
        ("0000:1b:00.0", None),
        ("GPU-00000000-0000-0000-0000-000000000001", None),
        ("gpu-17 is slow", rf"{HIDDEN.pattern} is slow"),
        ("gpu-170 is slow", None),
        (HOST, HIDDEN.pattern),
        ("2026-11-28 12:30:01", None),
        ("", None),
    ],
)
def test_paths_addresses_and_this_host_are_hidden(
    redactor: Redactor, text: str, pattern: str | None
) -> None:
    hidden = redactor.hide_text(text)
    assert hidden == text if pattern is None else re.fullmatch(pattern, hidden), hidden


def test_a_name_has_the_same_pseudonym_only_within_a_job(redactor: Redactor) -> None:
    again = Redactor("train-of-alice", ["gpu-18"])  # another node of the job
    assert redactor.hide_name("storage-7") == again.hide_name("storage-7")
    assert Redactor("another", [HOST]).hide_name("storage-7") != redactor.hide_name("storage-7")


@pytest.mark.parametrize("job", ["4711", "4711.0-restart2", "launch-123", "77-1234567", ""])
def test_job_ids_that_are_numbers_are_kept(redactor: Redactor, job: str) -> None:
    assert redactor.hide_job(job) == job


@pytest.mark.parametrize(
    "job", ["alice-llama", "alice-llama-restart2", "train@20261123-224518-4f2a"]
)
def test_a_hidden_job_name_keeps_kind_and_restart_suffix(redactor: Redactor, job: str) -> None:
    hidden = redactor.hide_job(job)
    assert "alice" not in hidden and "train" not in hidden
    assert is_job_name(hidden) == is_job_name(job)
    assert hidden.endswith("-restart2") == job.endswith("-restart2")


def test_redacted_records_keep_numbers_and_lose_names(redactor: Redactor) -> None:
    t_ns = array("q", [1, 2])
    columns = Columns("nfs", ("nfs.read_bytes_total",), ("/mnt/alice",), t_ns, (t_ns,), (None,))
    hidden = redactor.redact(columns)
    assert isinstance(hidden, Columns)
    assert hidden == replace(columns, devices=hidden.devices)
    assert "alice" not in hidden.devices[0]
    names = "python", "/scratch/alice/run", "python alice.py", "alice.py"
    rows = Rows("threads", ("t_ns", "name"), (t_ns, t_ns), {"name": names})
    hidden_rows = redactor.redact(rows)
    assert isinstance(hidden_rows, Rows)
    assert hidden_rows.strings["name"][0] == "python"
    assert "alice" not in hidden_rows.strings["name"][1]
    assert hidden_rows.strings["name"][2] == f"python {redactor.hide_name('alice.py')}"
    assert hidden_rows.strings["name"][3] == "alice.py"  # a program
    gap = Gap(
        5, "disk", "", "/mnt/alice", "failed", f"{HOST}: /mnt/alice: gone", "look at 10.0.0.1"
    )
    assert not re.search(r"alice|gpu-17|10\.0", str(redactor.redact(gap)))
    variables = {"RANK": "3", "MASTER_ADDR": "alice-0", "SLURM_JOB_ID": "4711"}
    event = Event(5, "process-registered", {"pid": 7, "job": "alice-llama", "variables": variables})
    hidden_event = redactor.redact(event)
    assert isinstance(hidden_event, Event)
    assert hidden_event.attributes["pid"] == 7
    assert hidden_event.attributes["job"] == redactor.hide_job("alice-llama")
    assert hidden_event.attributes["variables"] == {
        "RANK": "3",
        "MASTER_ADDR": redactor.hide_name("alice-0"),
        "SLURM_JOB_ID": "4711",
    }


def test_the_header_names_neither_host_nor_job_nor_mounts(redactor: Redactor) -> None:
    header = replace(
        HEADER,
        node={"key": f"{HOST}-0badcafe-20261128T000000.000-7", "hostname": HOST, "display": "n17"},
        host={"mounts": [{"point": "/alice", "source": "nas:/alice", "type": "nfs4"}], "cpus": 2},
        launcher={"job": "alice-llama", "named": True, "variables": {"MASTER_ADDR": "alice-0"}},
    )
    hidden = redactor.redact_header(header)
    assert not re.search(r"alice|gpu-17|n17|nas", str(hidden))
    assert hidden.node["key"] == f"{hidden.node['hostname']}-0badcafe-20261128T000000.000-7"
    assert hidden.host["cpus"] == 2
    assert hidden.host["mounts"][0]["type"] == "nfs4"
    assert hidden.devices == [dict(device) for device in header.devices]


def test_a_redacted_recording_of_a_job_has_no_private_names(tmp_path: Path) -> None:
    home = tmp_path / "home-of-alice"
    home.mkdir()
    script = home / "alice.py"
    script.write_text(
        "import time, clusterprof\n"
        "for _ in range(40):\n"
        "    with clusterprof.span('work'): time.sleep(0.02)\n"
        "    clusterprof.step()\n"
    )
    variables = {"MASTER_ADDR": "alice-0.example.org", "RANK": "0", "WORLD_SIZE": "1"}
    env = make_environment(make_job_id("alice"), **variables)
    out = tmp_path / "out"
    done = record(out, PYTHON, str(script), options=("--redact",), env=env)
    assert done.returncode == 0, done.stderr
    lines = list(export_records(out))
    header = json.loads(lines[0])
    assert HIDDEN.fullmatch(header["node"]["hostname"])
    assert header["folder"].startswith(header["node"]["hostname"])
    assert any('"process-registered"' in line for line in lines)
    assert not [line for line in lines if "alice" in line]
    assert os.uname().nodename not in {header["node"]["hostname"], header["node"]["display"]}
