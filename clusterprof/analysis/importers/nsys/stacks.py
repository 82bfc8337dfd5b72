"""Stacks of the training thread of a profile: its NVTX ranges, and its Python samples in them.

    NVTX ranges        |-- forward -------------|  |-- save ---|
                         |-- layer_# --|
    Python samples         .     .      .    .       .    .
    stacks             <nvtx> forward, <nvtx> layer_#, model.py:42 attend

A file with Python samples (`--python-sampling=true`) has Python frames in the stacks of its CPU
samples: their symbol or library is the path of a source file. Without them each range is a frame.
Ranges that mark steps, and ranges of operators, say nothing about the code and are left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.importers.core.device_timeline import Int
from clusterprof.analysis.importers.core.stacks import (
    RANGE_FILE,
    ImportedStacks,
    Stretches,
    build_stretches,
    draw_samples,
)
from clusterprof.analysis.importers.nsys.activities import ThreadRanges
from clusterprof.analysis.importers.nsys.database import Database

_MAX_PYTHON_STRINGS = 4096
_MAX_CHARACTERS = 2000
_MAX_FRAMES = 8_000_000
"""Number of Python frames of all samples: about 0.2 GB of memory."""
_FILE_FIRST = re.compile(r"(\S.{0,1000}\.py)[:(](\d{1,9})\)?:?\s*(.*)", re.DOTALL)
_FUNCTION_FIRST = re.compile(r"(\S+)\s+[(\[]?(\S{1,1000}\.py):(\d{1,9})[)\]]?")


@dataclass(frozen=True, slots=True)
class PythonFrames:
    """Python frames of the samples: n rows, by sample, the innermost of each first."""

    sample: Int
    """Index of the sample."""
    place: Int
    """Row of `places`."""
    places: list[tuple[str, int, str]]
    """File, line (0 = not known) and function."""


_NOTHING: Int = np.zeros(0, np.int64)
NO_FRAMES = PythonFrames(_NOTHING, _NOTHING, [])
ThreadStacks = tuple[ImportedStacks, tuple[Int, Int, Int]]
"""Stacks of a thread, and time (ns), stack and interval (ns) of its samples, int64[n] each."""


def read_python_frames(db: Database, sample: Int) -> PythonFrames:
    """Read the Python frames of the samples. sample: int64[n], ids, sorted.

    Raises: DamagedError when the file cannot be read further.
    """
    texts = _list_python_strings(db)
    if not texts:
        return NO_FRAMES
    listed = ", ".join(map(str, texts))
    parts = []
    remaining = _MAX_FRAMES
    for rows in db.integers(
        "SAMPLING_CALLCHAINS",
        ("id",),
        ("stackDepth", "symbol", "module"),
        where=f'"symbol" IN ({listed}) OR "module" IN ({listed})',
    ):
        row = np.minimum(np.searchsorted(sample, rows[0]), sample.size - 1)
        is_sampled = sample[row] == rows[0]
        parts.append(np.stack([row[is_sampled], *rows[1:, is_sampled]])[:, :remaining])
        remaining -= parts[-1].shape[1]
    if not parts:
        return NO_FRAMES
    index, depth, symbol, module = np.concatenate(parts, axis=1)
    order = np.lexsort((depth, index))
    index, symbol, module = index[order], symbol[order], module[order]
    pairs, place_number = np.unique(np.stack([symbol, module]), axis=1, return_inverse=True)
    functions = _read_texts(db, pairs[0])
    places = [
        _parse_frame(functions.get(symbol_id, ""), texts.get(module_id, ""))
        for symbol_id, module_id in pairs.T.tolist()
    ]
    return PythonFrames(index, np.asarray(place_number).reshape(-1), places)


def _list_python_strings(db: Database) -> dict[int, str]:
    """List the strings that name a Python source file, by id."""
    texts: dict[int, str] = {}
    if not db.has("SAMPLING_CALLCHAINS", "id", "stackDepth", "symbol", "module"):
        return texts
    for rows in db.rows("StringIds", ("id", "value")):
        for id_, value in rows:
            if type(id_) is int and isinstance(value, str) and _names_source(value):
                texts[id_] = value
        if len(texts) >= _MAX_PYTHON_STRINGS:
            break
    return texts


def _names_source(text: str) -> bool:
    """Return whether a text is the path of a Python file, or a frame with such a path."""
    if ".py" not in text or len(text) > _MAX_CHARACTERS:
        return False
    patterns = (_FILE_FIRST, _FUNCTION_FIRST)
    return text.endswith(".py") or any(pattern.match(text) for pattern in patterns)


def _read_texts(db: Database, ids: Int) -> dict[int, str]:
    """Read the strings with these ids, int64[n]."""
    wanted = set(ids.tolist())
    texts: dict[int, str] = {}
    for rows in db.rows("StringIds", ("id", "value")):
        texts.update((id_, text) for id_, text in rows if id_ in wanted and isinstance(text, str))
    return texts


def _parse_frame(symbol: str, module: str) -> tuple[str, int, str]:
    """Parse symbol and library of a frame into file, line (0 = not known) and function."""
    if match := _FUNCTION_FIRST.fullmatch(symbol):
        return match[2], int(match[3]), match[1]
    if match := _FILE_FIRST.fullmatch(symbol):
        return match[1], int(match[2]), match[3] or "<module>"
    return module or symbol, 0, symbol if module else "<module>"


def build_thread_stacks(
    ranges: ThreadRanges | None,
    frames: PythonFrames,
    samples: tuple[Int, Int, Int],
    window: tuple[int, int],
) -> ThreadStacks:
    """Build the stacks of a thread.

    samples: index, time (ns) and interval (ns) of its CPU samples, int64[n] each, by index.
    window: from when to when, ns.
    """
    table = ImportedStacks()
    stretches = _build_range_stretches(table, ranges, window)
    index, t_ns, interval = samples
    row = np.searchsorted(index, frames.sample)
    has_frames = row < index.size
    has_frames[has_frames] = index[row[has_frames]] == frames.sample[has_frames]
    if not has_frames.any():
        return table, draw_samples(stretches)
    numbers = [table.add_place(*place) for place in frames.places]
    stack = _find_stacks_at(stretches, t_ns)
    first = np.flatnonzero(has_frames)[np.unique(row[has_frames], return_index=True)[1]]
    end = int(np.flatnonzero(has_frames)[-1]) + 1
    for low, high in zip(first.tolist(), [*first[1:].tolist(), end]):
        number = int(stack[row[low]])
        places = frames.place[low:high][has_frames[low:high]]
        for place in places[::-1].tolist():  # from the outermost
            number = table.add_stack(number, numbers[place])
            if not number:
                break
        stack[row[low]] = number
    inside = (t_ns >= window[0]) & (t_ns <= window[1])
    return table, (t_ns[inside], stack[inside], interval[inside])


def _build_range_stretches(
    table: ImportedStacks, ranges: ThreadRanges | None, window: tuple[int, int]
) -> Stretches:
    rows = [
        (start, end, table.add_place(RANGE_FILE, 0, text))
        for named in ((ranges.others, ranges.labeled) if ranges is not None else ())
        for text, times in named.items()
        for start, end, _ in times
    ]
    start, end, place = np.array(rows, np.int64).reshape(-1, 3).T
    return build_stretches(table, start, end, place, window)


def _find_stacks_at(stretches: Stretches, t_ns: Int) -> Int:
    """Find the stack at some times (int64[n], ns): int64[n], 0 outside of all stretches."""
    if not stretches.start.size:
        return np.zeros(t_ns.size, np.int64)
    row = np.maximum(np.searchsorted(stretches.start, t_ns, side="right") - 1, 0)
    inside = (t_ns >= stretches.start[row]) & (t_ns < stretches.end[row])
    return np.where(inside, stretches.stack[row], 0)
