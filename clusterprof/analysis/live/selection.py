"""Choose which windows that nodes have settled themselves are merged, and why not all.

    node 0   settled 12:00:04   12:00:08
    node 1   settled 12:00:04   12:00:08      end of the common window: 12:00:08
    node 2   settled 12:00:04   damaged       read directly, up to 12:00:08

Windows are merged only with one common end: an operation of all ranks at the end of the
window would otherwise be missing on some of them, and its waits would have no cause.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterprof.analysis.live.settled_file import (
    Problem,
    SettledHead,
    SettledNode,
    UnusableWindowError,
    make_settings_key,
    read_settled,
    read_settled_head,
)
from clusterprof.trace.live_files import REFRESH_MARK_S, SETTLED_NAMES, write_viewer_heartbeat
from clusterprof.trace.segments import is_segment

MIN_NODES = 8
"""Jobs with fewer nodes are read directly: that costs less than a second and is fresher."""
MAX_LAG_S = 20.0
"""Age, in seconds before the last write to the recording, at which a settled window is too old."""
WAIT_NODES = 32
"""Jobs with fewer nodes are read at once: that takes less time than the nodes need to begin."""
_MAX_LAG_NS = round(3 * MAX_LAG_S * 1e9)
"""Largest difference between the ends of two nodes' recent windows with one wall clock, ns."""
_SETTLED_RATIO = 0.95
"""Part of the nodes that shall be settled after waiting."""
_MIN_SETTLED_RATIO = 0.5
"""Part of the nodes that must be settled; with fewer, most of the work is reading anyway."""
_DESCRIPTIONS: Mapping[Problem, str] = {
    "missing": "without a settled window",
    "old": "too old",
    "version": "of another version of clusterprof",
    "settings": "with other limits or another window",
    "damaged": "damaged",
}


