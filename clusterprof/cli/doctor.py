"""`clusterprof doctor`: show what can be recorded here, what cannot, and who can change
that.

It also formats the sources of `doctor`: those that can be changed first, those absent here last.

It also formats the output of `doctor --job`: possible changes first, then the job's environment.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterprof.cli import common
from clusterprof.errors import NEEDS_SECOND_SAMPLE, UsageError
from clusterprof.units import format_quantity

if TYPE_CHECKING:
    from clusterprof.agent.collectors.base import Context
    from clusterprof.agent.doctor.job import JobEnvironment
    from clusterprof.agent.doctor.sources import CoverageGap, SourceCheck
    from clusterprof.agent.options import Plan
    from clusterprof.config import Profile


_ANSWER_SECONDS = 5.0  # a helper on a busy node needs seconds to start
_PATH_TIMEOUT_S = 1.0  # a path on a dead server is reported as hung instead of waited for


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Print the values of a profile and where each comes from."
        ),
    ] = None,
    job: Annotated[
        bool,
        typer.Option(
            "--job",
            help="Inside a job: check devices, CPU cores, file systems and links of the ranks.",
        ),
    ] = False,
    paths: Annotated[
        list[str] | None,
        typer.Option(
            "--path", metavar="PATH", help="With --job: also check this data folder. Repeatable."
        ),
    ] = None,
) -> None:
    """Check what can be recorded here, and who can enable the rest."""
    with common.report_errors_as_json(as_json):
        if profile is not None and (job or paths):
            raise UsageError("--profile and --job cannot be combined", "give one of them")
        if paths and not job:
            raise UsageError("--path applies to --job only", "add --job")
        if profile is not None:
            _print_profile(common.load_profile(profile), as_json)
            return
        from clusterprof.agent.collectors.registry import select_collectors
        from clusterprof.agent.linux.files import Roots

        plan = _build_plan()
        collectors = select_collectors(Roots(), plan.use_portable())
        if job:
            _print_job(collectors, paths or [], as_json, plan)
            return
        from clusterprof.agent.doctor import sources

        checks = [
            *sources.check_sources(collectors, isolate=_make_isolate(plan)),
            sources.check_spans(dict(os.environ)),
            sources.check_fabric(),
            sources.check_host(),
        ]
        _print_source_checks(checks, as_json, common.measure_terminal_columns())


def _build_plan() -> Plan:
    """Build the plan of a recording started here without options."""
    from clusterprof.agent.options import build_plan

    return build_plan(common.load_profile(None).effective())


def _make_isolate(plan: Plan) -> Callable[[str, Context], Any]:
    """Return a function that opens an isolated collector with the options of a recording here."""
    from clusterprof.agent.sampling.service import make_isolated_collector

    def isolate(name: str, context: Context) -> Any:
        return make_isolated_collector(name, context, plan.helper_options(name), _ANSWER_SECONDS)

    return isolate


def _print_source_checks(checks: Sequence[SourceCheck], as_json: bool, width: int = 80) -> None:

    if as_json:
        document = {
            "format": "clusterprof-doctor",
            "schema_version": common.SCHEMA_VERSION,
            "collectors": convert_source_checks(checks),
        }
        common.write_result(common.format_json(document), None)
        return
    common.write_result(format_source_checks(checks, width), None)


def _print_job(collectors: Sequence[type], paths: Sequence[str], as_json: bool, plan: Plan) -> None:
    from clusterprof.agent.doctor.job import check_job_environment
    from clusterprof.agent.doctor.network import run_with_timeout

    for path in paths:
        if run_with_timeout(_PATH_TIMEOUT_S, functools.partial(os.path.lexists, path)) is False:
            raise UsageError(f"--path {path}: there is no such file or folder on this node")
    absolute_paths = [os.path.abspath(path) for path in paths]
    own = (os.getpid(), os.getppid())
    environment = check_job_environment(
        collectors, dict(os.environ), os.getcwd(), absolute_paths, own, isolate=_make_isolate(plan)
    )
    if as_json:
        document = {
            "format": "clusterprof-doctor-job",
            "schema_version": common.SCHEMA_VERSION,
            **environment.document(),
            "collectors": convert_source_checks(environment.checks),
        }
        common.write_result(common.format_json(document), None)
        return
    common.write_result(format_job(environment, common.measure_terminal_columns()), None)


def _print_profile(profile: Profile, as_json: bool) -> None:
    if as_json:
        values = {
            key: {"value": value, "origin": profile.origins[key]}
            for key, value in profile.values.items()
        }
        document = {
            "format": "clusterprof-profile",
            "schema_version": common.SCHEMA_VERSION,
            "name": profile.name,
            "values": values,
        }
        common.write_result(common.format_json(document), None)
        return
    width = max(len(key) for key in profile.values)
    lines = [
        _escape_line(f"{key:<{width}}  {_format_value(value)}  ({profile.origins[key]})")
        for key, value in profile.values.items()
    ]
    common.write_result("\n".join([f"profile {profile.name}", *lines]) + "\n", None)


def _format_value(value: Any) -> str:
    if isinstance(value, tuple | list):
        return json.dumps(list(value))
    return json.dumps(value)


def _escape_line(text: str) -> str:
    from clusterprof.output.renderers.text.safety import escape_text

    return escape_text(text, 500).rstrip()


DEFAULT_WIDTH = 80
_MIN_WIDTH = 60
_STATUS_WIDTH = 9
_MAX_SIGNALS = 4
_MAX_DEVICES = 2
_MAX_GAPS = 6


def format_source_checks(checks: Sequence[SourceCheck], width: int = DEFAULT_WIDTH) -> str:
    """Format the table of sources, at most `width` columns wide."""
    from clusterprof.output.renderers.text.safety import wrap_text

    width = max(width, _MIN_WIDTH)
    here = [look for look in checks if not look.elsewhere]
    name_width = max((len(look.name) for look in here), default=0)
    lines = [_format_headline(here)]
    for part in _group_checks(here):
        if part:
            lines.append("")
        for look in part:
            lines += _format_check(look, name_width, width)
    away = [look.elsewhere for look in checks if look.elsewhere]
    if away:
        lines += ["", *wrap_text(f"Not on this node: {', '.join(away)}.", width)]
    return "\n".join(lines) + "\n"


def convert_source_checks(checks: Sequence[SourceCheck]) -> list[dict[str, Any]]:
    """Convert the source checks to JSON values."""
    return [
        {
            "name": look.name,
            "status": look.status,
            "found": look.found,
            "message": look.message,
            "remedy": look.remedy,
            "owner": look.owner,
            "missing": list(look.missing),
            "holes": [
                {
                    "signals": list(hole.signals),
                    "devices": list(hole.devices),
                    "kind": hole.kind,
                    "message": hole.message,
                    "remedy": hole.remedy,
                    "owner": hole.owner,
                }
                for hole in look.holes
            ],
            "elsewhere": look.elsewhere,
        }
        for look in checks
    ]


def wrap_labeled(label: str, text: str, width: int, limit: int = 500) -> list[str]:
    """Wrap a text after a label, with all lines indented by the label's width."""
    from clusterprof.output.renderers.text.safety import escape_text, wrap_text

    indent = " " * len(label)
    lines = wrap_text(escape_text(text, limit), max(width - len(label), 20), indent)
    return [label + lines[0][len(label) :], *lines[1:]] if lines else [label.rstrip()]


