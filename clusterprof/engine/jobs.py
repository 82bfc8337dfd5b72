"""Which recorded ranks belong together: one number per job, and per life of it that began anew.

    name of the job, size of its world, restart     the launcher's word, on all nodes alike
    the same rank twice, one after the other        lives of the job: first with first, …
    the same rank twice at the same time            two jobs of one name: not laid side by side

A process that two recorders saw is counted once. What was decided is said in notes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from clusterprof.attribution.ledger import RankBooks
from clusterprof.engine.node import NodeResult
from clusterprof.engine.sightings import (
    TOUCH_NS,
    Sighting,
    once_each,
    renamed,
    shared_devices,
    sightings,
)
from clusterprof.findings import Blind

UNCLEAR = -1
_REMEDY = "record on every node of the job, and give the folders of all: analyze host1/ host2/"


@dataclass(frozen=True, slots=True)
class Job:
    """One job, or one life of it."""

    number: int
    name: str
    """"" when no launcher named it."""
    world_size: int | None
    restart: int
    """How often its launcher had begun the ranks anew."""
    life: int
    """Of several that carry the same name and restart, counted from 0."""
    ranks: tuple[int, ...]
    """Global ranks that were recorded."""

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of its world that were not recorded."""
        return tuple(sorted(set(range(self.world_size or 0)) - set(self.ranks)))


@dataclass(frozen=True, slots=True)
class Told:
    """All nodes, every rank once and with the number of its job."""

    nodes: tuple[NodeResult, ...]
    jobs: tuple[Job, ...] = ()
    notes: tuple[str, ...] = ()
    blinds: tuple[Blind, ...] = field(default=())


def told_apart(nodes: Sequence[NodeResult]) -> Told:
    """Number the jobs of all ranks (`RankBooks.job`), and leave out what was recorded twice."""
    nodes = renamed(nodes)
    seen, notes = once_each(sightings(nodes))
    notes += shared_devices(seen)
    by_name: dict[tuple[str, int | None, int], list[Sighting]] = {}
    for one in seen:
        by_name.setdefault((one.job, one.place.world_size, one.place.restart), []).append(one)
    jobs: list[Job] = []
    number: dict[tuple[int, int], int] = {}
    for (name, world_size, restart), some in sorted(by_name.items(), key=_by_name):
        lives, unclear = _lives(some)
        for life, ranks in enumerate(lives):
            job = Job(len(jobs), name, world_size, restart, life, _numbers(ranks))
            jobs.append(job)
            number.update({one.at: job.number for one in ranks})
        for rank, twice in unclear:
            notes.append(_clash(name, rank, twice))
        if unclear:
            number.update({one.at: UNCLEAR for one in some})
    numbered = tuple(
        replace(node, books=tuple(_numbered(node.books, at, number)))
        for at, node in enumerate(nodes)
    )
    return Told(numbered, tuple(jobs), (*notes, *_notes(jobs)), tuple(_blinds(jobs)))


def _numbered(
    books: Iterable[RankBooks], node: int, number: Mapping[tuple[int, int], int]
) -> Iterable[RankBooks]:
    for at, one in enumerate(books):
        if (node, at) in number:
            yield replace(one, job=number[node, at])


def _by_name(item: tuple[tuple[str, int | None, int], object]) -> tuple[str, int, int]:
    name, world_size, restart = item[0]
    return name, world_size or 0, restart


def _numbers(some: Iterable[Sighting]) -> tuple[int, ...]:
    return tuple(sorted({one.place.rank for one in some if one.place.rank is not None}))


def _lives(some: list[Sighting]) -> tuple[list[list[Sighting]], list[tuple[int, list[Sighting]]]]:
    """Split the ranks of one name into lives; what cannot be split comes back second, by rank."""
    by_rank: dict[int | None, list[Sighting]] = {}
    for one in sorted(some, key=lambda one: one.first_ns):
        by_rank.setdefault(one.place.rank, []).append(one)
    loose = by_rank.pop(None, [])  # no launcher numbered them: they clash with nobody
    most = max((len(ones) for ones in by_rank.values()), default=1)
    if most < 2:
        return [some], []
    parts = _split(some, lambda one: one.place.meets_at)
    if len(parts) > 1 and not any(_clashes(part) for part in parts):
        return parts, []
    clashes = _clashes(some)
    if clashes:
        return [], clashes
    if all(len(ones) == most for ones in by_rank.values()):
        lives = [[ones[life] for ones in by_rank.values()] for life in range(most)]
    else:
        lives = _by_time([one for one in some if one.place.rank is not None])
        unclear = [pair for life in lives for pair in _twice(life)]
        if unclear:
            return [], unclear
    lives[-1] += loose
    return lives, []


