"""One recording from start to end: collectors, registrations, rings, loop and writer.

The cost of recording: the `self` collector reads the recorder's process and its helpers.

Process settings that keep the recorder out of the job's way when resources are short.

SCHED_BATCH at nice 0 (a niced sampler wakes a third of a second late on a full machine,
a batch one 8 ms), preferred by the OOM killer, a bounded address space, no garbage
collector.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from clusterprof.agent.collectors.base import Context, Value
from clusterprof.agent.isolation import drivers
from clusterprof.agent.launch import identity
from clusterprof.agent.launch.election import (
    FOLDER_FILE,
    PID_FILE,
    RUN_DIR_PREFIX,
    remove_stale_run_dirs,
    remove_unused_run_dir,
    write_private_file,
)
from clusterprof.agent.launch.identity import read_stat_fields
from clusterprof.agent.launch.nccl import DUMP_FOLDER, InspectorOutput
from clusterprof.agent.launch.output_folder import (
    build_job_identity,
    choose_output_folder,
    lock_output_folder,
)
from clusterprof.agent.linux import psutil_host
from clusterprof.agent.linux.files import FolderWatch, Roots, open_file
from clusterprof.agent.options import (
    DEFAULT_HZ,
    RecordingRequest,
    RecordingStarted,
    UnavailableCollector,
)
from clusterprof.agent.processes.autopsy import HangCollector
from clusterprof.agent.processes.dives import Dives
from clusterprof.agent.processes.registry import (
    FlightRecorderDumps,
    ProcessGroupReader,
    Registry,
    RunDirWatch,
    has_live_process,
)
from clusterprof.agent.processes.span_rings import SpanRings
from clusterprof.agent.sampling import inventory
from clusterprof.agent.sampling.collector_runner import CollectorRunner, ErrorLogger
from clusterprof.agent.sampling.device_release import DeviceRelease
from clusterprof.agent.sampling.live_helpers import (
    LiveHelper,
    build_live_helpers,
    describe_metrics_targets,
)
from clusterprof.agent.sampling.scheduler import (
    NEVER_NS,
    Budget,
    OptionalSource,
    RecordSource,
    Schedule,
    SystemClock,
    record_batches,
)
from clusterprof.errors import CannotStart, DevicesChanged, Unavailable
from clusterprof.signals import SELF_CPU, SELF_LATE, SELF_RSS, SELF_TICKS_MISSED, Signal
from clusterprof.signals.host import is_absence_normal
from clusterprof.trace.schema import Clock as ClockRecord
from clusterprof.trace.schema import Header, Record
from clusterprof.trace.writer import RecordingWriter

if TYPE_CHECKING:
    from clusterprof.agent.sampling.redaction import Redactor

_CPU_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PROCESS_GONE = Unavailable("failed", "the process is gone")
RECORDER = "recorder"


class SelfCollector:
    """CPU time and memory of the recorder and its helpers, lateness and missed ticks."""

    name: ClassVar[str] = "self"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 1_000_000_000

    def __init__(
        self,
        schedule: Schedule,
        cpu_ns: Callable[[], int],
        helpers: Callable[[], Mapping[str, int]],
        proc: str = "/proc",
        ended_cpu_ns: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """Take the loop and the helpers by name.

        ended_cpu_ns: CPU time of earlier processes of a helper, ns, by its name.
        """
        self._schedule = schedule
        self._cpu_ns = cpu_ns
        self._helpers = helpers
        self._proc = proc
        self._ended_cpu_ns = ended_cpu_ns
        self._open_helpers: dict[str, int] = {}
        self._statm = open_file(f"{proc}/self/statm")

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Return two columns per process and two of the loop."""
        self._open_helpers = dict(self._helpers())
        columns = []
        for process in (RECORDER, *self._open_helpers):
            columns += [(SELF_CPU, process), (SELF_RSS, process)]
        return [*columns, (SELF_LATE, ""), (SELF_TICKS_MISSED, "")]

    def sample(self) -> Sequence[Value]:
        """Read /proc/self and the helpers; a changed set of helpers raises DevicesChanged."""
        if self._helpers() != self._open_helpers:
            raise DevicesChanged
        values: list[Value] = [self._cpu_ns(), self._rss()]
        for name, pid in self._open_helpers.items():
            fields = read_stat_fields(self._proc, pid)
            if fields is None:
                values += [_PROCESS_GONE, _PROCESS_GONE]
            else:
                earlier_ns = self._ended_cpu_ns().get(name, 0)
                values += [
                    earlier_ns + (int(fields[11]) + int(fields[12])) * _CPU_TICK_NS,
                    int(fields[21]) * _PAGE_BYTES,
                ]
        return [*values, self._schedule.late_ns, self._schedule.missed]

    def close(self) -> None:
        """Do nothing: the open file is used again by the next `open()`."""

    def _rss(self) -> Value:
        try:
            return int(self._statm.read().split(None, 2)[1]) * _PAGE_BYTES
        except Unavailable as reason:
            return reason


