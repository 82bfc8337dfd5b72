"""Opens every collector once; reports which values are available and who can make others available.

A missing value can be made available by the user (an option, a package), by the
administrator (a permission, a kernel setting), or by no one on this machine.

Checks the fabric of a node for `doctor`: rails, ports near GPUs, bonds, GPUDirect.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.launch.election import choose_base, list_recorders
from clusterprof.agent.linux import psutil_host
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.sampling import inventory
from clusterprof.errors import NothingNew, Unavailable
from clusterprof.signals.host import OPTIONAL_COLLECTORS, is_absence_normal
from clusterprof.units import format_quantity

OWNER_USER = "you"
OWNER_ADMIN = "cluster admin"
OWNER_NOBODY = "impossible here"
_MAX_SHOWN_DEVICES = 4
_MAX_RECORDERS = 8
_TIMEOUT_SECONDS = 4.0  # a tool that reports once a second needs two reports
_RETRY_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class CoverageGap:
    """Values of one collector that cannot be read for one common reason."""

    signals: Sequence[str]
    devices: Sequence[str]
    """The affected devices; () = all devices that have the signals."""
    kind: str
    message: str
    remedy: str
    owner: str
    """Who can change it, as in `SourceCheck`."""


@dataclass(frozen=True, slots=True)
class SourceCheck:
    """The result of opening and sampling one collector."""

    name: str
    status: str
    """available, absent, denied or failed."""
    found: str
    """The available values ("7 values of 2 disks: vda, vdb")."""
    message: str
    """Why no value is available; "" when values are."""
    remedy: str
    """Action that would make values available; "" = none."""
    owner: str
    """Who can do that: "you", "cluster admin", "impossible here"; "" when nothing is wrong."""
    missing: Sequence[str] = ()
    """Single values that could not be read, with the reason."""
    holes: Sequence[CoverageGap] = ()
    """The missing values grouped by reason, with the remedy and its owner."""
    elsewhere: str = ""
    """Name of the equipment that this node lacks ("Lustre"); "" = it has or should have it."""
    devices: Sequence[Mapping[str, Any]] = ()
    """Description of its devices, as in the header of a recording."""
    users: Sequence[tuple[int, str]] = ()
    """(pid, device) of each process that was seen to use a device."""


def check_sources(
    collectors: Sequence[type[Any]],
    roots: Roots | None = None,
    isolate: Callable[[str, Context], Any] | None = None,
    run_dir: Path | None = None,
    pids: Sequence[int] = (),
) -> list[SourceCheck]:
    """Open, sample and close every collector; isolated ones in a helper, with a deadline.

    pids: the processes of the job; the current process if empty. roots: folders of a
    fixture machine; messages show the paths of a real machine instead.
    """
    roots, job = roots or Roots(), list(pids) or [os.getpid()]
    context = Context(roots, run_dir, lambda: job)
    checks = []
    for kind in collectors:
        name: str = kind.name
        try:
            isolated = kind.isolated and isolate is not None
            collector = isolate(name, context) if isolated and isolate else kind(context)
        except Exception as error:
            checks.append(_build_unavailable_check(name, _convert_error(error)))
            continue
        checks.append(_check_source(name, collector))
    return _mark_elsewhere([_with_real_paths(check, roots) for check in checks])


def _with_real_paths(check: SourceCheck, roots: Roots) -> SourceCheck:
    if roots == Roots():
        return check

    def replace_roots(text: str) -> str:
        return text.replace(str(roots.proc), "/proc").replace(str(roots.sys), "/sys")

    gaps = [replace(gap, message=replace_roots(gap.message)) for gap in check.holes]
    missing = [replace_roots(text) for text in check.missing]
    return replace(
        check, message=replace_roots(check.message), missing=tuple(missing), holes=tuple(gaps)
    )


def _mark_elsewhere(checks: Sequence[SourceCheck]) -> list[SourceCheck]:
    """Set `elsewhere` in each check that found nothing because the node lacks the equipment."""
    accelerators = any(
        check.status == "available"
        and check.name.startswith("gpu_")
        and check.name != "gpu_emulated"
        for check in checks
    )
    return [
        replace(check, elsewhere=OPTIONAL_COLLECTORS[check.name])
        if is_absence_normal(check.name, check.status, check.remedy, accelerators)
        else check
        for check in checks
    ]


def check_spans(environ: Mapping[str, str]) -> SourceCheck:
    """Check whether the probe could report spans here; they are passed through shared memory.

    Names the recorders that run on this node, so that a user can find the process to signal.
    """
    base = choose_base(environ)
    try:
        descriptor = os.memfd_create("clusterprof", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.close(descriptor)
        problem = "" if os.access(base, os.W_OK | os.X_OK) else f"{base}: not writable"
    except OSError as error:
        problem = str(error)
    if problem:
        reason = Unavailable("denied", problem, "set XDG_RUNTIME_DIR or TMPDIR to a local folder")
        return _build_unavailable_check("spans", reason)
    text = f"rings in memory, announced in {base}"
    recorders = [f"pid {pid} (job {job})" for pid, job in list_recorders(base)]
    if len(recorders) > _MAX_RECORDERS:
        recorders[_MAX_RECORDERS:] = [f"{len(recorders) - _MAX_RECORDERS} more"]
    if recorders:
        text += f"; recorders that run now: {', '.join(recorders)}"
    return SourceCheck("spans", "available", text, "", "", "")


def find_owner(reason: Unavailable) -> str:
    """Return who can make a missing value readable."""
    if not reason.remedy:
        return OWNER_NOBODY
    return OWNER_USER if reason.by_user else OWNER_ADMIN


def _check_source(name: str, collector: Any) -> SourceCheck:
    try:
        columns = list(_wait_for_result(collector.open))
        try:
            sample = _wait_for_result(collector.sample)
            devices, users = _list_devices(collector)
        finally:
            collector.close()
        if hasattr(collector, "strings"):
            shown_values = f"{len(columns)} values of every row"
            return SourceCheck(name, "available", shown_values, "", "", "")
        check = _summarize_sample(name, columns, list(sample))
        return replace(check, devices=devices, users=users)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return _build_unavailable_check(name, _convert_error(error))


def _list_devices(collector: Any) -> tuple[tuple[dict[str, Any], ...], tuple[tuple[int, str], ...]]:
    """Return the description of the devices, and the processes that were seen to use them."""
    describe = getattr(collector, "inventory", None)
    events = getattr(collector, "events", None)
    users = [
        (attributes["pid"], str(attributes.get("device", "")))
        for kind, attributes in (events() if events is not None else ())
        if kind in ("device-used", "device-owner") and isinstance(attributes.get("pid"), int)
    ]
    return tuple(dict(device) for device in describe()) if describe is not None else (), tuple(
        users
    )


def _wait_for_result(call: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """Repeat a call until it returns values; a helper process and its tools may need a while."""
    end = time.monotonic() + _TIMEOUT_SECONDS
    while True:
        try:
            return call()
        except NothingNew:
            if time.monotonic() > end:
                raise Unavailable("failed", "no values arrived") from None
        time.sleep(_RETRY_SECONDS)


def _summarize_sample(name: str, columns: Sequence[Any], sample: Sequence[Any]) -> SourceCheck:
    missing: set[str] = set()
    reasons: dict[Unavailable, list[tuple[str, str]]] = {}
    devices_by_signal: dict[str, list[str]] = {}
    for (signal, device), value in zip(columns, sample):
        devices_by_signal.setdefault(signal.name, []).append(device)
        if isinstance(value, Unavailable):
            missing.add(f"{signal.name}: {value.message}")
            reasons.setdefault(value, []).append((signal.name, device))
    if columns and len(columns) == sum(map(len, reasons.values())):
        return _build_unavailable_check(name, next(iter(reasons)))
    devices = list(dict.fromkeys(device for _, device in columns if device))
    shown_values = f"{len(devices_by_signal)} signals" if columns else "nothing yet"
    if devices:
        shown = devices[:_MAX_SHOWN_DEVICES]
        ellipsis = ", …" if len(devices) > len(shown) else ""
        shown_values += f" of {', '.join(shown)}{ellipsis}"
    gaps = [
        gap
        for reason, places in reasons.items()
        for gap in _group_gaps(reason, places, devices_by_signal)
    ]
    return SourceCheck(
        name, "available", shown_values, "", "", "", tuple(sorted(missing)), tuple(gaps)
    )


def _group_gaps(
    reason: Unavailable, places: Sequence[tuple[str, str]], devices_by_signal: dict[str, list[str]]
) -> list[CoverageGap]:
    """Group the signals that one reason makes unavailable on equal sets of devices."""
    devices_of: dict[str, list[str]] = {}
    for signal, device in places:
        devices_of.setdefault(signal, []).append(device)
    signals_by_devices: dict[tuple[str, ...], list[str]] = {}
    for signal, devices in devices_of.items():
        everywhere = len(devices) == len(devices_by_signal[signal])
        signals_by_devices.setdefault(() if everywhere else tuple(devices), []).append(signal)
    return [
        CoverageGap(
            tuple(signals), devices, reason.kind, reason.message, reason.remedy, find_owner(reason)
        )
        for devices, signals in signals_by_devices.items()
    ]


def _build_unavailable_check(name: str, reason: Unavailable) -> SourceCheck:
    return SourceCheck(name, reason.kind, "", reason.message, reason.remedy, find_owner(reason))


def _convert_error(error: BaseException) -> Unavailable:
    if isinstance(error, Unavailable):
        return error
    message = f"{type(error).__name__}: {error}"[:300]
    return Unavailable("failed", message, "report this as a bug", by_user=True)


HOST_CHECK_NAME = "host"


def check_host(roots: Roots | None = None) -> SourceCheck:
    """Check what is known of the machine itself: system, cores, memory, time of the boot.

    Read from psutil where /proc and /sys do not give it.
    """
    facts = psutil_host.read_host_facts(roots or Roots())
    texts, gaps = [facts.platform], []
    for subject, value, convert in (
        ("logical cores", facts.logical_cores, "{} logical cores".format),
        ("physical cores", facts.physical_cores, "{} physical cores".format),
        ("memory", facts.memory_bytes, _describe_memory),
        ("boot time", facts.booted_ns, _describe_boot_time),
    ):
        if not isinstance(value, Unavailable):
            texts.append(convert(value))
            continue
        owner = find_owner(value)
        gaps.append(CoverageGap((subject,), (), value.kind, value.message, value.remedy, owner))
    missing = [f"{gap.signals[0]}: {gap.message}" for gap in gaps]
    return SourceCheck(
        HOST_CHECK_NAME, "available", ", ".join(texts), "", "", "", tuple(missing), tuple(gaps)
    )


def _describe_memory(size_bytes: int) -> str:
    return f"{format_quantity(size_bytes, 'bytes')} of memory"


def _describe_boot_time(booted_ns: int) -> str:
    return time.strftime("booted %Y-%m-%d %H:%M UTC", time.gmtime(booted_ns // 1_000_000_000))


FABRIC_CHECK_NAME = "fabric"
_MAX_SHOWN_NAMES = 4
_PATH_WORDS = {
    "switch": "behind the same PCIe switch",
    "root": "below the same PCIe root",
    "numa": "of the same NUMA node",
    "system": "of another NUMA node",
}


class _FabricGap(NamedTuple):
    """What is missing between cards and GPUs."""

    subject: str
    reason: str
    remedy: str = ""

    def format_line(self) -> str:
        """Format it as one line."""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.subject}: {self.reason}{remedy}"

    def build_coverage_gap(self) -> CoverageGap:
        """Build the coverage gap that `doctor` groups by reason."""
        owner = OWNER_ADMIN if self.remedy else OWNER_NOBODY
        return CoverageGap((self.subject,), (), "absent", self.reason, self.remedy, owner)


def check_fabric(roots: Roots | None = None) -> SourceCheck:
    """Check how network cards and GPUs are connected."""
    roots = roots or Roots()
    nics, hcas = (
        inventory.list_network_interfaces(roots.sys, roots.proc),
        inventory.list_rdma_devices(roots.sys),
    )
    layout = inventory.describe_fabric(roots, nics, hcas)
    bonds = [nic for nic in nics if "mode" in nic]
    findings = [
        *_describe_rails(layout),
        *_describe_near_cards(layout),
        *_describe_gpudirect(layout),
    ]
    findings += [f"{nic['name']} is a bond of {', '.join(nic.get('lower', ()))}" for nic in bonds]
    if not findings:
        message = "no rails, no bond, and no card whose PCI path to a GPU is known"
        return SourceCheck(
            FABRIC_CHECK_NAME, "absent", "", message, "", OWNER_NOBODY, elsewhere="rails and bonds"
        )
    missing = [*_list_far_cards(layout), *_list_gpudirect_gaps(layout)]
    missing += [
        _FabricGap(f"{nic['name']}'s member {member}", "it is down")
        for nic in bonds
        for member in _get_down_members(nic)
    ]
    texts = tuple(gap.format_line() for gap in missing)
    holes = tuple(gap.build_coverage_gap() for gap in missing)
    return SourceCheck(
        FABRIC_CHECK_NAME, "available", "; ".join(findings), "", "", "", texts, holes
    )


def _get_down_members(nic: Mapping[str, Any]) -> Sequence[str]:
    members: Sequence[str] = nic.get("down", ())
    return members


def _format_names(names: Sequence[str]) -> str:
    ellipsis = ", …" if len(names) > _MAX_SHOWN_NAMES else ""
    return ", ".join(names[:_MAX_SHOWN_NAMES]) + ellipsis


def _describe_rails(layout: Mapping[str, Any]) -> Iterator[str]:
    for rail in layout.get("rails", ()):
        kind = f" of {rail['link_layer']}" if "link_layer" in rail else ""
        yield f"{len(rail['ports'])} rails{kind}: {_format_names(rail['ports'])}"


def _describe_near_cards(layout: Mapping[str, Any]) -> Iterator[str]:
    near = layout.get("gpu_nics", ())
    for path in inventory.PCI_PATHS[:-1]:
        count = sum(entry["path"] == path for entry in near)
        if count:
            yield f"{count} GPU{'s' if count > 1 else ''} with a card {_PATH_WORDS[path]}"


def _describe_gpudirect(layout: Mapping[str, Any]) -> Iterator[str]:
    gpudirect = layout.get("gpudirect", {})
    if gpudirect.get("module"):
        yield f"GPUDirect by {gpudirect['module']}"
    if gpudirect.get("dma_buf"):
        yield "GPUDirect by dma-buf if the library uses it"


def _list_far_cards(layout: Mapping[str, Any]) -> Iterator[_FabricGap]:
    for entry in layout.get("gpu_nics", ()):
        if entry["path"] == inventory.PCI_PATHS[-1]:
            nics = _format_names(entry["nics"])
            reason = f"the nearest, {nics}, is {_PATH_WORDS['system']}"
            yield _FabricGap(f"a card near GPU {entry['gpu']}", reason)


def _list_gpudirect_gaps(layout: Mapping[str, Any]) -> Iterator[_FabricGap]:
    gpudirect = layout.get("gpudirect")
    if gpudirect is None:
        return
    if "module" not in gpudirect:
        yield _FabricGap("GPUDirect", "/proc/modules cannot be read, so its state is unknown")
    elif not gpudirect["module"] and not gpudirect.get("dma_buf", True):
        reason = "no module and no dma-buf, data pass through the host"
        yield _FabricGap("GPUDirect", reason, "load nvidia-peermem (modprobe nvidia-peermem)")
    elif not gpudirect["module"] and "dma_buf" not in gpudirect:
        reason = "unknown whether the driver offers dma-buf instead"
        yield _FabricGap("nvidia-peermem", reason)
