"""Store the jobs of a cluster in a SQLite file.

    with open_ledger(Path("fleet.db")) as ledger:
        ledger.put(entry, source, price)

A job is replaced as a whole in one transaction: readers and a crash see the old entry or the new
one. The journal is SQLite's default, which also works on most network file systems. Tables:

    jobs          a row per job
    job_causes    a row per job and cause; ordered by week and cause, as they are summed
    job_nodes     a row per job and node; ordered by node
    job_places    a row per job and mount, disk or NIC that was to blame
    culprits      a row per job, cause and culprit; ordered by node
    sources       what was read: path, state of its files, and the job or why there is none
    causes, nodes, places    names, so that the large tables hold numbers only
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clusterprof.errors import ClusterprofError, NoRecording, OutputFailed, UsageError
from clusterprof.fleet.job_entry import FIRST, LAST, JobEntry

SCHEMA_VERSION = 1
APPLICATION_ID = 0x43504C47
"""Marks a SQLite file as a ledger of ours ("CPLG")."""
LOCK_TIMEOUT_S = 30.0
"""Time to wait for another process that writes, seconds: adding a job takes milliseconds."""

_SCHEMA = """
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, first_recording TEXT NOT NULL,
    title TEXT NOT NULL, name TEXT NOT NULL,
    user TEXT NOT NULL, account TEXT NOT NULL, started_ns INTEGER, week TEXT NOT NULL,
    nodes INTEGER NOT NULL, gpus INTEGER NOT NULL, ranks INTEGER NOT NULL, steps INTEGER NOT NULL,
    window_ns INTEGER NOT NULL, unmeasured_ns INTEGER NOT NULL, outside_ns INTEGER NOT NULL,
    in_step_ns INTEGER NOT NULL, productive_ns INTEGER NOT NULL, lost_ns INTEGER NOT NULL,
    main_cause TEXT NOT NULL, is_upper_bound INTEGER NOT NULL, is_emulated INTEGER NOT NULL,
    too_little_seen TEXT NOT NULL, is_first_culprit INTEGER, is_last_culprit INTEGER,
    price_per_gpu_hour REAL, currency TEXT
);
CREATE TABLE causes (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, family TEXT NOT NULL, title TEXT NOT NULL,
    tone INTEGER NOT NULL
);
CREATE TABLE nodes (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, switch TEXT NOT NULL
);
CREATE TABLE places (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE job_causes (
    week TEXT NOT NULL, cause INTEGER NOT NULL, job INTEGER NOT NULL,
    lost_ns INTEGER NOT NULL, outside_ns INTEGER NOT NULL,
    PRIMARY KEY (week, cause, job)
) WITHOUT ROWID;
CREATE INDEX causes_of_job ON job_causes (job);
CREATE TABLE job_nodes (
    node INTEGER NOT NULL, job INTEGER NOT NULL, ranks INTEGER NOT NULL,
    window_ns INTEGER NOT NULL, lost_ns INTEGER NOT NULL, caused_ns INTEGER NOT NULL,
    is_tested INTEGER NOT NULL, is_culprit INTEGER NOT NULL, position INTEGER NOT NULL,
    chance_ratio REAL NOT NULL,
    PRIMARY KEY (node, job)
) WITHOUT ROWID;
CREATE INDEX nodes_of_job ON job_nodes (job);
CREATE TABLE culprits (
    node INTEGER NOT NULL, job INTEGER NOT NULL, number INTEGER NOT NULL, cause INTEGER NOT NULL,
    rank INTEGER, device TEXT NOT NULL, resource TEXT NOT NULL, caused_ns INTEGER NOT NULL,
    PRIMARY KEY (node, job, number)
) WITHOUT ROWID;
CREATE TABLE job_places (
    place INTEGER NOT NULL, job INTEGER NOT NULL, cause INTEGER NOT NULL, nodes INTEGER NOT NULL,
    caused_ns INTEGER NOT NULL,
    PRIMARY KEY (place, job)
) WITHOUT ROWID;
CREATE INDEX places_of_job ON job_places (job);
CREATE INDEX culprits_of_job ON culprits (job);
CREATE TABLE sources (
    path TEXT PRIMARY KEY, state TEXT NOT NULL, bytes INTEGER NOT NULL, job INTEGER,
    problem TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX sources_of_job ON sources (job);
"""
_JOB_COLUMNS = (
    *(
        "key",
        "first_recording",
        "title",
        "name",
        "user",
        "account",
        "started_ns",
        "week",
        "nodes",
        "gpus",
        "ranks",
    ),
    *("steps", "window_ns", "unmeasured_ns", "outside_ns", "in_step_ns", "productive_ns"),
    *("lost_ns", "main_cause", "is_upper_bound", "is_emulated", "too_little_seen"),
)
"""Columns of `jobs` that are attributes of `JobEntry`."""
_CHILD_TABLES = ("job_causes", "job_nodes", "job_places", "culprits")


@dataclass(frozen=True, slots=True)
class RecordedInput:
    """What was read at a path."""

    path: str
    state: str
    """Names, sizes and times of its files, condensed; it differs when any of them changed."""
    bytes: int
    """Size of all its files."""
    problem: str = ""
    """Why it gave no job; "" when it did."""


@dataclass(frozen=True, slots=True)
class Price:
    """Price of a GPU-hour."""

    per_gpu_hour: float
    currency: str


class Ledger:
    """An open ledger."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        """Take an open connection whose schema is ours."""
        self.path = path
        self.connection = connection
        self._numbers: dict[tuple[str, str], int] = {}

    def list_sources(self) -> dict[str, RecordedInput]:
        """List what was read, by path."""
        with convert_errors(self.path):
            rows = self.connection.execute("SELECT path, state, bytes, problem FROM sources")
            return {row[0]: RecordedInput(*row) for row in rows}

    def put(self, entry: JobEntry, source: RecordedInput, price: Price | None = None) -> bool:
        """Add a job, or replace it, in one transaction; return whether it was there before.

        It replaces the entry of the same job, and that of an earlier state of the same recording:
        read from the same path, before more nodes had joined.
        price: used where the job has none yet. Raises: as `open_ledger`.
        """
        with convert_errors(self.path), self._begin():
            rows = self.connection.execute(
                "SELECT id, price_per_gpu_hour, currency, key, first_recording FROM jobs"
                " WHERE key = ? OR id = (SELECT job FROM sources WHERE path = ?)",
                (entry.key, source.path),
            ).fetchall()
            matching_rows = [
                row for row in rows if row[3] == entry.key or row[4] in entry.recordings
            ]
            stored_price = next(
                ((row[1], row[2]) for row in matching_rows if row[1] is not None), None
            )
            for row in matching_rows:
                self._delete_job(row[0])
            paid = stored_price or ((price.per_gpu_hour, price.currency) if price else (None, None))
            job = self._insert_job(entry, paid, matching_rows[0][0] if matching_rows else None)
            self._insert_parts(job, entry)
            for row in matching_rows:  # other paths of the same job stay read
                self.connection.execute("UPDATE sources SET job = ? WHERE job = ?", (job, row[0]))
            self._put_source(source, job)
            return bool(matching_rows)

    def put_problem(self, source: RecordedInput) -> None:
        """Note that a path gave no job; a job that it gave before is kept. Raises: as `put`."""
        with convert_errors(self.path), self._begin():
            row = self.connection.execute(
                "SELECT job FROM sources WHERE path = ?", (source.path,)
            ).fetchone()
            self._put_source(source, row[0] if row else None)

    def set_missing_prices(self, price: Price) -> None:
        """Give every job without a price this one. Raises: as `put`."""
        with convert_errors(self.path), self._begin():
            self.connection.execute(
                "UPDATE jobs SET price_per_gpu_hour = ?, currency = ?"
                " WHERE price_per_gpu_hour IS NULL",
                (price.per_gpu_hour, price.currency),
            )

    @contextmanager
    def _begin(self) -> Iterator[None]:
        """Run a transaction that no other process writes into; a failed one changes nothing."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.connection.execute("COMMIT")
        except BaseException:
            self._numbers.clear()  # what was inserted meanwhile is gone
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise

    def _delete_job(self, job: int) -> None:
        for table in _CHILD_TABLES:
            self.connection.execute(f"DELETE FROM {table} WHERE job = ?", (job,))
        self.connection.execute("DELETE FROM jobs WHERE id = ?", (job,))

    def _insert_job(
        self, entry: JobEntry, paid: tuple[float | None, str | None], id_: int | None
    ) -> int:
        at_edge = {node.position: node.is_culprit for node in entry.node_times if node.is_tested}
        edges = (at_edge.get(FIRST), at_edge.get(LAST))
        values = [getattr(entry, name) for name in _JOB_COLUMNS]
        edge_names = ("is_first_culprit", "is_last_culprit")
        names = ("id", *_JOB_COLUMNS, *edge_names, "price_per_gpu_hour", "currency")
        marks = ", ".join("?" * len(names))
        cursor = self.connection.execute(
            f"INSERT INTO jobs ({', '.join(names)}) VALUES ({marks})", (id_, *values, *edges, *paid)
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def _insert_parts(self, job: int, entry: JobEntry) -> None:
        run = self.connection.executemany
        causes = {
            time.cause: self._get_number(
                "causes", time.cause, family=time.family, title=time.title, tone=time.tone
            )
            for time in entry.causes
        }
        run(
            "INSERT INTO job_causes VALUES (?, ?, ?, ?, ?)",
            [
                (entry.week, causes[time.cause], job, time.lost_ns, time.outside_ns)
                for time in entry.causes
            ],
        )
        nodes = {
            time.node: self._get_number("nodes", time.node, switch=time.switch)
            for time in entry.node_times
        }
        run(
            "INSERT INTO job_nodes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    *(nodes[time.node], job, time.ranks, time.window_ns, time.lost_ns),
                    *(time.caused_ns, time.is_tested, time.is_culprit, time.position),
                    time.chance_ratio,
                )
                for time in entry.node_times
            ],
        )
        run(
            "INSERT INTO culprits VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    nodes.get(culprit.node) or self._get_number("nodes", culprit.node, switch=""),
                    *(job, number, causes.get(culprit.cause) or self._get_cause(culprit.cause)),
                    *(culprit.rank, culprit.device, culprit.resource, culprit.caused_ns),
                )
                for number, culprit in enumerate(entry.culprits)
            ],
        )
        run(
            "INSERT INTO job_places VALUES (?, ?, ?, ?, ?)",
            [
                (
                    *(self._get_number("places", place.name), job),
                    causes.get(place.cause) or self._get_cause(place.cause),
                    *(place.nodes, place.caused_ns),
                )
                for place in entry.places
            ],
        )

    def _get_cause(self, name: str) -> int:
        return self._get_number("causes", name, family=name, title="", tone=0)

    def _get_number(self, table: str, name: str, **facts: str | int) -> int:
        """Return the number of a name; it is added, and its facts are kept up to date."""
        number = self._numbers.get((table, name))
        if number is not None and not facts.get("switch"):
            return number
        columns = ["name", *facts]
        changes = [f"{column} = excluded.{column}" for column, value in facts.items() if value]
        resolve = f"DO UPDATE SET {', '.join(changes)}" if changes else "DO NOTHING"
        self.connection.execute(
            f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
            f" ON CONFLICT (name) {resolve}",
            (name, *facts.values()),
        )
        row = self.connection.execute(f"SELECT id FROM {table} WHERE name = ?", (name,)).fetchone()
        self._numbers[table, name] = int(row[0])
        return int(row[0])

    def _put_source(self, source: RecordedInput, job: int | None) -> None:
        self.connection.execute(
            "INSERT INTO sources VALUES (?, ?, ?, ?, ?) ON CONFLICT (path) DO UPDATE SET"
            " state = excluded.state, bytes = excluded.bytes, job = excluded.job,"
            " problem = excluded.problem",
            (source.path, source.state, source.bytes, job, source.problem),
        )


