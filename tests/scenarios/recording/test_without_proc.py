"""Recording and doctor with psutil in place of /proc, and that Linux never loads psutil."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from clusterprof.agent.doctor.sources import check_host
from clusterprof.agent.linux import psutil_host
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.processes.registry import Registry
from clusterprof.agent.sampling.inventory import build_host_inventory
from clusterprof.agent.sampling.service import read_process_variables
from clusterprof.trace.schema import Columns, Event, Rows
from tests.support.recording_runs import PYTHON, make_environment, make_job_id, read_records, record

READER = """
import sys, time
content = open(sys.argv[1], "rb").read()
time.sleep(2.5)
"""
FORCED = "extends: default\nsampling: {collectors: {portable: {enabled: true}}}\n"


@pytest.fixture
def nowhere(tmp_path: Path) -> Roots:
    """The mount points of a machine without /proc and /sys."""
    return Roots(tmp_path / "no-proc", tmp_path / "no-sys")


def test_the_recorder_on_linux_does_not_load_psutil(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from clusterprof.agent.__main__ import main\n"
        "code = main(['--duration', '1.5s', '--out', sys.argv[1], '--job', sys.argv[2]])\n"
        "print(code, 'psutil' in sys.modules, 'clusterprof.agent.collectors.portable' in"
        " sys.modules)\n"
    )
    done = subprocess.run(
        [PYTHON, "-c", code, str(tmp_path / "out"), make_job_id("psutil")],
        env=make_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "0 False True\n"


def test_a_recording_by_psutil_has_signals_and_the_process_table(tmp_path: Path) -> None:
    """The job reads 3 MiB: the last row of its process has at least these bytes."""
    data, profile, out = tmp_path / "data", tmp_path / "forced.yaml", tmp_path / "out"
    data.write_bytes(bytes(3 << 20))
    profile.write_text(FORCED)
    job = make_job_id("portable")
    options = ("--profile", str(profile), "--inject", "off")
    done = record(out, PYTHON, "-c", READER, str(data), options=options, env=make_environment(job))
    assert done.returncode == 0, done.stderr
    records = read_records(out)
    signals = {name for each in records if isinstance(each, Columns) for name in each.signals}
    assert {"cpu.user_ns_total", "memory.available_bytes"} <= signals
    assert not any(name.startswith("pressure.") for name in signals)
    (registered,) = (
        each.attributes
        for each in records
        if isinstance(each, Event) and each.kind == "process-registered"
    )
    tables = [each for each in records if isinstance(each, Rows)]
    assert {table.table for table in tables} == {"processes"}
    rows = [dict(zip(table.names, row)) for table in tables for row in zip(*table.columns)]
    own = [row for row in rows if row["pid"] == registered["pid"]]
    assert {row["started_ticks"] for row in own} == {registered["started_ticks"]}
    assert own[-1]["read_chars_total"] >= 3 << 20


def test_a_process_is_found_and_attached_without_proc(tmp_path: Path, nowhere: Roots) -> None:
    """For `record --pid`: the start time, the launcher's variables, and the tree below it."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"],
        env={**make_environment(), "RANK": "3", "SECRET": "x"},
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.readline()
    (tmp_path / "register").mkdir()
    registry = Registry(tmp_path, str(nowhere.proc))
    try:
        variables = read_process_variables(nowhere.proc, child.pid)
        assert variables == {"RANK": "3"}
        assert registry.attach(child.pid, variables, 1)
        assert registry.job_pids() == [child.pid]
        (event,) = registry.take(2)
        assert isinstance(event, Event)
        # hundredths of a second since 1970: it started within the last minute
        age_s = time.time() - event.attributes["started_ticks"] / 100
        assert -2 < age_s < 60
        tree = psutil_host.PsutilProcessTree()
        assert [process.pid for process in tree.refresh([child.pid])] == [child.pid]
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        registry.close()
    assert psutil_host.read_start_ticks(child.pid) is None
    assert psutil_host.read_environ(child.pid) == {}
    assert not Registry(tmp_path, str(nowhere.proc)).attach(child.pid, {}, 1)


def test_host_facts_of_psutil_match_those_of_proc(nowhere: Roots) -> None:
    here, portable = psutil_host.read_host_facts(Roots()), psutil_host.read_host_facts(nowhere)
    assert portable.platform == here.platform
    assert (
        portable.memory_bytes == here.memory_bytes == build_host_inventory(nowhere)["memory_bytes"]
    )
    assert portable.logical_cores == here.logical_cores
    assert isinstance(portable.booted_ns, int) and isinstance(here.booted_ns, int)
    assert abs(portable.booted_ns - here.booted_ns) < 2_000_000_000


def test_doctor_states_a_reason_for_unknown_host_facts(
    nowhere: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> float:
        raise PermissionError

    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else None)
    monkeypatch.setattr(psutil, "boot_time", fail)
    check = check_host(nowhere)
    assert check.status == "available"
    assert "8 logical cores, " in check.found and "of memory" in check.found
    assert "booted" not in check.found and "physical" not in check.found
    assert check.missing == (
        "physical cores: psutil.cpu_count: not known on this system",
        "boot time: psutil.boot_time: permission denied",
    )
    assert [gap.owner for gap in check.holes] == ["impossible here", "cluster admin"]


def test_doctor_on_linux_reads_host_facts_from_proc(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:       16777216 kB\n")
    (tmp_path / "proc/stat").write_text("cpu  1 2 3\nbtime 1700000000\n")
    check = check_host(Roots(tmp_path / "proc", tmp_path / "sys"))
    assert "16.0 GiB of memory, booted 2023-11-14 22:13 UTC" in check.found


def test_an_empty_or_missing_proc_counts_as_absent(tmp_path: Path) -> None:
    assert psutil_host.has_linux_proc(Roots())
    assert os.path.isdir(tmp_path) and not psutil_host.has_linux_proc(Roots(tmp_path))
    assert not psutil_host.has_linux_proc(Roots(tmp_path / "none"))
