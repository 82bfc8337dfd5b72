"""What a job finds on this node: its devices, cores, file systems and links, and who can do more.

Everything is read from /proc, /sys, the environment and the collectors, once; nothing is started
but the helpers of isolated collectors, and no server is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from clusterprof.collectors.base import Context
from clusterprof.linux.roots import Roots
from clusterprof.recorder.inspect import OWNER_YOU, Look, look_at, look_at_spans
from clusterprof.recorder.surroundings import affinity, devices, fabric, files, kernel
from clusterprof.recorder.surroundings.change import ADMIN, JOB, YOU, Change
from clusterprof.recorder.surroundings.place import Place, find_place

__all__ = ["Change", "Surroundings", "look_around"]
_OWNERS = (YOU, JOB, ADMIN)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What was found, as `doctor --job` tells it."""

    place: Place
    devices: Sequence[Mapping[str, Any]]
    affinity: Mapping[str, Any]
    files: Sequence[Mapping[str, Any]]
    fabric: Mapping[str, Any]
    settings: Sequence[Mapping[str, Any]]
    changes: Sequence[Change]
    looks: Sequence[Look]

    def document(self) -> dict[str, Any]:
        """Return all of it but the looks, ready for JSON."""
        place = self.place
        return {
            "job": {
                "launchers": list(place.launchers),
                "name": place.job,
                **place.facts,
                "allocation_only": place.allocation_only,
            },
            "processes": [asdict(process) for process in place.processes],
            "processes_from": "recorder" if place.from_recorder else "environments",
            "devices": list(self.devices),
            "affinity": dict(self.affinity),
            "files": list(self.files),
            "fabric": dict(self.fabric),
            "settings": list(self.settings),
            "changes": [asdict(change) for change in self.changes],
        }


def look_around(
    collectors: Sequence[type],
    environ: Mapping[str, str],
    cwd: str,
    paths: Sequence[str],
    own: tuple[int, int],
    roots: Roots | None = None,
    isolate: Callable[[str, Context], Any] | None = None,
) -> Surroundings:
    """Look at everything once. own: pid of this process and of its parent."""
    roots = roots or Roots()
    place = find_place(roots, environ, *own)
    pids = [process.pid for process in place.processes]
    looks = [*look_at(collectors, roots, isolate, place.run_dir, pids), look_at_spans(environ)]
    found = devices.whose(looks, place.processes)
    # Beside a job the cores that matter are those of its ranks, and not ours.
    first = place.processes[0].pid if place.processes and not _in_place(place) else None
    cores = affinity.read_affinity(roots, first, place.processes, environ)
    if roots == Roots():
        mounts = files.read_files(roots, environ, cwd, paths)
        net = fabric.read_fabric(roots, environ)
    else:  # paths of a fixture machine are not there to be asked
        mounts = files.read_files(roots, environ, cwd, paths, str, _no_room)
        net = fabric.read_fabric(roots, environ, lambda path: True)
    settings = kernel.read_settings(roots, first)
    changes = [
        *devices.changes(found, place.processes),
        *affinity.changes(cores, found, place.launchers),
        *files.changes(mounts, place.launchers),
        *fabric.changes(net, found),
        *_of_sources(looks),
        *kernel.changes(settings),
    ]
    changes.sort(key=lambda change: _OWNERS.index(change.owner))
    return Surroundings(place, found, cores, mounts, net, settings, changes, looks)


def _in_place(place: Place) -> bool:
    return any(process.here for process in place.processes)


def _no_room(path: str) -> None:
    raise FileNotFoundError(path)


def _of_sources(looks: Sequence[Look]) -> list[Change]:
    """Return what collectors miss and somebody can give."""
    out = []
    for look in looks:
        if look.elsewhere:
            continue
        if look.remedy:
            message = f"{look.name} {look.status}: {look.message}"
            out.append(Change("sources", message, look.remedy, _owner(look.owner)))
        for hole in look.holes:
            if hole.remedy:
                message = f"{', '.join(hole.signals[:3])}: {hole.message}"
                out.append(Change("sources", message, hole.remedy, _owner(hole.owner)))
    return list(dict.fromkeys(out))


def _owner(owner: str) -> str:
    return YOU if owner == OWNER_YOU else ADMIN