@contextmanager
def open_ledger(
    path: Path, is_written: bool = True, timeout_s: float = LOCK_TIMEOUT_S
) -> Iterator[Ledger]:
    """Open a ledger, and create it where there is none and it is to be written.

    Raises: NoRecording when there is none to read; UsageError when the file is no ledger, of a
    newer version, or may not be used; OutputFailed when the disk is full; ClusterprofError when
    another process keeps it locked.
    """
    if not is_written and not path.exists():
        raise NoRecording(
            f"{path}: there is no ledger", "add jobs to it: clusterprof fleet RUN... --db FILE"
        )
    with convert_errors(path):
        mode = "rwc" if is_written else "ro"
        address = f"{path.absolute().as_uri()}?mode={mode}"
        connection = sqlite3.connect(address, timeout_s, isolation_level=None, uri=True)
    try:
        with convert_errors(path):
            connection.execute("PRAGMA foreign_keys = OFF")
            connection.execute("PRAGMA cache_size = -65536")  # 64 MiB
            _check_schema(path, connection, is_written)
        yield Ledger(path, connection)
    finally:
        connection.close()


def _check_schema(path: Path, connection: sqlite3.Connection, is_written: bool) -> None:
    """Create the schema in an empty file, or check that the file has ours."""
    if _has_our_schema(path, connection):
        return
    if not is_written:
        raise UsageError(f"{path}: is an empty file, not a ledger of clusterprof")
    connection.execute("BEGIN IMMEDIATE")
    if _has_our_schema(path, connection):  # another process was faster
        connection.execute("ROLLBACK")
        return
    try:
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _has_our_schema(path: Path, connection: sqlite3.Connection) -> bool:
    """Return whether a database has our schema; False when it is empty.

    Raises: UsageError for the database of another program, or of a newer version.
    """
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if not tables and not application:
        return False
    if application != APPLICATION_ID:
        raise UsageError(
            f"{path}: is a database of another program", "give a new file, or a ledger"
        )
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"{path}: has version {version} of the ledger, this clusterprof reads {SCHEMA_VERSION}",
            "update clusterprof, or add the jobs to a new file",
        )
    return True