def _split(some: Iterable[Sighting], by: Callable[[Sighting], str]) -> list[list[Sighting]]:
    parts: dict[str, list[Sighting]] = {}
    for one in some:
        parts.setdefault(by(one), []).append(one)
    return list(parts.values())


def _twice(some: Iterable[Sighting]) -> list[tuple[int, list[Sighting]]]:
    by_rank: dict[int, list[Sighting]] = {}
    for one in some:
        if one.place.rank is not None:
            by_rank.setdefault(one.place.rank, []).append(one)
    return [(rank, ones) for rank, ones in sorted(by_rank.items()) if len(ones) > 1]


def _clashes(some: Iterable[Sighting]) -> list[tuple[int, list[Sighting]]]:
    """The ranks that two processes were at the same time."""
    out = []
    for rank, ones in _twice(some):
        ones = sorted(ones, key=lambda one: one.first_ns)
        if any(b.first_ns + TOUCH_NS < a.last_ns for a, b in itertools.pairwise(ones)):
            out.append((rank, ones))
    return out


def _by_time(some: Iterable[Sighting]) -> list[list[Sighting]]:
    """Sets of ranks whose times touch, by the wall clocks of their nodes."""
    lives: list[list[Sighting]] = []
    until_ns = 0
    for one in sorted(some, key=lambda one: one.first_ns):
        if not lives or one.first_ns + TOUCH_NS >= until_ns:
            lives.append([])
        lives[-1].append(one)
        until_ns = max(until_ns, one.last_ns)
    return lives


def _clash(name: str, rank: int, twice: Sequence[Sighting]) -> str:
    where = ", ".join(f"{one.node} pid {one.pid}" for one in twice)
    return (
        f"rank {rank}{of_job(name)} was several processes at the same time ({where}): recordings of"
        " more than one job? Its ranks were not laid side by side"
    )


def of_job(name: str) -> str:
    """Return " of job NAME", "" for a job without a name."""
    return f" of job {name}" if name else ""


def ranges(numbers: Iterable[int], most: int = 8) -> str:
    """Return "0-3, 7" for numbers; after `most` stretches how many more there are."""
    stretches: list[list[int]] = []
    for number in sorted(set(numbers)):
        if stretches and number == stretches[-1][1] + 1:
            stretches[-1][1] = number
        else:
            stretches.append([number, number])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in stretches[:most]]
    left = sum(b - a + 1 for a, b in stretches[most:])
    return ", ".join(shown) + (f" and {left} more" if left else "")


def _notes(jobs: Sequence[Job]) -> list[str]:
    names = list(dict.fromkeys(job.name for job in jobs))
    notes = []
    if len(names) > 1:
        said = "; ".join(
            (name or "one without a name")
            + f" (ranks {ranges(r for job in jobs if job.name == name for r in job.ranks)})"
            for name in names[:4]
        )
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        notes.append(
            f"recordings of {len(names)} jobs lie here: {said}{more}; ranks of different jobs are"
            " never laid side by side"
        )
    for name in names:
        lives = [job for job in jobs if job.name == name]
        if len(lives) > 1:
            notes.append(
                f"the ranks{of_job(name)} began anew {len(lives) - 1} times; each life has lines"
                " of its own"
                if len(lives) > 2
                else f"the ranks{of_job(name)} began anew once; each life has lines of its own"
            )
    return notes


def _blinds(jobs: Sequence[Job]) -> list[Blind]:
    out = []
    for job in jobs:
        if job.missing and job.ranks:
            message = (
                f"{len(job.missing)} of {job.world_size} ranks{of_job(job.name)} have no recording:"
                f" {ranges(job.missing)}; waits for them are sync-unknown-peer"
            )
            out.append(Blind("ranks", "absent", message, _REMEDY))
    return out
