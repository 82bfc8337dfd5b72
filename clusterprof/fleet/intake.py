"""Find recordings and stored reports, and bring the ledger up to date with them.

What was read and has not changed is not read again: the names, sizes and times of its files decide.
A recording that still grows is read again and replaces its entry. While a folder is watched, it is
read again only when it has grown by a quarter, or is no longer written: so a job costs about as
much as five analyses, however long it runs.

A run that cannot be read is noted with its reason, and the others are read all the same.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.pipeline import AnalysisRequest, analyze_with_request
from clusterprof.errors import ClusterprofError, NoRecording, UsageError
from clusterprof.fleet.database import Ledger, Price, RecordedInput
from clusterprof.fleet.job_entry import JobEntry, build_job_entry
from clusterprof.gate.stored_report import is_report, load_report
from clusterprof.report.document_base import FORMAT
from clusterprof.trace.segments import is_segment

MAX_DEPTH = 6
"""Levels of folders that are searched below a given one: DIR/user/date/job and some more."""
QUIET_S = 60.0
"""A recording that was not written for so long has ended, seconds: a recorder writes every second,
and a shared file system may keep an old time for most of a minute."""
GROWTH_FACTOR = 1.25
"""Growth at which a recording is read again while its job runs and its folder is watched."""
_HEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class Run:
    """A recording, or a stored report."""

    path: Path
    state: str
    """As in `RecordedInput`."""
    bytes: int
    written_s: float
    """When the newest of its files was written, seconds since 1970."""
    owner: int
    """User id of its owner."""
    is_report: bool

    @property
    def source(self) -> RecordedInput:
        """Return it as the ledger keeps it."""
        return RecordedInput(str(self.path), self.state, self.bytes)


@dataclass
class Intake:
    """What happened to the runs."""

    added: int = 0
    replaced: int = 0
    unchanged: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    """(path, why it could not be read)."""


def find_runs(paths: Iterable[Path]) -> Iterator[Run]:
    """Find the recordings and stored reports at some paths, and in the folders below them.

    Raises: NoRecording for a path that does not exist, or a file that is neither.
    """
    keys: set[str] = set()
    for path in paths:
        for run in _find_runs_at(path.absolute()):
            if str(run.path) not in keys:
                keys.add(str(run.path))
                yield run


def _find_runs_at(path: Path) -> Iterator[Run]:
    try:
        status = os.stat(path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise NoRecording(
            f"{path}: {reason}", "give recordings, reports, or folders of them"
        ) from None
    if stat.S_ISDIR(status.st_mode):
        yield from _search_folder(path, MAX_DEPTH)
    elif is_report(path):
        yield _make_report_run(path, status)
    else:
        raise NoRecording(
            f"{path}: is neither a recording nor a report",
            "a report is made by: clusterprof analyze RUN --json -o report.json",
        )


def _search_folder(folder: Path, depth: int) -> Iterator[Run]:
    """Search a folder: it is a recording, has recordings in it, or both."""
    segments, subfolders, files = _list_folder(folder)
    if segments:  # the folder of a single node
        yield _make_recording_run(folder, segments)
        return
    nodes: list[os.DirEntry[str]] = []
    folders = []
    for subfolder in subfolders:
        inside = _list_folder(Path(subfolder.path))[0]
        nodes += inside
        if not inside:
            folders.append(Path(subfolder.path))
    if nodes:
        yield _make_recording_run(folder, nodes)
    for file in files:
        if file.name.endswith(".json") and _has_report_head(Path(file.path)):
            yield _make_report_run(Path(file.path), file.stat())
    if depth > 0:
        for path in folders:
            yield from _search_folder(path, depth - 1)


_Entries = list[os.DirEntry[str]]


def _list_folder(folder: Path) -> tuple[_Entries, _Entries, _Entries]:
    """List segments, folders and other files of a folder, by name; links are skipped."""
    segments: _Entries = []
    folders: _Entries = []
    files: _Entries = []
    try:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry)
                elif entry.is_file(follow_symlinks=False):
                    (segments if is_segment(entry.name) else files).append(entry)
    except OSError:
        return [], [], []  # a folder of another user among many
    return segments, folders, files


def _make_recording_run(path: Path, segments: Sequence[os.DirEntry[str]]) -> Run:
    digest = hashlib.sha256()
    size, written_ns = 0, 0
    for segment in segments:
        try:
            status = segment.stat()
        except OSError:
            continue  # the recorder has just removed it
        name = os.path.relpath(segment.path, path)
        digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode(errors="replace"))
        size += status.st_size
        written_ns = max(written_ns, status.st_mtime_ns)
    owner = path.stat().st_uid
    return Run(path, digest.hexdigest()[:32], size, written_ns / 1e9, owner, False)


def _make_report_run(path: Path, status: os.stat_result) -> Run:
    state = f"{status.st_size} {status.st_mtime_ns}"
    return Run(path, state, status.st_size, status.st_mtime_ns / 1e9, status.st_uid, True)


def _has_report_head(path: Path) -> bool:
    """Return whether a JSON file begins as our reports do, so that other files are passed over."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    return head.lstrip().startswith(b"{") and f'"{FORMAT}"'.encode() in head


def update_ledger(
    ledger: Ledger,
    runs: Iterable[Run],
    request: AnalysisRequest,
    price: Price | None = None,
    is_watched: bool = False,
    read_again: bool = False,
    on_run: Callable[[str], None] | None = None,
) -> Intake:
    """Read the runs that are new or have changed, and store their jobs.

    request: its `jobs` are processes that read one run each. is_watched: leave recordings that have
    hardly grown for later. read_again: read also what has not changed. on_run: called with the path
    of each run that was read. Raises: as `open_ledger`, when the ledger cannot be written.
    """
    intake = Intake()
    sources = ledger.list_sources()
    waiting = []
    for run in runs:
        if _is_due(run, sources.get(str(run.path)), is_watched, read_again):
            waiting.append(run)
        else:
            intake.unchanged += 1
    read = partial(read_run, request=replace(request, jobs=1))
    for run, result in read_in_processes(read, waiting, min(request.jobs, len(waiting))):
        if on_run is not None:
            on_run(str(run.path))
        if isinstance(result, str):
            ledger.put_problem(replace(run.source, problem=result))
            intake.failed.append((str(run.path), result))
        elif ledger.put(result, run.source, price):
            intake.replaced += 1
        else:
            intake.added += 1
    return intake


def _is_due(run: Run, stored: RecordedInput | None, is_watched: bool, read_again: bool) -> bool:
    """Decide whether a run is to be read."""
    if stored is None or read_again:
        return True
    if stored.state == run.state:
        return bool(stored.problem) and not is_watched
    is_growing = not run.is_report and time.time() - run.written_s < QUIET_S
    return not is_watched or not is_growing or run.bytes >= GROWTH_FACTOR * stored.bytes


def read_run(run: Run, request: AnalysisRequest) -> JobEntry | str:
    """Read one run; return its entry, or why it cannot be read."""
    try:
        if run.is_report:
            report, user = load_report(run.path), ""
        else:
            report, user = analyze_with_request([run.path], request), _get_user_name(run.owner)
        if not report.rank_count:  # it held no device that is known
            return f"{run.path}: no training process was recorded"
        return build_job_entry(report, CAUSES, user)
    except UsageError:
        raise  # the request is wrong, whatever the run
    except ClusterprofError as error:
        return error.message
    except (OSError, MemoryError) as error:
        return f"{run.path}: {error or type(error).__name__}"


def _get_user_name(uid: int) -> str:
    """Return the owner's name; "" for root, who may have recorded the job of anybody."""
    if uid == 0:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


_Read = Callable[[Run], "JobEntry | str"]
_Results = Iterator[tuple[Run, "JobEntry | str"]]


def read_in_processes(read: _Read, runs: Sequence[Run], processes: int) -> _Results:
    """Read runs in some processes, in the order in which they are ready.

    One that kills its process, such as by using up the memory, breaks the reading of others: they
    are read again one by one, each in a process of its own.
    """
    if processes < 2:
        yield from ((run, read(run)) for run in runs)
        return
    broken = []
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        waiting = {pool.submit(read, run): run for run in runs}
        for future in as_completed(waiting):
            try:
                yield waiting[future], future.result()
            except BrokenProcessPool:
                broken.append(waiting[future])
    for run in broken:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            try:
                yield run, pool.submit(read, run).result()
            except BrokenProcessPool:
                yield run, f"{run.path}: the process that read it was killed; is memory short?"


def format_intake(intake: Intake) -> str:
    """Format what happened in one line."""
    parts = [
        (intake.added, "added"),
        (intake.replaced, "replaced"),
        (intake.unchanged, "unchanged"),
    ]
    text = ", ".join(f"{count:,} {word}" for count, word in parts)
    return text + (f", {len(intake.failed):,} could not be read" if intake.failed else "")