def _format_headline(here: Sequence[SourceCheck]) -> str:
    seen = sum(look.status == "available" for look in here)
    return f"{seen} of the {len(here)} sources of this node can be recorded."


def _group_checks(
    here: Sequence[SourceCheck],
) -> tuple[list[SourceCheck], list[SourceCheck], list[SourceCheck]]:
    """Return unavailable sources, accelerators, and the rest, each in the order of the
    registry.
    """
    unseen = [look for look in here if look.status != "available"]
    seen = [look for look in here if look.status == "available"]
    devices = [look for look in seen if look.name.startswith("gpu_")]
    return unseen, devices, [look for look in seen if look not in devices]


def _format_check(look: SourceCheck, name_width: int, width: int) -> list[str]:
    label = f"{look.name:<{name_width}}  {look.status:<{_STATUS_WIDTH}}  "
    indent = " " * len(label)
    lines = wrap_labeled(label, look.found if look.status == "available" else look.message, width)
    if look.remedy:
        lines += wrap_labeled(indent, f"{look.owner}: {look.remedy}", width)
    elif look.owner:
        lines.append(indent + look.owner)
    # doctor takes one sample
    gaps = [hole for hole in look.holes if hole.message != NEEDS_SECOND_SAMPLE.message]
    holes = _merge_gaps(gaps)
    holes.sort(key=lambda hole: not hole.remedy)
    for hole in holes[:_MAX_GAPS]:
        lines += wrap_labeled(indent, _format_gap(hole), width, 1000)
        if hole.remedy:
            lines += wrap_labeled(f"{indent}  ", f"{hole.owner}: {hole.remedy}", width)
    if len(holes) > _MAX_GAPS:
        more = len(holes) - _MAX_GAPS
        lines += wrap_labeled(indent, f"{more} more groups of missing signals: see --json", width)
    return lines


