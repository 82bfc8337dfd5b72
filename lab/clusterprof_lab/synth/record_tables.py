"""The tables of threads and processes, row by row as the collectors would have written them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof.agent.collectors.processes import PROCESS_COLUMNS
from clusterprof.agent.linux.threads import COLUMNS as THREAD_COLUMNS
from clusterprof_lab.synth.activity_counters import ROW, ThreadTrack
from clusterprof_lab.synth.record_node import JIFFY_NS
from clusterprof_lab.synth.recorder_view import RecorderView

Int = NDArray[np.int64]

RSS_BYTES = 2 << 30
_WCHAN_NS = 500_000_000  # a thread that sleeps anew in every tick is asked where at most so often,
# the first one of a process always
_QUIET_NS = 1_000_000_000  # a thread that is no process's first leaves the table after so long
_SLEEPING, _BLOCKED, _READY = ord("S"), ord("D"), ord("R")


@dataclass
class Table:
    """Rows of one table for the whole recording, by time."""

    name: str
    names: tuple[str, ...]
    columns: Int
    """int64[columns, rows]; the first is t_ns."""
    strings: dict[str, Sequence[str]]


def make_thread_rows(sight: RecorderView, ticks: Int) -> Table:
    """One row per thread and tick while it lives."""
    words: list[str] = []
    index: dict[str, int] = {}
    names: dict[str, int] = {}
    t_ns = sight.t_ns[ticks]
    blocks = []
    for number in sight.recorded:
        track = sight.tracks[number]
        values = sight.grown[number][:, ticks]
        state, changed = _list_states(sight, number, ticks, values)
        place = _list_wait_places(sight, number, ticks, state, changed)
        wchan = np.array(
            [-1 if function == "" else index.setdefault(function, len(index)) for function in place]
        )
        on_cpu = np.rint(values[ROW["user"]] + values[ROW["system"]])
        waited = values[ROW["iowait"]] if sight.seen.delay_accounting else None
        rows = np.array(
            [
                t_ns,
                np.full(len(t_ns), track.thread.pid),
                np.full(len(t_ns), track.thread.tid),
                state,
                on_cpu,
                np.rint(values[ROW["delay"]]),
                _round_to_jiffies(values[ROW["user"]]),
                _round_to_jiffies(values[ROW["system"]]),
                np.full(len(t_ns), -1) if waited is None else _round_to_jiffies(waited),
                np.floor(values[ROW["faults"]] + 1e-6),
                wchan,
                np.full(len(t_ns), _get_names(track, names)),
            ]
        ).astype(np.int64)
        blocks.append(rows[:, _is_listed(sight, track, t_ns, state, on_cpu)])
    words += index
    return Table(
        "threads",
        THREAD_COLUMNS,
        _sort_by_time(blocks, len(THREAD_COLUMNS)),
        {"wchan": tuple(words), "name": tuple(names)},
    )


def _get_names(track: ThreadTrack, names: dict[str, int]) -> int:
    """Only threads beside the first of a process are asked for their names."""
    thread = track.thread
    if thread.pid == thread.tid:
        return -1
    return names.setdefault(thread.name[:15], len(names))


def make_process_rows(sight: RecorderView, ticks: Int) -> Table:
    """One row per process and reading while it lives; bytes are those of all its threads."""
    names: dict[str, int] = {}
    t_ns = sight.t_ns[ticks]
    by_pid: dict[int, list[int]] = {}
    for number in sight.recorded:
        by_pid.setdefault(sight.tracks[number].thread.pid, []).append(number)
    blocks = []
    for pid, numbers in by_pid.items():
        first = next((n for n in numbers if sight.tracks[n].thread.tid == pid), numbers[0])
        track = sight.tracks[first]
        sums = np.floor(sight.grown[numbers][:, :, ticks].sum(axis=0) + 1e-6)
        columns = {
            "t_ns": t_ns,
            "pid": pid,
            "parent_pid": track.thread.parent_pid,
            "started_ticks": get_start_ticks(track),
            "rss_bytes": RSS_BYTES,
            "read_chars_total": sums[ROW["read_chars"]],
            "write_chars_total": sums[ROW["write_chars"]],
            "read_bytes_total": sums[ROW["read_bytes"]],
            "write_bytes_total": sums[ROW["write_bytes"]],
            "threads_count": len(numbers),
            "name": names.setdefault(track.thread.name[:15], len(names)),
        }
        rows = np.array(
            [
                np.zeros(len(t_ns)) + columns[name] if name != "t_ns" else t_ns
                for name in PROCESS_COLUMNS
            ]
        ).astype(np.int64)
        rows[0] = t_ns
        blocks.append(rows[:, _is_alive(sight, track, t_ns)])
    return Table(
        "processes",
        PROCESS_COLUMNS,
        _sort_by_time(blocks, len(PROCESS_COLUMNS)),
        {"name": tuple(names)},
    )


def get_start_ticks(track: ThreadTrack) -> int:
    """Return when the process of a thread started, in clock ticks since boot."""
    return max(1, track.born_ns // JIFFY_NS)


def _list_states(
    sight: RecorderView, number: int, ticks: Int, values: NDArray[np.float64]
) -> tuple[Int, Int]:
    """The state letter of each row, and for each row the last one before which the thread ran.

    A thread that was asleep and has not been on a CPU since is not asked again: woken meanwhile
    and waiting for a CPU, it still looks asleep.
    """
    codes = sight.doing[number][ticks]
    letters = np.array([ord(p.state) for p in sight.codes.places] + [_SLEEPING], np.int64)
    true = letters[codes]
    times = values[[ROW["user"], ROW["system"], ROW["delay"]]]
    ran = np.ones(len(ticks), np.bool_)
    ran[1:] = (times[:, 1:] != times[:, :-1]).any(axis=0)
    asleep = true != _READY
    # To fall asleep anew a thread has to run, however short its story tells it.
    track = sight.tracks[number]
    sleeps = track.start_ns[letters[track.code] != _READY]
    begun = np.searchsorted(sleeps, sight.t_ns[ticks], side="right")
    ran[1:] |= (begun[1:] > begun[:-1]) | (asleep[1:] & (codes[1:] != codes[:-1]))
    since = np.maximum.accumulate(np.where(ran, np.arange(len(ticks)), 0))
    return np.where(true[since] == _SLEEPING, _SLEEPING, true), since


def _list_wait_places(
    sight: RecorderView, number: int, ticks: Int, state: Int, since: Int
) -> list[str]:
    """Where the thread sleeps, asked as often as the recorder does; "" = not asked."""
    places: list[str] = []
    asked_ns, asked_of, place = -_WCHAN_NS, -1, ""
    names = [p.wchan for p in sight.codes.places] + ["poll_schedule_timeout.constprop.0"]
    codes = sight.doing[number][ticks].tolist()
    t_ns = sight.t_ns[ticks].tolist()
    thread = sight.tracks[number].thread
    first = thread.pid == thread.tid
    before = 0
    for row, (letter, ran) in enumerate(zip(state.tolist(), since.tolist())):
        if letter in (_SLEEPING, _BLOCKED):
            if asked_of != ran:
                settled = first or letter == _BLOCKED or (row > ran and before == _SLEEPING)
                if not settled and t_ns[row] - asked_ns < _WCHAN_NS:
                    places.append("")
                    before = letter
                    continue
                asked_ns, asked_of, place = t_ns[row], ran, names[codes[row]]
            places.append(place)
        else:
            places.append("")
        before = letter
    return places


def _is_alive(sight: RecorderView, track: ThreadTrack, t_ns: Int) -> NDArray[np.bool_]:
    exit_ns = sight.exits.get(track.thread.pid)
    alive = t_ns >= track.born_ns
    return alive if exit_ns is None else alive & (t_ns < exit_ns)


def _is_listed(
    sight: RecorderView, track: ThreadTrack, t_ns: Int, state: Int, on_cpu: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """The main thread of a process always is, others while they do something."""
    keep = _is_alive(sight, track, t_ns)
    if track.thread.pid == track.thread.tid:
        return keep
    ran = np.ones(len(t_ns), np.bool_)
    ran[1:] = np.diff(on_cpu) > 0
    last_ns = np.maximum.accumulate(np.where(ran, t_ns, 0))
    return keep & ((state != _SLEEPING) | (t_ns - last_ns <= _QUIET_NS))


def _round_to_jiffies(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.floor((values + 0.5) / JIFFY_NS) * JIFFY_NS


def _sort_by_time(blocks: list[Int], width: int) -> Int:
    if not blocks:
        return np.zeros((width, 0), np.int64)
    table = np.concatenate(blocks, axis=1)
    return table[:, np.argsort(table[0], kind="stable")]


def split_rows(table: Table, low_ns: int, high_ns: int) -> Iterator[Int]:
    """Yield the columns of the rows in [low, high), if there are any."""
    first, last = np.searchsorted(table.columns[0], [low_ns, high_ns])
    if last > first:
        yield from table.columns[:, first:last]
