"""A bar with the time that is left, for who waits at a terminal; nobody else sees anything."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterprof.engine.progress import Progress

_PATIENCE_S = 0.7  # what is done by then needs no bar


@contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None] | None]:
    """Yield what takes the stand of an analysis; None when stderr is no terminal.

    The bar shows once it has taken a while, and is gone at the end.
    """
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    bar = _Bar()
    try:
        yield bar
    finally:
        bar.close()


class _Bar:
    def __init__(self) -> None:
        self._since = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, stand: Progress) -> None:
        if self._bar is None:
            if time.monotonic() - self._since < _PATIENCE_S:
                return
            self._open(stand.all_bytes)
        done = stand.read_bytes >= stand.all_bytes
        what = "comparing ranks" if done else f"node {stand.nodes + 1} of {stand.all_nodes}"
        self._bar.update(self._task, completed=stand.read_bytes, description=what)

    def _open(self, all_bytes: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._bar = Progress(
            TextColumn("clusterprof: {task.description}"),
            BarColumn(),
            DownloadColumn(),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task("", total=max(all_bytes, 1))

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
