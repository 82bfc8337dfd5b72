"""Checks what a job finds on this node: devices, cores, file systems and links, and who can add
more.

Everything is read once from /proc, /sys, the environment and the collectors; only the
helpers of isolated collectors are started, and no server is contacted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.doctor import affinity, devices, network
from clusterprof.agent.doctor.environment import (
    ADMIN,
    JOB,
    USER,
    JobContext,
    SuggestedChange,
    find_job_context,
)
from clusterprof.agent.doctor.sources import OWNER_USER, SourceCheck, check_sources, check_spans
from clusterprof.agent.linux.files import Roots

_OWNERS = (USER, JOB, ADMIN)


@dataclass(frozen=True, slots=True)
class JobEnvironment:
    """The results of the checks, as printed by `doctor --job`."""

    job_context: JobContext
    devices: Sequence[Mapping[str, Any]]
    affinity: Mapping[str, Any]
    files: Sequence[Mapping[str, Any]]
    fabric: Mapping[str, Any]
    settings: Sequence[Mapping[str, Any]]
    changes: Sequence[SuggestedChange]
    checks: Sequence[SourceCheck]

    def document(self) -> dict[str, Any]:
        """Return everything except the source checks, ready for JSON."""
        job_context = self.job_context
        return {
            "job": {
                "launchers": list(job_context.launchers),
                "name": job_context.job,
                **job_context.facts,
                "allocation_only": job_context.allocation_only,
            },
            "processes": [asdict(process) for process in job_context.processes],
            "processes_from": "recorder" if job_context.from_recorder else "environments",
            "devices": list(self.devices),
            "affinity": dict(self.affinity),
            "files": list(self.files),
            "fabric": dict(self.fabric),
            "settings": list(self.settings),
            "changes": [asdict(change) for change in self.changes],
        }


def check_job_environment(
    collectors: Sequence[type[Any]],
    environ: Mapping[str, str],
    cwd: str,
    paths: Sequence[str],
    own_pids: tuple[int, int],
    roots: Roots | None = None,
    isolate: Callable[[str, Context], Any] | None = None,
) -> JobEnvironment:
    """Run every check once.

    own_pids: of this process and of its parent.
    cwd, paths: folders whose file systems are checked.
    """
    roots = roots or Roots()
    job_context = find_job_context(roots, environ, *own_pids)
    pids = [process.pid for process in job_context.processes]
    checks = [
        *check_sources(collectors, roots, isolate, job_context.run_dir, pids),
        check_spans(environ),
    ]
    device_entries = devices.map_devices_to_ranks(checks, job_context.processes)
    # Run next to a job, doctor reports the cores of the job's ranks, not its own.
    pid = (
        job_context.processes[0].pid
        if job_context.processes and not _is_inside_job(job_context)
        else None
    )
    cores = affinity.read_affinity(roots, pid, job_context.processes, environ)
    if roots == Roots():
        mounts = network.describe_file_systems(roots, environ, cwd, paths)
        network_checks = network.read_job_fabric(roots, environ)
    else:  # the paths of a fixture machine do not exist here
        mounts = network.describe_file_systems(roots, environ, cwd, paths, str, _skip_statvfs)
        network_checks = network.read_job_fabric(roots, environ, lambda path: True)
    settings = devices.read_kernel_settings(roots, pid)
    changes = [
        *devices.find_device_changes(device_entries, job_context.processes),
        *affinity.find_affinity_changes(cores, device_entries, job_context.launchers),
        *network.find_file_system_changes(mounts, job_context.launchers),
        *network.find_fabric_changes(network_checks, device_entries),
        *_list_source_changes(checks),
        *devices.find_setting_changes(settings),
    ]
    changes.sort(key=lambda change: _OWNERS.index(change.owner))
    return JobEnvironment(
        job_context, device_entries, cores, mounts, network_checks, settings, changes, checks
    )


def _is_inside_job(job_context: JobContext) -> bool:
    return any(process.here for process in job_context.processes)


def _skip_statvfs(path: str) -> None:
    raise FileNotFoundError(path)


def _list_source_changes(checks: Sequence[SourceCheck]) -> list[SuggestedChange]:
    """Return the suggested changes for missing values that someone can make available."""
    suggested = []
    for check in checks:
        if check.elsewhere:
            continue
        if check.remedy:
            message = f"{check.name} {check.status}: {check.message}"
            suggested.append(
                SuggestedChange("sources", message, check.remedy, _convert_owner(check.owner))
            )
        for gap in check.holes:
            if gap.remedy:
                message = f"{', '.join(gap.signals[:3])}: {gap.message}"
                suggested.append(
                    SuggestedChange("sources", message, gap.remedy, _convert_owner(gap.owner))
                )
    return list(dict.fromkeys(suggested))


def _convert_owner(owner: str) -> str:
    return USER if owner == OWNER_USER else ADMIN