def _merge_gaps(holes: Sequence[CoverageGap]) -> list[CoverageGap]:
    """Merge gaps with one reason on different devices."""
    from clusterprof.agent.doctor.sources import CoverageGap

    groups: dict[tuple[str, str], list[CoverageGap]] = {}
    for hole in holes:
        groups.setdefault((hole.message, hole.remedy), []).append(hole)
    out = []
    for group in groups.values():
        signals = dict.fromkeys(signal for hole in group for signal in hole.signals)
        devices = dict.fromkeys(device for hole in group for device in hole.devices)
        is_node_wide = any(not hole.devices for hole in group)
        first = group[0]
        out.append(
            CoverageGap(
                tuple(signals),
                () if is_node_wide else tuple(devices),
                first.kind,
                first.message,
                first.remedy,
                first.owner,
            )
        )
    return out


def _format_gap(hole: CoverageGap) -> str:
    shown = [hole.signals[0]]
    family = hole.signals[0].partition(".")[0] + "."
    shown += [name.removeprefix(family) for name in hole.signals[1:_MAX_SIGNALS]]
    names = ", ".join(shown)
    if len(hole.signals) > _MAX_SIGNALS:
        names += f" and {len(hole.signals) - _MAX_SIGNALS} more"
    devices = ", ".join(hole.devices[:_MAX_DEVICES])
    if len(hole.devices) > _MAX_DEVICES:
        devices += f" and {len(hole.devices) - _MAX_DEVICES} more"
    return f"without {names}{f' of {devices}' if devices else ''}: {hole.message}"


_MAX_LISTED = 16
_LABEL_WIDTH = 14
_REMEDY_LABEL = " " * (_LABEL_WIDTH - 2) + "->"
_OWNER_TITLES = {
    "you": "You can change",
    "job": "The submitter of the job can change",
    "cluster admin": "The cluster admin can change",
}


def format_job(environment: JobEnvironment, width: int = DEFAULT_WIDTH) -> str:
    """Format all sections, at most `width` columns wide."""
    width = max(width, _MIN_WIDTH)
    parts = [
        _list_job_facts(environment),
        *_list_changes(environment),
        _list_devices(environment),
        _list_cores(environment.affinity),
        _list_files(environment.files),
        _list_fabric(environment.fabric),
        _summarize_sources(environment),
    ]
    lines: list[str] = []
    for title, rows in parts:
        lines += ["", title] if lines else [title]
        for label, text in rows:
            lines += wrap_labeled(
                f"  {label:<{_LABEL_WIDTH}}  " if label else "  ", text, width, 1000
            )
    return "\n".join(line.rstrip() for line in lines) + "\n"


