"""One recording from beginning to end: collectors, registrations, rings, loop and writer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterprof.collectors.base import Context
from clusterprof.errors import CannotStart, Unavailable
from clusterprof.linux.inotify import News
from clusterprof.linux.roots import Roots
from clusterprof.recorder import drivers, identity, inventory, neighbour
from clusterprof.recorder.budget import Budget
from clusterprof.recorder.clock import SystemClock
from clusterprof.recorder.devices import Note
from clusterprof.recorder.dumps import Dumps
from clusterprof.recorder.election import leave, sweep
from clusterprof.recorder.groups import Groups
from clusterprof.recorder.loop import record
from clusterprof.recorder.order import Order, Started, Unseen
from clusterprof.recorder.plan import DEFAULT_HZ
from clusterprof.recorder.registry import Registry, registered_alive
from clusterprof.recorder.rings import Rings
from clusterprof.recorder.rundir import RUN_DIR_PREFIX, write_private
from clusterprof.recorder.slot import Slot
from clusterprof.recorder.tier import NEVER_NS, Pace
from clusterprof.recorder.usage import SelfCollector
from clusterprof.signals.elsewhere import is_elsewhere
from clusterprof.trace.schema import Clock as ClockRecord
from clusterprof.trace.schema import Header
from clusterprof.trace.writer import RecordingWriter

_TICK_NS = round(1_000_000_000 / DEFAULT_HZ)
_NOBODY_CAME_NS = 10_000_000_000
_FIRST_WAIT_SECONDS = 1.0  # of the 2 s that a launcher waits for the recorder
_COLLECT_NS = 60_000_000_000
_ENVIRON_BYTES_AT_MOST = 1 << 20


class Service:
    """Everything that one recording holds open."""

    def __init__(self, order: Order, collectors: Sequence[type], wake: int, note: Note) -> None:
        """`wake`: a descriptor that becomes readable when a signal has come."""
        proc = str(order.roots.proc)
        self._order = order
        self._registry = Registry(order.run_dir, proc)
        self._rings = Rings(order.run_dir, proc, skip_old=(order.run_dir / "agent.pid").exists())
        self._news = _news(order.run_dir)
        self._clock = SystemClock([wake, self._registry.descriptor], self._news)
        self._pace = Pace()
        self._note = note
        self._slots: list[Slot] = []
        self._slots = self._build(collectors)

    def run(self, asked: Callable[[], str], started: Callable[[Started], None]) -> str:
        """Record until asked to stop or nothing is left to record; return the reason.

        `started` is called once, when the first frames are on disk. Raises `CannotStart` before
        that, and nothing after.
        """
        order, clock = self._order, self._clock
        self._register()
        self._open(isolated=False)
        begin = clock.read()
        header = self._header(begin)
        folder = order.out / header.node["key"]
        writer = RecordingWriter(folder, header, clock.read, **_writer_options(order))
        self._open(isolated=True)  # a driver may take its time; the first frames are on disk
        started(Started(folder, self._unseen, any(d.get("emulated") for d in header.devices)))
        neighbour.bound_memory()
        neighbour.freeze()
        sweep(order.run_dir.parent, f"{RUN_DIR_PREFIX}{os.geteuid()}-", registered_alive)
        ending = _Ending(order, self._registry, begin.monotonic_ns, asked)
        budget = Budget(order.plan.hz, clock.now_ns(), clock.cpu_ns())
        tick_ns = min(_TICK_NS, round(1e9 / order.plan.hz))
        dumps = Dumps(order.run_dir, folder, str(order.roots.proc))
        sources = (self._registry, self._rings, Groups(order.run_dir), dumps)
        collect_ns = begin.monotonic_ns + _COLLECT_NS
        for batch in record(
            self._slots, sources, clock, self._pace, budget, tick_ns, ending.check, ending.at_ns
        ):
            writer.append(*batch)
            if clock.now_ns() >= collect_ns:
                collect_ns += _COLLECT_NS
                neighbour.collect()
        writer.close()
        self._rings.close()
        self._registry.close()
        return ending.reason

    def close(self) -> None:
        """Let go of inotify: tens of ms in the kernel, so after all that somebody may wait for."""
        if self._news is not None:
            self._news.close()

    def _register(self) -> None:
        order, now_ns = self._order, self._clock.now_ns()
        ticks = identity.started_ticks(str(order.roots.proc), os.getpid())
        write_private(order.run_dir / "agent.pid", f"{os.getpid()} {ticks}\n".encode())
        if order.pid is not None:
            variables = process_variables(order.roots.proc, order.pid)
            if not self._registry.attach(order.pid, variables, now_ns):
                raise CannotStart(f"there is no process {order.pid}", "name a running process")
        self._registry.look(now_ns)

    def _open(self, isolated: bool) -> None:
        for slot in self._slots:
            if slot.collector.isolated == isolated:
                slot.open(self._clock.now_ns())

    def _build(self, collectors: Sequence[type]) -> list[Slot]:
        order = self._order
        context = Context(order.roots, order.run_dir, self._registry.job_pids)
        slots = []
        for kind in collectors:
            name, default_ns = str(kind.name), int(kind.interval_ns)  # type: ignore[attr-defined]
            if not order.plan.enabled(name) or not _may_be_here(kind, order.roots):
                continue
            try:
                options = order.plan.helper_options(name)
                collector = isolate(name, context, options) if kind.isolated else kind(context)  # type: ignore[attr-defined]
            except Exception as error:
                self._note(name, error)
                continue
            slots.append(Slot(collector, order.plan.interval_ns(name, default_ns), self._note))
        own = SelfCollector(
            self._pace, self._clock.cpu_ns, self._helper_pids, str(order.roots.proc)
        )
        return [*slots, Slot(own, own.interval_ns, self._note)]

    def _helper_pids(self) -> Mapping[str, int]:
        pids = {slot.name: getattr(slot.collector, "pid", None) for slot in self._slots}
        return {f"helper:{name}": pid for name, pid in pids.items() if pid is not None}

    def _header(self, begin: ClockRecord) -> Header:
        order = self._order
        devices = [device for slot in self._slots for device in slot.devices_for_header()]
        variables = identity.launcher_variables(os.environ)
        return Header(
            node=inventory.node_identity(order.roots, begin, os.environ),
            started={
                "monotonic_ns": begin.monotonic_ns,
                "boottime_ns": begin.boottime_ns,
                "realtime_ns": begin.realtime_ns,
            },
            host=inventory.host_inventory(order.roots),
            devices=devices,
            launcher={
                "job": order.job,
                "named": identity.is_name(order.job),
                "variables": variables,
            },
            versions=inventory.versions(),
            profile=dict(order.plan.profile),
            collectors=[
                {"name": slot.name, "interval_ns": slot.interval_ns, "status": slot.status}
                for slot in self._slots
            ],
        )

    @property
    def _unseen(self) -> list[Unseen]:
        found = []
        seen = {slot.name for slot in self._slots if slot.status in ("available", "opening")}
        makers = any(name.startswith("gpu_") for name in seen - {"gpu_emulated"})
        for slot in self._slots:
            why = slot.reason
            if why is not None and not is_elsewhere(slot.name, why.kind, why.remedy, makers):
                found.append(Unseen(slot.name, why.kind, why.message, why.remedy))
        return found


class _Ending:
    """Decides when a recording is over, and takes the run directory away when nobody is left."""

    def __init__(
        self, order: Order, registry: Registry, begin_ns: int, asked: Callable[[], str]
    ) -> None:
        self._order = order
        self._registry = registry
        self._begin_ns = begin_ns
        self._asked = asked
        self.reason = ""
        self.at_ns = NEVER_NS if order.duration_ns is None else begin_ns + order.duration_ns

    def check(self, now_ns: int) -> str:
        """Return why the recording ends now, "" while it goes on."""
        reason = self._why(now_ns)
        if reason:
            self.reason = reason
            if reason != "no process is left":
                leave(self._order.run_dir, self._registry.anybody)
        return reason

    def _why(self, now_ns: int) -> str:
        asked = self._asked()
        if asked:
            return asked
        if now_ns >= self.at_ns:
            return "the duration is over"
        if not self._order.follow:
            return ""
        if self._registry.anybody():
            return ""
        came = self._registry.somebody_came or now_ns - self._begin_ns >= _NOBODY_CAME_NS
        if came and self._alone(now_ns):
            return "no process is left"
        return ""

    def _alone(self, now_ns: int) -> bool:
        """Look once more while nobody can join, and take the run directory away."""

        def somebody_joined() -> bool:
            self._registry.look_again(now_ns)
            return self._registry.anybody()

        return leave(self._order.run_dir, somebody_joined)


def _may_be_here(kind: Any, roots: Roots) -> bool:
    """False for what belongs to accelerators that this node has not: nobody misses it, no gap."""
    why_absent = getattr(kind, "why_absent", None)
    if why_absent is not None:
        return why_absent(roots) is None
    name = str(kind.name)
    return name not in drivers.ELSEWHERE or drivers.why_absent(name, os.environ) is None


def _news(run_dir: Path) -> News | None:
    """Have the kernel say when a process announces itself or its ring; None: it will not."""
    try:
        return News([str(run_dir / name) for name in ("register", "rings")])
    except Unavailable:
        return None


def isolate(name: str, context: Context, options: Sequence[str] = ()) -> Any:
    """Return a collector that can hang or crash, in a process of its own."""
    from clusterprof.recorder.isolated import IsolatedCollector

    return IsolatedCollector(name, context, options=options, first_wait_seconds=_FIRST_WAIT_SECONDS)


def process_variables(proc: Path, pid: int) -> dict[str, str]:
    """Return the launcher variables of a running process; nothing else of its environment."""
    try:
        with open(proc / str(pid) / "environ", "rb") as environ:
            content = environ.read(_ENVIRON_BYTES_AT_MOST)
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in content.split(b"\0"))
    return identity.launcher_variables(
        {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}
    )


def _writer_options(order: Order) -> dict[str, Any]:
    known = ("segment_bytes", "max_bytes", "keep_free_bytes")
    return {name: order.plan.recording[name] for name in known if name in order.plan.recording}
