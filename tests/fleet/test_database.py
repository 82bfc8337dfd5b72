"""The ledger is exact, atomic, and says what to do when it cannot be written."""

from __future__ import annotations

import resource
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from clusterprof.errors import ClusterprofError, NoRecording, UsageError
from clusterprof.fleet.database import Ledger, Price, RecordedInput, open_ledger
from clusterprof.fleet.job_entry import JobEntry
from tests.support.fleet_jobs import make_entry

ROOT = Path(__file__).parents[2]


def source(path: str, state: str = "1") -> RecordedInput:
    return RecordedInput(path, state, 100)


def rows(path: Path, sql: str) -> list[tuple[object, ...]]:
    """What another program reads from the file."""
    connection = sqlite3.connect(path)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def test_all_values_of_a_job_are_stored(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    with open_ledger(path) as ledger:
        entry = make_entry(1, ["a", "b"], ["b"])
        assert ledger.put(entry, source("runs/1"), Price(2.5, "EUR")) is False
        assert list(ledger.list_sources()) == ["runs/1"]
    # 4 ranks lose 10 + 5 s each, those of b 20 s more
    assert rows(path, "SELECT user, account, week, gpus, lost_ns, currency FROM jobs") == [
        ("ada", "vision", "2026-W02", 4, 100 * 10**9, "EUR")
    ]
    assert rows(path, "SELECT sum(lost_ns), sum(outside_ns) FROM job_causes") == [
        (100 * 10**9, 40 * 10**9)
    ]
    assert rows(path, "SELECT sum(lost_ns), sum(is_culprit) FROM job_nodes") == [(100 * 10**9, 1)]
    assert rows(path, "SELECT count(*) FROM culprits") == [(3,)]


def count_rows(path: Path) -> list[int]:
    tables = ("jobs", "job_causes", "job_nodes", "culprits", "sources")
    return [int(str(rows(path, f"SELECT count(*) FROM {name}")[0][0])) for name in tables]


def test_the_same_job_is_replaced_from_any_source(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    with open_ledger(path) as ledger:
        ledger.put(make_entry(1, ["a", "b"]), source("runs/1"))
        before = count_rows(path)
        assert ledger.put(make_entry(1, ["a", "b"], ["a"]), source("copy.json")) is True
        assert count_rows(path)[0] == 1
        assert ledger.put(make_entry(1, ["a", "b"]), source("runs/1", "2")) is True
    assert count_rows(path) == [*before[:-1], 2]
    assert rows(path, "SELECT DISTINCT job IS NOT NULL FROM sources") == [(1,)]


def test_a_job_is_replaced_when_another_node_joins(tmp_path: Path) -> None:
    grown = replace(make_entry(2, ["a", "b"]), recordings=("recording-1", "recording-9"))
    with open_ledger(tmp_path / "fleet.db") as ledger:
        ledger.put(make_entry(1, ["a"]), source("runs/1"))
        assert ledger.put(grown, source("runs/1", "2")) is True
    assert count_rows(tmp_path / "fleet.db")[0] == 1


def test_another_job_in_the_same_folder_is_added(tmp_path: Path) -> None:
    with open_ledger(tmp_path / "fleet.db") as ledger:
        ledger.put(make_entry(1, ["a"]), source("out"))
        assert ledger.put(make_entry(2, ["a"]), source("out", "2")) is False
    assert count_rows(tmp_path / "fleet.db")[0] == 2


def test_a_job_keeps_the_price_stored_when_first_added(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    with open_ledger(path) as ledger:
        ledger.put(make_entry(1, ["a"]), source("1"), Price(2.0, "USD"))
        ledger.put(make_entry(2, ["a"]), source("2"))
        ledger.set_missing_prices(Price(3.0, "USD"))
        ledger.put(make_entry(1, ["a"]), source("1", "2"), Price(9.0, "USD"))
    assert rows(path, "SELECT price_per_gpu_hour FROM jobs ORDER BY name") == [(2.0,), (3.0,)]


class Interrupted(JobEntry):
    """Fails when half of its rows are written."""

    __slots__ = ()

    @property
    def culprits(self) -> tuple[object, ...]:  # type: ignore[override]
        raise KeyboardInterrupt


def test_an_interrupted_transaction_keeps_the_old_entry(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    entry = make_entry(1, ["a", "b"])
    names = [name for name in JobEntry.__slots__ if name != "culprits"]
    broken = object.__new__(Interrupted)
    for name in names:
        object.__setattr__(broken, name, getattr(replace(entry, lost_ns=7), name))
    with open_ledger(path) as ledger:
        ledger.put(entry, source("1"))
        before = count_rows(path)
        with pytest.raises(KeyboardInterrupt):
            ledger.put(broken, source("1", "2"))
        assert count_rows(path) == before
        assert rows(path, "SELECT lost_ns FROM jobs") == [(entry.lost_ns,)]
        ledger.put(make_entry(2, ["c"]), source("2"))  # and goes on
    assert count_rows(path)[0] == 2


def test_a_locked_ledger_raises_an_error_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    with open_ledger(path) as ledger:
        ledger.put(make_entry(1, ["a"]), source("1"))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        with open_ledger(path, timeout_s=0.05) as ledger:
            with pytest.raises(ClusterprofError, match="another process keeps the ledger locked"):
                ledger.put(make_entry(2, ["a"]), source("2"))
            other.execute("ROLLBACK")
            ledger.put(make_entry(2, ["a"]), source("2"))
    finally:
        other.close()
    assert count_rows(path)[0] == 2


_FILL = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from clusterprof.errors import OutputFailed
from clusterprof.fleet.database import RecordedInput, open_ledger
from tests.support.fleet_jobs import make_entry
added = 0
try:
    with open_ledger(Path(sys.argv[1])) as ledger:
        for number in range(100_000):
            ledger.put(make_entry(number, ["a", "b", "c"]), RecordedInput(str(number), "1", 1))
            added += 1
except OutputFailed as error:
    print(added, error.message, error.remedy, sep="|")
"""


def test_a_full_disk_keeps_the_stored_jobs(tmp_path: Path) -> None:
    """The size of files is limited, which a write reports as a full disk does."""
    path = tmp_path / "fleet.db"

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))

    done = subprocess.run(
        [sys.executable, "-c", _FILL.format(root=str(ROOT)), str(path)],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    added, message, remedy = done.stdout.strip().split("|")
    assert int(added) > 10 and "cannot write the ledger" in message and "make room" in remedy
    assert count_rows(path)[0] == int(added)
    with open_ledger(path) as ledger:
        ledger.put(make_entry(200_000, ["a"]), source("one more"))


def test_a_killed_process_leaves_only_complete_jobs(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    process = subprocess.Popen([sys.executable, "-c", _FILL.format(root=str(ROOT)), str(path)])
    try:
        end = time.monotonic() + 60
        while not path.exists() or path.stat().st_size < 200_000:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    with open_ledger(path) as ledger:  # rolls back what was half written
        ledger.put(make_entry(200_000, ["a"]), source("one more"))
    jobs, nodes = rows(path, "SELECT count(*), sum(nodes) FROM jobs")[0]
    assert int(str(jobs)) > 10
    assert rows(path, "SELECT count(*) FROM job_nodes") == [(nodes,)]
    assert rows(path, "SELECT count(*) FROM sources WHERE job IS NOT NULL") == [(jobs,)]
    lost = rows(path, "SELECT sum(lost_ns) FROM jobs")
    assert lost == rows(path, "SELECT sum(lost_ns) FROM job_causes")


def test_files_other_than_a_ledger_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("no database at all, but long enough to have a header of a database\n" * 20)
    other = tmp_path / "other.db"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE songs (name TEXT)")
    connection.commit()
    connection.close()
    newer = tmp_path / "newer.db"
    with open_ledger(newer) as ledger:
        ledger.connection.execute("PRAGMA user_version = 99")
    for path, words in (
        (text, "is no ledger"),
        (other, "another program"),
        (newer, "version 99"),
        (tmp_path / "no/such/folder.db", "cannot open"),
        (tmp_path, "cannot open"),
    ):
        with pytest.raises(UsageError, match=words) as caught, open_ledger(path):
            pass
        assert caught.value.remedy
    assert rows(other, "SELECT name FROM sqlite_master") == [("songs",)]


def test_reading_a_missing_ledger_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    with pytest.raises(NoRecording, match="there is no ledger"), open_ledger(path, False):
        pass
    assert not path.exists()
    with open_ledger(path) as ledger:
        ledger.put(make_entry(1, ["a"]), source("1"))
    with open_ledger(path, False) as ledger, pytest.raises(UsageError, match="cannot open"):
        ledger.put(make_entry(2, ["a"]), source("2"))


def test_names_with_quotes_are_stored_unchanged(tmp_path: Path) -> None:
    name = "a'); DROP TABLE jobs; --"
    with open_ledger(tmp_path / "fleet.db") as ledger:
        ledger.put(make_entry(1, [name], user=name), source(name))
        assert _names(ledger) == [(name,)]


def _names(ledger: Ledger) -> list[tuple[str]]:
    return ledger.connection.execute("SELECT name FROM nodes").fetchall()