_Rows = list[tuple[str, str]]


def _list_job_facts(environment: JobEnvironment) -> tuple[str, _Rows]:
    place = environment.job_context
    facts = place.facts
    launched = " and ".join(place.launchers) or "no launcher: this is outside a job"
    rows = [("launcher", launched)]
    if place.job:
        rows.append(("job", place.job))
    rows.append(("node", str(facts["node"])))
    if facts["rank"] is not None:
        size = f" of {facts['world_size']}" if facts["world_size"] is not None else ""
        local = facts["node_local_rank"]
        on_node = f", {local} of this node" if local is not None else ""
        rows.append(("rank", f"{facts['rank']}{size}{on_node}"))
    if place.allocation_only:
        command = "srun --overlap --jobid=$SLURM_JOB_ID clusterprof doctor --job"
        rows.append(("", f"In the allocation, but in no job step, which may have less: {command}"))
    count = len(place.processes)
    if count:
        how = "reported by its recorder" if place.from_recorder else "found by their variables"
        is_outside_ranks = not place.from_recorder and not any(
            process.here for process in place.processes
        )
        rows.append(("processes", f"{count} on this node, {how}"))
        if is_outside_ranks:
            rows.append(("", "This command runs next to them, not as a rank."))
    return "Job", rows


def _list_changes(environment: JobEnvironment) -> list[tuple[str, _Rows]]:
    """Return a section for each owner who can change something."""
    by_owner: dict[str, _Rows] = {}
    for change in environment.changes:
        rows = by_owner.setdefault(change.owner, [])
        rows.append((change.about, change.message))
        rows.append((_REMEDY_LABEL, change.remedy))
    return [(_OWNER_TITLES.get(owner, owner), rows) for owner, rows in by_owner.items()]


def _list_devices(environment: JobEnvironment) -> tuple[str, _Rows]:
    from clusterprof.agent.doctor.devices import BY_LOCAL_RANK

    rows: _Rows = [] if environment.devices else [("", "none found")]
    for entry in environment.devices[:_MAX_LISTED]:
        words = [str(entry["id"])]
        if entry.get("emulated"):
            words.append("EMULATED")
        words += [str(entry[key]) for key in ("name", "pci_bus_id") if key in entry]
        if "numa_node" in entry:
            words.append(f"NUMA node {entry['numa_node']}")
        rows.append((_format_owner(entry), ", ".join(words)))
    rest = len(environment.devices) - _MAX_LISTED
    if rest > 0:
        rows.append(("", f"{rest} more: see --json"))
    if any(
        user["how"] == BY_LOCAL_RANK for entry in environment.devices for user in entry["users"]
    ):
        rows.append(
            ("", "Devices are assumed in the order of local ranks: no rank was seen using one.")
        )
    for name, value in _collect_device_variables(environment).items():
        rows.append(("", f"{name}={value}"))
    return "Accelerators", rows


def _format_owner(entry: Mapping[str, Any]) -> str:
    ranks = dict.fromkeys(
        f"rank {user['rank']}" if user["rank"] is not None else f"pid {user['pid']}"
        for user in entry["users"]
    )
    if ranks:
        return ", ".join(ranks)
    return "not visible" if entry["visible"] is False else "not in use"


def _collect_device_variables(environment: JobEnvironment) -> dict[str, str]:
    """Return the variables that select devices: common to all processes, or marked as
    different.
    """
    out: dict[str, str] = {}
    for process in environment.job_context.processes:
        for name, value in process.chosen.items():
            if out.setdefault(name, value) != value:
                out[name] = "(differs from rank to rank)"
    return out