OOM_SCORE_ADJUST = 500
ADDRESS_SPACE_BYTES = 512 << 20


def apply_process_limits() -> None:
    """Set scheduling policy, CPU affinity, OOM score and open-file limit of this process.

    Settings that the system refuses are left unchanged.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        # A launcher may have bound the rank that started us to cores of its own; use other cores
        # if there are any. The kernel reduces the set to what the cgroup allows.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with contextlib.suppress(OSError):
        descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, str(OOM_SCORE_ADJUST).encode())
        finally:
            os.close(descriptor)
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit_address_space() -> None:
    """Limit the address space, not counting the gigabyte that a free-threaded Python reserves.

    Only the soft limit is set, so that a helper with a driver can raise it.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        used = int(Path("/proc/self/statm").read_bytes().split()[0]) * _PAGE_BYTES
        most = ADDRESS_SPACE_BYTES + (used if used > ADDRESS_SPACE_BYTES // 2 else 0)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def stop_garbage_collector() -> None:
    """Exclude all start-up objects from garbage collection and stop the collector.

    The loop creates no reference cycles; those left by exceptions are collected once a
    minute by `collect_garbage`.
    """
    gc.collect()
    gc.freeze()
    gc.disable()


def collect_garbage() -> None:
    """Collect the few reference cycles that exceptions have left."""
    gc.collect()


_MAX_TICK_NS = round(1_000_000_000 / DEFAULT_HZ)
_REGISTRATION_TIMEOUT_NS = 10_000_000_000
_OPEN_TIMEOUT_SECONDS = 1.0  # out of the 2 s that a launcher waits for the recorder
_GARBAGE_INTERVAL_NS = 60_000_000_000
_MAX_ENVIRON_BYTES = 1 << 20


class Service:
    """All resources that one recording holds open."""

    def __init__(
        self,
        request: RecordingRequest,
        collectors: Sequence[type[Any]],
        wake: int,
        note: ErrorLogger,
        count_device_requests: Callable[[int], int],
    ) -> None:
        """Create the collectors; `wake` is a descriptor that becomes readable on a signal.

        count_device_requests: as in `DeviceRelease`.
        """
        proc = str(request.roots.proc)
        self._order = request
        self._registry = Registry(request.run_dir, proc)
        self._rings = SpanRings(
            request.run_dir, proc, skip_old=(request.run_dir / PID_FILE).exists()
        )
        self._news = _watch_run_dir(request.run_dir)
        self._clock = SystemClock([wake, self._registry.descriptor], self._news)
        self._schedule = Schedule()
        self._note = note
        self._redactor: Redactor | None = None
        if request.plan.recording.get("redact", 0):
            from clusterprof.agent.sampling.redaction import Redactor  # few recordings need it

            self._redactor = Redactor(request.job)
        self._live: dict[str, LiveHelper] = {}
        self._runners: list[CollectorRunner] = []
        self._runners = self._build(collectors)
        self._device_release = DeviceRelease(self._runners, count_device_requests)

    def run(
        self, stop_reason: Callable[[], str], on_start: Callable[[RecordingStarted], None]
    ) -> str:
        """Record until a stop is requested or no process is left; return the reason.

        `on_start` is called once, when the first frames are on disk.
        Raises: CannotStart before that call, never after it.
        """
        request, clock = self._order, self._clock
        self._register()
        self._open(isolated=False)
        start = clock.read()
        header = self._header(start)
        folder, writer = _open_writer(request, header, clock.read)
        self._open(isolated=True)  # a driver may be slow; the first frames are already on disk
        on_start(self._build_reply(folder, header, writer.trouble))
        limit_address_space()
        stop_garbage_collector()
        remove_stale_run_dirs(
            request.run_dir.parent, f"{RUN_DIR_PREFIX}{os.geteuid()}-", has_live_process
        )
        stop_condition = _StopCondition(request, self._registry, start.monotonic_ns, stop_reason)
        budget = Budget(request.plan.hz, clock.now_ns(), clock.cpu_ns())
        tick_ns = min(_MAX_TICK_NS, round(1e9 / request.plan.hz))
        self._live = build_live_helpers(request, folder, header)
        sources = self._make_sources(folder)
        segment = writer.segment
        collect_ns = start.monotonic_ns + _GARBAGE_INTERVAL_NS
        for batch in record_batches(
            self._runners,
            sources,
            clock,
            self._schedule,
            budget,
            tick_ns,
            stop_condition.check,
            stop_condition.end_ns,
        ):
            writer.append(*self._redact(batch))
            if writer.segment != segment:
                segment = writer.segment
                self._rings.repeat_definitions()
            for helper in self._live.values():
                helper.check(clock.now_ns(), segment)
            if clock.now_ns() >= collect_ns:
                collect_ns += _GARBAGE_INTERVAL_NS
                collect_garbage()
        writer.close()
        for helper in self._live.values():
            helper.close()
        self._rings.close()
        self._registry.close()
        return stop_condition.reason

    def _build_reply(self, folder: Path, header: Header, trouble: str) -> RecordingStarted:
        notes = describe_metrics_targets(self._order.plan.metrics)
        return RecordingStarted(
            folder,
            self._unavailable,
            any(device.get("emulated") for device in header.devices),
            [f"nothing can be written yet: {trouble}", *notes] if trouble else notes,
        )

    def _make_sources(self, folder: Path) -> tuple[RecordSource, ...]:
        """Make the sources of records; rings come before the sources that read their progress."""
        request, run_dir = self._order, self._order.run_dir
        plan, proc = request.plan, str(request.roots.proc)
        hang_after_ns = plan.recording.get("hang_after_ns")
        autopsies = HangCollector(run_dir, folder, self._rings, proc, hang_after_ns, plan.on_hang)
        unguarded = (
            self._device_release,
            self._registry,
            self._rings,
            ProcessGroupReader(run_dir),
            RunDirWatch(run_dir, self._note),
        )
        if self._redactor is not None:  # the others write files that hold paths and names
            return unguarded
        optional: dict[str, RecordSource] = {
            "flight recorder": FlightRecorderDumps(run_dir, folder, proc),
            "NCCL Inspector": InspectorOutput(run_dir, folder, self._note),
            "autopsy": autopsies,
        }
        if after_ns := plan.recording.get("dive_after_ns"):
            optional["dive"] = Dives(run_dir, folder, self._rings, after_ns)
        guarded = (OptionalSource(name, source, self._note) for name, source in optional.items())
        return (*unguarded, *guarded)

    def close(self) -> None:
        """Close inotify; it takes tens of ms in the kernel, so it is done after everything else."""
        if self._news is not None:
            self._news.close()

    def _redact(self, batch: Iterable[Record]) -> Iterable[Record]:
        return batch if self._redactor is None else map(self._redactor.redact, batch)

    def _register(self) -> None:
        request, now_ns = self._order, self._clock.now_ns()
        ticks = identity.read_start_ticks(str(request.roots.proc), os.getpid())
        write_private_file(request.run_dir / PID_FILE, f"{os.getpid()} {ticks}\n".encode())
        if request.pid is not None:
            variables = read_process_variables(request.roots.proc, request.pid)
            if not self._registry.attach(request.pid, variables, now_ns):
                raise CannotStart(f"process {request.pid} does not exist", "name a running process")
        self._registry.look(now_ns)

    def _open(self, isolated: bool) -> None:
        for runner in self._runners:
            if runner.collector.isolated == isolated:
                runner.open(self._clock.now_ns())

    def _build(self, collectors: Sequence[type[Any]]) -> list[CollectorRunner]:
        request = self._order
        context = Context(request.roots, request.run_dir, self._registry.job_pids)
        runners = []
        for kind in collectors:
            name, default_ns = str(kind.name), int(kind.interval_ns)
            if not request.plan.enabled(name) or not _is_collector_possible(kind, request.roots):
                continue
            try:
                options = request.plan.helper_options(name)
                isolated = kind.isolated
                collector = (
                    make_isolated_collector(name, context, options) if isolated else kind(context)
                )
            except Exception as error:
                self._note(name, error)
                continue
            runners.append(
                CollectorRunner(collector, request.plan.interval_ns(name, default_ns), self._note)
            )
        self_collector = SelfCollector(
            self._schedule,
            self._clock.cpu_ns,
            self._helper_pids,
            str(request.roots.proc),
            self._ended_helper_cpu_ns,
        )
        return [*runners, CollectorRunner(self_collector, self_collector.interval_ns, self._note)]

    def _helper_pids(self) -> Mapping[str, int]:
        pids = {runner.name: getattr(runner.collector, "pid", None) for runner in self._runners}
        pids |= {name: helper.pid for name, helper in self._live.items()}
        return {f"helper:{name}": pid for name, pid in pids.items() if pid is not None}

    def _ended_helper_cpu_ns(self) -> Mapping[str, int]:
        """Return the CPU time of earlier processes of the helpers that settle, ns."""
        return {f"helper:{name}": helper.ended_cpu_ns for name, helper in self._live.items()}

    def _header(self, start: ClockRecord) -> Header:
        request = self._order
        devices = [device for runner in self._runners for device in runner.devices_for_header()]
        variables = identity.select_launcher_variables(os.environ)
        header = Header(
            node=inventory.build_node_identity(request.roots, start, os.environ),
            started={
                "monotonic_ns": start.monotonic_ns,
                "boottime_ns": start.boottime_ns,
                "realtime_ns": start.realtime_ns,
            },
            host=inventory.build_host_inventory(request.roots),
            devices=devices,
            launcher={
                "job": request.job,
                "named": identity.is_job_name(request.job),
                "variables": variables,
            },
            versions=inventory.list_versions(),
            profile=dict(request.plan.profile),
            collectors=[
                {"name": runner.name, "interval_ns": runner.interval_ns, "status": runner.status}
                for runner in self._runners
            ],
        )
        return header if self._redactor is None else self._redactor.redact_header(header)

    @property
    def _unavailable(self) -> list[UnavailableCollector]:
        unavailable = []
        available = {
            runner.name for runner in self._runners if runner.status in ("available", "opening")
        }
        has_vendor_gpu = any(name.startswith("gpu_") for name in available - {"gpu_emulated"})
        for runner in self._runners:
            reason = runner.reason
            if reason is not None and not is_absence_normal(
                runner.name, reason.kind, reason.remedy, has_vendor_gpu
            ):
                unavailable.append(
                    UnavailableCollector(runner.name, reason.kind, reason.message, reason.remedy)
                )
        return unavailable


class _StopCondition:
    """Decides when a recording ends, and removes the run directory when no process is left."""

    def __init__(
        self,
        request: RecordingRequest,
        registry: Registry,
        begin_ns: int,
        stop_reason: Callable[[], str],
    ) -> None:
        self._order = request
        self._registry = registry
        self._begin_ns = begin_ns
        self._stop_reason = stop_reason
        self._has_removed_run_dir = False
        self.reason = ""
        self.end_ns = NEVER_NS if request.duration_ns is None else begin_ns + request.duration_ns

    def check(self, now_ns: int) -> str:
        """Return why the recording ends now, "" while it continues."""
        reason = self._find_reason(now_ns)
        if reason:
            self.reason = reason
            if not self._has_removed_run_dir:
                remove_unused_run_dir(self._order.run_dir, self._registry.has_processes)
        return reason

    def _find_reason(self, now_ns: int) -> str:
        signal_name = self._stop_reason()
        if signal_name:
            return signal_name
        if now_ns >= self.end_ns:
            return "the duration is over"
        if not self._order.follow or self._registry.has_processes():
            return ""
        may_end = (
            self._registry.has_registered or now_ns - self._begin_ns >= _REGISTRATION_TIMEOUT_NS
        )
        if may_end and self._remove_run_dir(now_ns):
            return "no process is left"
        return ""

    def _remove_run_dir(self, now_ns: int) -> bool:
        """Check the registrations once more while no process can join; remove the run directory."""

        def has_processes() -> bool:
            self._registry.look_again(now_ns)
            return self._registry.has_processes()

        self._has_removed_run_dir = remove_unused_run_dir(self._order.run_dir, has_processes)
        return self._has_removed_run_dir


def _is_collector_possible(kind: Any, roots: Roots) -> bool:
    """Return False for collectors of accelerators that this node lacks: no gap is recorded."""
    why_absent = getattr(kind, "why_absent", None)
    if why_absent is not None:
        return why_absent(roots) is None
    name = str(kind.name)
    return (
        name not in drivers.OPTIONAL_COLLECTORS or drivers.explain_absence(name, os.environ) is None
    )


def _watch_run_dir(run_dir: Path) -> FolderWatch | None:
    """Watch the run directory with inotify for new registrations, rings and dumps.

    A container ends with its job, so that there is hardly time for the dumps of ranks that end.
    Returns None where that is impossible.
    """
    dumps = (DUMP_FOLDER,) if (run_dir / DUMP_FOLDER).is_dir() else ()
    try:
        return FolderWatch([str(run_dir / name) for name in ("register", "rings", *dumps)])
    except Unavailable:
        return None


def make_isolated_collector(
    name: str,
    context: Context,
    options: Sequence[str] = (),
    first_wait_seconds: float = _OPEN_TIMEOUT_SECONDS,
) -> Any:
    """Make a collector that runs in its own process, since its driver may hang or crash."""
    from clusterprof.agent.isolation.collector import IsolatedCollector

    return IsolatedCollector(name, context, options=options, first_wait_seconds=first_wait_seconds)


def read_process_variables(proc: Path, pid: int) -> dict[str, str]:
    """Read the launcher variables of a running process, nothing else of its environment.

    From psutil where there is no Linux /proc.
    """
    if not psutil_host.has_linux_proc(Roots(proc)):
        return identity.select_launcher_variables(psutil_host.read_environ(pid))
    try:
        with open(proc / str(pid) / "environ", "rb") as environ:
            content = environ.read(_MAX_ENVIRON_BYTES)
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in content.split(b"\0"))
    return identity.select_launcher_variables(
        {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}
    )


