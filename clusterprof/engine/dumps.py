"""Flight recorder dumps that lie in a recording: `<node>/nccl/<prefix><rank>`, one per rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from clusterprof.attribution.stuck_dumps import stuck_of
from clusterprof.errors import Unavailable
from clusterprof.importers.flight_recorder import Dump, read_dump

FOLDER = "nccl"
FILES_AT_MOST = 1024


def dumps_of(folders: Iterable[Path]) -> tuple[list[Dump], list[str]]:
    """Return the dumps in the folders of all nodes by rank, and why others could not be read."""
    found: dict[int, Dump] = {}
    unread = []
    for folder in folders:
        for path in sorted((folder / FOLDER).glob("*"))[:FILES_AT_MOST]:
            if path.suffix in (".log", ".jsonl") or not path.is_file():
                continue
            try:
                dump = read_dump(path)
            except Unavailable as why:
                unread.append(why.message)
                continue
            known = found.get(dump.rank)
            if known is None or known.at_ns < dump.at_ns:
                found[dump.rank] = dump
    return [found[rank] for rank in sorted(found)], unread


def notes_of(dumps: Sequence[Dump], unread: Sequence[str]) -> tuple[str, ...]:
    """Return what the report says about them."""
    notes = []
    if dumps:
        stuck = sorted({one.rank for one in stuck_of(dumps)})
        state = f"{_ranges(stuck)} stood in an operation" if stuck else "none was stuck"
        ranks = _ranges([dump.rank for dump in dumps])
        notes.append(f"NCCL flight recorder of {ranks}: {state} when it was written")
    notes += [f"a flight recorder dump could not be read: {why}" for why in unread]
    return tuple(notes)


def _ranges(ranks: Sequence[int]) -> str:
    """Return sorted ranks as people write them: `rank 5`, `ranks 0-3, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