class SettledSelection:
    """Reads what nodes have settled, and keeps it until the next window."""

    def __init__(self, limits: Mapping[str, Any], window_ns: int, min_nodes: int) -> None:
        """Start without data; limits: bound limits object per cause id."""
        self.end_ns: int | None = None
        """Common end of the window by the wall clocks of the nodes, ns; None = read directly."""
        self.reading = ""
        """Which nodes are read directly, and why; "" where nothing needs to be stated."""
        self._settings, self._window_ns = make_settings_key(limits), window_ns
        self._min_nodes = min_nodes
        self._windows: dict[Path, tuple[int, SettledNode]] = {}
        self._marked_at: float | None = None
        self._marks: Counter[str] = Counter()

    def is_expected(self, folders: Sequence[Path]) -> bool:
        """Return whether waiting for windows is worthwhile: most nodes will settle one, few have.

        Also leaves the marks.
        """
        if len(folders) < max(self._min_nodes, WAIT_NODES):
            return False
        self._write_marks(folders)
        expected = self._marks["left"]
        if expected < _MIN_SETTLED_RATIO * len(folders):
            return False
        ends = [list(heads) for heads in self._read_heads(folders)[0].values()]
        end_ns = choose_common_end(ends)
        return sum(end_ns in node_ends for node_ends in ends) < _SETTLED_RATIO * expected

    def update(self, folders: Sequence[Path]) -> dict[Path, SettledNode | None]:
        """Read new windows; None for each node whose recording must be read."""
        self.end_ns, self.reading = None, ""
        if len(folders) < self._min_nodes:
            return dict.fromkeys(folders)
        self._write_marks(folders)
        heads, problems = self._read_heads(folders)
        ends_by_node = {
            folder: self._list_ends(folder, own_heads) for folder, own_heads in heads.items()
        }
        end_ns = choose_common_end(list(ends_by_node.values()))
        shifted = 0
        for folder, ends in ends_by_node.items():
            own_end_ns = choose_own_end(ends, end_ns)
            if own_end_ns is None:
                problems[folder] = "old"
                continue
            shifted += own_end_ns != end_ns
            try:
                self._read_window(folder, own_end_ns, heads[folder])
            except UnusableWindowError as error:
                problems[folder] = error.problem
        for folder in problems:
            self._windows.pop(folder, None)
        if end_ns is None or len(self._windows) < _MIN_SETTLED_RATIO * len(folders):
            self._windows.clear()
        else:
            self.end_ns = end_ns
        self.reading = self._describe_reading(len(folders), Counter(problems.values()), shifted)
        settled = {folder: window for folder, (_, window) in self._windows.items()}
        return {folder: settled.get(folder) for folder in folders}

    def _write_marks(self, folders: Sequence[Path]) -> None:
        """Tell the nodes that somebody watches, every REFRESH_MARK_S."""
        now_s = time.monotonic()
        if self._marked_at is None or now_s - self._marked_at >= REFRESH_MARK_S:
            self._marked_at = now_s
            times = {folder: _read_newest_write_time(folder) for folder in folders}
            self._marks = Counter(
                write_viewer_heartbeat(folder, written_at)
                for folder, written_at in times.items()
                if written_at is not None
            )

    def _read_heads(
        self, folders: Sequence[Path]
    ) -> tuple[dict[Path, dict[int, SettledHead]], dict[Path, Problem]]:
        """Return the usable windows of each node by their end, and why nodes have none."""
        heads: dict[Path, dict[int, SettledHead]] = {}
        problems: dict[Path, Problem] = {}
        for folder in folders:
            try:
                heads[folder] = self._list_heads(folder)
            except UnusableWindowError as error:
                problems[folder] = error.problem
        return heads, problems

    def _list_heads(self, folder: Path) -> dict[int, SettledHead]:
        """List the usable windows of a node by their end.

        Raises: UnusableWindowError with the reason of the first when there are none.
        """
        heads: dict[int, SettledHead] = {}
        problems: list[Problem] = []
        for name in SETTLED_NAMES:
            try:
                head = read_settled_head(folder / name, self._window_ns, self._settings)
                heads[head.end_ns] = head
            except UnusableWindowError as error:
                problems.append(error.problem)
        if not heads:
            raise UnusableWindowError(max(problems, key=lambda problem: problem != "missing"))
        written_at = _read_newest_write_time(folder)
        if written_at is not None:
            heads = {
                end_ns: head
                for end_ns, head in heads.items()
                if written_at - head.written_at <= MAX_LAG_S
            }
        if not heads:
            raise UnusableWindowError("old")
        return heads

    def _list_ends(self, folder: Path, heads: Mapping[int, SettledHead]) -> list[int]:
        """List the ends of a node's windows, with the one that was read before.

        A node that settles half as often has that end, too, when the others have replaced it.
        """
        window = self._windows.get(folder)
        return list(heads) if window is None else list({*heads, window[0]})

    def _read_window(self, folder: Path, end_ns: int, heads: Mapping[int, SettledHead]) -> None:
        window = self._windows.get(folder)
        if window is None or window[0] != end_ns:
            self._windows.pop(folder, None)  # not both in memory
            self._windows[folder] = (end_ns, read_settled(heads[end_ns]))

    def _describe_reading(self, nodes: int, problems: Counter[Problem], shifted: int) -> str:
        """Describe which nodes are read directly, or have other clocks (their number: shifted)."""
        denied = self._marks["denied"]
        unmarked = f"{denied:,} of {nodes:,} folders take no mark of this viewer" if denied else ""
        if self.end_ns is None:
            if not denied and not self._marks["left"]:
                return ""  # the recording has ended
            settled = "all recordings are read: few nodes have settled their last minute"
            return f"{settled}; {unmarked}" if unmarked else settled
        parts = []
        if problems:
            reasons = ", ".join(
                f"{count:,} {_DESCRIPTIONS[problem]}" for problem, count in problems.most_common()
            )
            parts.append(f"{problems.total():,} of {nodes:,} nodes are read directly: {reasons}")
            parts += [unmarked] if unmarked else []
        if shifted:
            clocks = "the wall clocks of {:,} of {:,} nodes are wrong: their windows end elsewhere"
            parts.append(clocks.format(shifted, nodes))
        return "; ".join(parts)


def choose_common_end(ends_by_node: Sequence[Sequence[int]]) -> int | None:
    """Choose the end that most nodes have settled, of these the newest; None without any."""
    counts = Counter(end_ns for ends in ends_by_node for end_ns in ends)
    return max(counts, key=lambda end_ns: (counts[end_ns], end_ns), default=None)


def choose_own_end(ends: Sequence[int], common_end_ns: int | None) -> int | None:
    """Choose which of a node's windows is merged: that with the common end, if it has one.

    None: it must be read. All windows are recent by the clock of the file system, so a node whose
    windows end much earlier or later has another wall clock: its newest is taken.
    """
    if common_end_ns in ends:
        return common_end_ns
    newest_ns = max(ends)
    if common_end_ns is not None and abs(newest_ns - common_end_ns) > _MAX_LAG_NS:
        return newest_ns
    return None


def _read_newest_write_time(folder: Path) -> float | None:
    """Return when the newest segment was written, seconds since 1970; None when unreadable."""
    try:
        with os.scandir(folder) as entries:
            segments = [entry for entry in entries if is_segment(entry.name)]
            newest = max(segments, key=lambda entry: (len(entry.name), entry.name), default=None)
            return None if newest is None else newest.stat(follow_symlinks=False).st_mtime
    except OSError:
        return None