@contextmanager
def convert_errors(path: Path) -> Iterator[None]:
    """Convert the errors of SQLite to errors that say what to do.

    Raises: OutputFailed, UsageError or ClusterprofError, see `open_ledger`.
    """
    try:
        yield
    except sqlite3.Error as error:
        raise _convert_error(path, str(error).lower()) from None


def _convert_error(path: Path, reason: str) -> ClusterprofError:
    if "locked" in reason:
        return ClusterprofError(
            f"{path}: another process keeps the ledger locked",
            "try again when it has ended: another `clusterprof fleet`, or a program that has the"
            " file open",
        )
    if "full" in reason or "disk i/o" in reason:
        return OutputFailed(
            f"{path}: cannot write the ledger: {reason}",
            "make room and run the command again: the jobs added so far are kept",
        )
    if "readonly" in reason or "unable to open" in reason or "read-only" in reason:
        return UsageError(
            f"{path}: cannot open the ledger: {reason}",
            "give a file in a folder that exists and may be written",
        )
    if "not a database" in reason or "malformed" in reason:
        return UsageError(
            f"{path}: is no ledger, or a damaged one: {reason}",
            "give another file, and add the runs again",
        )
    return ClusterprofError(
        f"{path}: the ledger cannot be used: {reason}", "give a new file, and add the runs again"
    )