def _list_cores(cores: Mapping[str, Any]) -> tuple[str, _Rows]:
    if "cpus_allowed_count" not in cores:
        return "CPUs", [("", "the allowed CPUs cannot be read")]
    allowed = f"{cores['cpus_allowed']}: {cores['cpus_allowed_count']}"
    if "cpus_online_count" in cores:
        allowed += f" of {cores['cpus_online_count']}"
    rows = [("allowed", f"{allowed}, on {_format_count(cores['cores_count'], 'core')}")]
    rank_cpus = {rank["cpus_allowed"] for rank in cores["ranks"] if "cpus_allowed" in rank}
    if rank_cpus - {cores["cpus_allowed"]}:
        affinities = [
            f"{rank['rank']} on {rank.get('cpus_allowed', 'unknown')}" for rank in cores["ranks"]
        ]
        rest = f" and {len(affinities) - _MAX_LISTED} more" if len(affinities) > _MAX_LISTED else ""
        rows.append(("ranks", "; ".join(affinities[:_MAX_LISTED]) + rest))
    if "quota_cpus" in cores:
        rows.append(("quota", f"{cores['quota_cpus']:g} CPUs"))
    if len(cores.get("numa_nodes_online", ())) > 1:
        rows.append(("NUMA nodes", ", ".join(map(str, cores["numa_nodes"]))))
    sharing = cores["ranks_sharing"]
    if sharing > 1:
        rows.append(("shared by", f"{sharing} ranks of this node"))
    workers, threads = cores["workers_count"], cores["worker_threads_count"]
    rest = f", {threads} counting hyper-threads" if threads != workers else ""
    rows.append(("workers", f"{workers} of a rank fit beside its main thread{rest}"))
    if "omp_num_threads" in cores:
        rows.append(("", f"OMP_NUM_THREADS={cores['omp_num_threads']}"))
    return "CPUs", rows


def _list_files(entries: Sequence[Mapping[str, Any]]) -> tuple[str, _Rows]:
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
            free, size = (
                format_quantity(entry["free_bytes"], "bytes"),
                format_quantity(entry["size_bytes"], "bytes"),
            )
            words.append(f"{free} of {size} free")
        rows.append((str(entry["what"]), "; ".join(words)))
    return "Files", rows


def _list_fabric(net: Mapping[str, Any]) -> tuple[str, _Rows]:
    rows: _Rows = []
    for port in net["ports"][:_MAX_LISTED]:
        words = [str(port.get("link_layer", "")), str(port["state"]), *_describe_link(port)]
        rows.append((str(port["name"]), ", ".join(word for word in words if word)))
    for nic in net["nics"][:_MAX_LISTED]:
        words = [str(nic.get("state", "")), *_describe_link(nic)]
        if nic.get("default_route"):
            words.append("default route")
        rows.append((str(nic["name"]), ", ".join(word for word in words if word)))
    rest = max(0, len(net["ports"]) - _MAX_LISTED) + max(0, len(net["nics"]) - _MAX_LISTED)
    if rest:
        rows.append(("", f"{rest} more: see --json"))
    if net["ports"] and "peermem" in net:
        rows.append(("GPUDirect", f"nvidia-peermem {'' if net['peermem'] else 'not '}loaded"))
    rows += [("", f"{name}={value}") for name, value in net["variables"].items()]
    return "Fabric", rows


def _describe_link(entry: Mapping[str, Any]) -> list[str]:
    words = []
    if "link_bytes_per_second" in entry:
        words.append(f"{entry['link_bytes_per_second'] / 125_000_000:g} Gb/s")
    if "numa_node" in entry:
        words.append(f"NUMA node {entry['numa_node']}")
    if "master" in entry:
        words.append(f"of {entry['master']}")
    if entry.get("chosen") is not None:
        words.append("chosen" if entry["chosen"] else "not chosen")
    return words


def _summarize_sources(environment: JobEnvironment) -> tuple[str, _Rows]:
    here = [look for look in environment.checks if not look.elsewhere]
    seen = sum(look.status == "available" for look in here)
    summary = f"{seen} of the {len(here)} sources of this node can be recorded: clusterprof doctor"
    return "Sources", [("", summary)]


def _format_count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
