"""What `doctor --job` prints: what somebody can change first, then what the job has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clusterprof.cli.looks import WIDTH, hanging
from clusterprof.recorder.surroundings.devices import BY_LOCAL_RANK
from clusterprof.units import human

if TYPE_CHECKING:
    from clusterprof.recorder.surroundings import Surroundings

_NARROWEST = 60
_LIST_AT_MOST = 16
_LABEL = 14
_REMEDY = " " * (_LABEL - 2) + "->"
_OWNERS = {
    "you": "You can change",
    "job": "Whoever submits the job can change",
    "cluster admin": "The cluster admin can change",
}


def job_text(found: Surroundings, width: int = WIDTH) -> str:
    """Return all sections, at most `width` columns wide."""
    width = max(width, _NARROWEST)
    parts = [
        _job(found),
        *_changes(found),
        _devices(found),
        _cores(found.affinity),
        _files(found.files),
        _fabric(found.fabric),
        _sources(found),
    ]
    lines: list[str] = []
    for title, rows in parts:
        lines += ["", title] if lines else [title]
        for label, text in rows:
            lines += hanging(f"  {label:<{_LABEL}}  " if label else "  ", text, width, 1000)
    return "\n".join(line.rstrip() for line in lines) + "\n"


_Rows = list[tuple[str, str]]


def _job(found: Surroundings) -> tuple[str, _Rows]:
    place = found.place
    facts = place.facts
    launched = " and ".join(place.launchers) or "no launcher: this is how it is outside of a job"
    rows = [("launcher", launched)]
    if place.job:
        rows.append(("job", place.job))
    rows.append(("node", str(facts["node"])))
    if facts["rank"] is not None:
        size = f" of {facts['world_size']}" if facts["world_size"] is not None else ""
        local = facts["node_local_rank"]
        on = f", {local} of this node" if local is not None else ""
        rows.append(("rank", f"{facts['rank']}{size}{on}"))
    if place.allocation_only:
        again = "srun --overlap --jobid=$SLURM_JOB_ID clusterprof doctor --job"
        rows.append(("", f"In the allocation and in no step, which may have less: {again}"))
    count = len(place.processes)
    if count:
        how = "told by its recorder" if place.from_recorder else "found by their environment"
        beside = not place.from_recorder and not any(one.here for one in place.processes)
        rows.append(("processes", f"{count} on this node, {how}"))
        if beside:
            rows.append(("", "This was started beside them, in no rank's place."))
    return "Job", rows


def _changes(found: Surroundings) -> list[tuple[str, _Rows]]:
    """Return a section for everybody who can change something."""
    by_owner: dict[str, _Rows] = {}
    for change in found.changes:
        rows = by_owner.setdefault(change.owner, [])
        rows.append((change.about, change.message))
        rows.append((_REMEDY, change.remedy))
    return [(_OWNERS.get(owner, owner), rows) for owner, rows in by_owner.items()]


def _devices(found: Surroundings) -> tuple[str, _Rows]:
    rows: _Rows = [] if found.devices else [("", "none was found")]
    for entry in found.devices[:_LIST_AT_MOST]:
        words = [str(entry["id"])]
        if entry.get("emulated"):
            words.append("EMULATED")
        words += [str(entry[key]) for key in ("name", "pci_bus_id") if key in entry]
        if "numa_node" in entry:
            words.append(f"NUMA node {entry['numa_node']}")
        rows.append((_whose(entry), ", ".join(words)))
    rest = len(found.devices) - _LIST_AT_MOST
    if rest > 0:
        rows.append(("", f"and {rest} more: --json"))
    if any(user["how"] == BY_LOCAL_RANK for entry in found.devices for user in entry["users"]):
        rows.append(
            ("", "Ranks take devices in the order of local ranks: none was seen using one.")
        )
    for name, value in _chosen(found).items():
        rows.append(("", f"{name}={value}"))
    return "Accelerators", rows


def _whose(entry: Mapping[str, Any]) -> str:
    ranks = dict.fromkeys(
        f"rank {user['rank']}" if user["rank"] is not None else f"pid {user['pid']}"
        for user in entry["users"]
    )
    if ranks:
        return ", ".join(ranks)
    return "not visible" if entry["visible"] is False else "nobody's"


def _chosen(found: Surroundings) -> dict[str, str]:
    """Return the variables that choose devices: alike in all processes, else of each."""
    out: dict[str, str] = {}
    for process in found.place.processes:
        for name, value in process.chosen.items():
            if out.setdefault(name, value) != value:
                out[name] = "(differs from rank to rank)"
    return out


def _cores(cores: Mapping[str, Any]) -> tuple[str, _Rows]:
    if "cpus_allowed_count" not in cores:
        return "CPUs", [("", "which may be used cannot be read")]
    allowed = f"{cores['cpus_allowed']}: {cores['cpus_allowed_count']}"
    if "cpus_online_count" in cores:
        allowed += f" of {cores['cpus_online_count']}"
    rows = [("allowed", f"{allowed}, on {_number(cores['cores_count'], 'core')}")]
    apart = {one["cpus_allowed"] for one in cores["ranks"] if "cpus_allowed" in one}
    if apart - {cores["cpus_allowed"]}:
        told = [f"{one['rank']} on {one.get('cpus_allowed', 'unknown')}" for one in cores["ranks"]]
        more = f" and {len(told) - _LIST_AT_MOST} more" if len(told) > _LIST_AT_MOST else ""
        rows.append(("ranks", "; ".join(told[:_LIST_AT_MOST]) + more))
    if "quota_cpus" in cores:
        rows.append(("quota", f"{cores['quota_cpus']:g} CPUs"))
    if len(cores.get("numa_nodes_online", ())) > 1:
        rows.append(("NUMA nodes", ", ".join(map(str, cores["numa_nodes"]))))
    sharing = cores["ranks_sharing"]
    if sharing > 1:
        rows.append(("shared by", f"{sharing} ranks of this node"))
    fit, threads = cores["workers_count"], cores["worker_threads_count"]
    more = f", {threads} counting hyper-threads" if threads != fit else ""
    rows.append(("workers", f"{fit} of a rank fit beside its main thread{more}"))
    if "omp_num_threads" in cores:
        rows.append(("", f"OMP_NUM_THREADS={cores['omp_num_threads']}"))
    return "CPUs", rows


def _files(entries: Sequence[Mapping[str, Any]]) -> tuple[str, _Rows]:
    rows = []
    for entry in entries:
        words = [str(entry["path"])]
        if "problem" in entry:
            words.append(str(entry["problem"]))
        if "type" in entry:
            words.append(str(entry["type"]))
        if "server" in entry:
            words.append(f"server {entry['server']}")
        if entry.get("options"):
            words.append(",".join(map(str, entry["options"])))
        if "free_bytes" in entry:
            free, size = human(entry["free_bytes"], "bytes"), human(entry["size_bytes"], "bytes")
            words.append(f"{free} of {size} free")
        rows.append((str(entry["what"]), "; ".join(words)))
    return "Files", rows


def _fabric(net: Mapping[str, Any]) -> tuple[str, _Rows]:
    rows: _Rows = []
    for port in net["ports"][:_LIST_AT_MOST]:
        words = [str(port.get("link_layer", "")), str(port["state"]), *_link(port)]
        rows.append((str(port["name"]), ", ".join(word for word in words if word)))
    for nic in net["nics"][:_LIST_AT_MOST]:
        words = [str(nic.get("state", "")), *_link(nic)]
        if nic.get("default_route"):
            words.append("default route")
        rows.append((str(nic["name"]), ", ".join(word for word in words if word)))
    rest = max(0, len(net["ports"]) - _LIST_AT_MOST) + max(0, len(net["nics"]) - _LIST_AT_MOST)
    if rest:
        rows.append(("", f"and {rest} more: --json"))
    if net["ports"] and "peermem" in net:
        rows.append(("GPUDirect", f"nvidia-peermem {'' if net['peermem'] else 'not '}loaded"))
    rows += [("", f"{name}={value}") for name, value in net["variables"].items()]
    return "Fabric", rows


def _link(entry: Mapping[str, Any]) -> list[str]:
    words = []
    if "link_bytes_per_second" in entry:
        words.append(f"{entry['link_bytes_per_second'] / 125_000_000:g} Gb/s")
    if "numa_node" in entry:
        words.append(f"NUMA node {entry['numa_node']}")
    if "master" in entry:
        words.append(f"of {entry['master']}")
    if entry.get("chosen") is not None:
        words.append("chosen" if entry["chosen"] else "left out")
    return words


def _sources(found: Surroundings) -> tuple[str, _Rows]:
    here = [look for look in found.looks if not look.elsewhere]
    seen = sum(look.status == "available" for look in here)
    told = f"{seen} of the {len(here)} sources of this node can be recorded: clusterprof doctor"
    return "Sources", [("", told)]


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
