"""What is collected when ranks stand still, and the user's command for it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from clusterprof.agent.processes import autopsy
from clusterprof.agent.processes.autopsy import (
    COLLECT_NS,
    MAX_DUMP_BYTES,
    HangCollector,
    HangHook,
    HungRanks,
)
from clusterprof.agent.processes.span_rings import RankProgress, SpanRings
from clusterprof.analysis.inputs.profiler_traces import read_dumps
from clusterprof.trace.schema import Event, Record
from tests.support.recording_runs import is_alive

SECOND = 1_000_000_000
STANDSTILL = HungRanks(100 * SECOND, 130 * SECOND, 30 * SECOND, SECOND, (11, 12), (13,), ())


class Rings:
    """Ranks as SpanRings lists them."""

    def __init__(self, *ranks: RankProgress) -> None:
        self.ranks = list(ranks)
        self.ended_ns = 0

    def list_progress(self) -> list[RankProgress]:
        return self.ranks


def rank(pid: int, last: float, waits_since: float = 0.0) -> RankProgress:
    return RankProgress(
        pid,
        1,
        first_ns=SECOND,
        last_ns=round(last * SECOND),
        waits_since_ns=round(waits_since * SECOND),
        is_rank=True,
    )


def stat_line(state: str) -> str:
    return f"7 (python) {state} " + " ".join(["0"] * 48) + "\n"


def node(tmp_path: Path, *pids: int) -> tuple[Path, Path, Path]:
    """Return run directory, folder of the recording and /proc of a node; pid 13 is stopped."""
    run_dir, folder, proc = tmp_path / "run", tmp_path / "node", tmp_path / "proc"
    for path in (run_dir / "register", folder, proc / "net"):
        path.mkdir(parents=True)
    for pid in pids:
        (proc / str(pid)).mkdir()
        (proc / str(pid) / "stat").write_text(stat_line("T" if pid == 13 else "S"))
        (proc / str(pid) / "wchan").write_text("do_signal_stop" if pid == 13 else "futex_wait")
        registration = {"pid": pid, "started_ticks": 1, "variables": {"RANK": str(pid - 11)}}
        (run_dir / "register" / f"{pid}.json").write_text(json.dumps(registration))
    return run_dir, folder, proc


def watch(nodes: tuple[Path, Path, Path], rings: Rings, on_hang: str = "") -> HangCollector:
    run_dir, folder, proc = nodes
    seen: SpanRings = rings  # type: ignore[assignment]
    return HangCollector(run_dir, folder, seen, str(proc), 30 * SECOND, on_hang)


def kinds(records: list[Record]) -> list[str]:
    return [record.kind for record in records if isinstance(record, Event)]


def test_a_hang_is_recorded_once_with_the_state_of_each_rank(tmp_path: Path) -> None:
    rings = Rings(rank(11, 100, 101), rank(12, 100, 101), rank(13, 100))
    autopsies = watch(node(tmp_path, 11, 12, 13), rings)
    assert autopsies.take(130 * SECOND - 1) == []
    [stopped] = autopsies.take(131 * SECOND)
    assert isinstance(stopped, Event)
    assert stopped.kind == "progress-stopped"
    assert stopped.attributes["waiting"] == [11, 12]
    assert stopped.attributes["silent"] == [13]
    assert stopped.attributes["threads"][2] == {"pid": 13, "state": "T", "wchan": "do_signal_stop"}
    assert autopsies.take(132 * SECOND) == []
    rings.ranks[2].last_ns = 133 * SECOND
    assert kinds(autopsies.take(134 * SECOND)) == ["autopsy-finished", "progress-resumed"]


def test_killing_ranks_does_not_count_as_progress(tmp_path: Path) -> None:
    run_dir, folder, _ = nodes = node(tmp_path, 11, 12)
    rings = Rings(rank(11, 100, 101), rank(12, 100))
    autopsies = watch(nodes, rings)
    autopsies.take(131 * SECOND)
    (run_dir / "dumps" / "11.json").write_bytes(b'{"entries": []}')
    autopsies.take(132 * SECOND)
    assert kinds(autopsies.take(131 * SECOND + COLLECT_NS)) == ["autopsy-finished"]
    rings.ranks, rings.ended_ns = [rank(11, 100, 101)], 150 * SECOND  # the other was killed
    assert autopsies.take(150 * SECOND) == []
    rings.ranks = []
    assert autopsies.take(151 * SECOND) == autopsies.finish(152 * SECOND) == []
    assert (folder / "nccl" / "flight_rank_0.json").exists()


def test_dumps_are_marked_resumed_when_ranks_make_progress(tmp_path: Path) -> None:
    run_dir, folder, _ = nodes = node(tmp_path, 11, 12)
    rings = Rings(rank(11, 100, 101), rank(12, 100))
    autopsies = watch(nodes, rings)
    autopsies.take(131 * SECOND)
    (run_dir / "dumps" / "11.json").write_bytes(b'{"entries": []}')
    autopsies.take(132 * SECOND)
    rings.ranks[1].last_ns = 133 * SECOND  # while the dump of rank 1 is awaited
    assert kinds(autopsies.take(134 * SECOND)) == ["autopsy-finished", "progress-resumed"]
    assert [path.name for path in (folder / "nccl").iterdir()] == ["flight_rank_0.json.resumed"]
    assert read_dumps([folder]) == ([], [])


def test_dumps_that_the_probe_writes_are_kept_by_rank(tmp_path: Path) -> None:
    run_dir, folder, _ = nodes = node(tmp_path, 11, 12, 13)
    autopsies = watch(nodes, Rings(rank(11, 100, 101), rank(12, 100, 101), rank(13, 100)))
    autopsies.take(131 * SECOND)
    assert (run_dir / "dumps" / "wanted").exists()
    (run_dir / "dumps" / "11.json").write_bytes(b'{"entries": []}')
    with open(run_dir / "dumps" / "12.json", "wb") as large:
        large.truncate(MAX_DUMP_BYTES + 1)
    # Rank 2 is stopped: its probe cannot answer, and nothing more is awaited.
    [finished] = autopsies.take(132 * SECOND)
    assert isinstance(finished, Event)
    assert finished.attributes["dumps"] == ["flight_rank_0.json"]
    assert finished.attributes["without_dump"] == [12, 13]
    assert finished.attributes["ras_reason"] == "no RAS service of this job listens on port 28028"
    assert [path.name for path in (folder / "nccl").iterdir()] == ["flight_rank_0.json"]
    assert not (run_dir / "dumps" / "wanted").exists()


def test_the_ras_address_comes_from_the_environment_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_RAS_ADDR", "10.0.0.7:28028")
    autopsies = watch(node(tmp_path, 11, 12), Rings(rank(11, 100, 101), rank(12, 100)))
    autopsies.take(131 * SECOND)
    [finished] = autopsies.take(131 * SECOND + COLLECT_NS)
    assert isinstance(finished, Event)
    assert "'10.0.0.7:28028' is not an address of this machine" in finished.attributes["ras_reason"]


def test_a_repeatedly_hanging_job_is_examined_a_limited_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autopsy, "MAX_AUTOPSIES", 2)
    rings = Rings(rank(11, 100, 101), rank(12, 100))
    autopsies = watch(node(tmp_path, 11, 12), rings)
    now_ns, seen = 131 * SECOND, []
    for _ in range(4):
        seen += kinds(autopsies.take(now_ns))
        seen += kinds(autopsies.take(now_ns + COLLECT_NS))
        rings.ranks[1].last_ns = now_ns + COLLECT_NS
        seen += kinds(autopsies.take(now_ns + COLLECT_NS + 1))
        now_ns += 100 * SECOND
        rings.ranks[0].waits_since_ns = now_ns - 60 * SECOND
    assert seen.count("progress-stopped") == seen.count("progress-resumed") == 4
    assert seen.count("autopsy-finished") == 2


# --- the user's command ---


def wait_for(path: Path, text: str) -> str:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if path.exists() and text in path.read_text():
            return path.read_text()
        time.sleep(0.02)
    raise AssertionError(path.read_text() if path.exists() else "nothing was written")


def test_the_hang_command_runs_once_in_a_separate_session(tmp_path: Path) -> None:
    words = ["$CLUSTERPROF_HANG_PIDS", "$CLUSTERPROF_HANG_SILENT_PIDS", "$CLUSTERPROF_HANG_SECONDS"]
    hook = HangHook(f"echo {' / '.join(words)} / $(ps -o sid= -p $$) end", tmp_path)
    assert hook.start(STANDSTILL, 145 * SECOND) == "started"
    assert hook.start(STANDSTILL, 145 * SECOND) == ""
    text = wait_for(tmp_path / "on-hang.log", "end")
    pids, silent, seconds, session = (part.strip() for part in text.split("/"))
    assert (pids, silent, seconds) == ("11 12 13", "13", "45")
    assert int(session.split()[0]) != os.getsid(0)
    assert text.count("end") == 1
    hook.check()


def test_an_endless_hang_command_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autopsy, "_HOOK_SHELL", autopsy._HOOK_SHELL.replace("sleep 60", "sleep 1"))
    hook = HangHook("trap '' TERM; sleep 300 & echo $! $$ end; wait", tmp_path)
    hook.start(STANDSTILL, 145 * SECOND)
    child, shell, _ = wait_for(tmp_path / "on-hang.log", "end").split()
    end = time.monotonic() + 10
    while time.monotonic() < end and (is_alive(int(child)) or is_alive(int(shell))):
        time.sleep(0.05)
        hook.check()
    assert not is_alive(int(child))
    assert not is_alive(int(shell))


def test_excessive_output_of_the_hang_command_is_cut(tmp_path: Path) -> None:
    hook = HangHook("yes >&2; echo unreached", tmp_path)
    hook.start(STANDSTILL, 145 * SECOND)
    log = tmp_path / "on-hang.log"
    end = time.monotonic() + 20
    while time.monotonic() < end and hook._pid:
        hook.check()
        time.sleep(0.05)
    assert log.stat().st_size <= 16 << 20


def test_an_unwritable_folder_prevents_the_hang_command(tmp_path: Path) -> None:
    hook = HangHook("echo", tmp_path / "absent")
    assert hook.start(STANDSTILL, 145 * SECOND).startswith("could not be started: No such file")