def _open_writer(
    request: RecordingRequest, header: Header, clock: Callable[[], ClockRecord]
) -> tuple[Path, RecordingWriter]:
    """Choose the node's folder and write the first segment, while no other recorder chooses."""
    with lock_output_folder(request.out):
        folder = _choose_out(request, header) / header.node["key"]
        writer = RecordingWriter(folder, header, clock, **_select_writer_options(request))
    with contextlib.suppress(OSError):  # only callbacks of the job read it
        write_private_file(request.run_dir / FOLDER_FILE, os.fsencode(folder.parent))
    return folder, writer


def _choose_out(request: RecordingRequest, header: Header) -> Path:
    """Return the folder of the job's recording; a recording of a node alone belongs to no job."""
    if not request.follow:
        return request.out
    variables = header.launcher["variables"]
    if request.pid is not None:
        variables = read_process_variables(request.roots.proc, request.pid)
    job = header.launcher["job"]  # of a redacted recording the word that stands for it
    if request.pid is not None and request.plan.recording.get("redact", 0):
        variables = {}
    ours = build_job_identity(job, variables, header.node.get("boot_id", ""))
    ours = ours._replace(machine=(header.node.get("hostname", ""), header.node.get("boot_id", "")))
    return choose_output_folder(request.out, ours)


def _select_writer_options(request: RecordingRequest) -> dict[str, Any]:
    option_names = ("segment_bytes", "max_bytes", "keep_free_bytes", "mode")
    return {
        name: request.plan.recording[name]
        for name in option_names
        if name in request.plan.recording
    }
