"""Detect that the ranks of the node hang, and collect evidence while they do.

    rank 0   step 811 | all_reduce 812 ...............................   waits for 30 s
    rank 1   step 811 | ..............................................   marks nothing for 30 s

A rank makes progress when it marks a span of its own work. The node hangs when no rank does for
much longer than ever before, or when one rank waits in an operation for so long while the others
go on with steps.

    at once        event `progress-stopped`: the ranks, the state of each thread that trains
    within 15 s    dumps of PyTorch's flight recorder, written by the probe of each rank on request;
                   the answer of NCCL's RAS service
    then           event `autopsy-finished`, and the user's command (`record --on-hang`), once

Everything else is recorded all the time: stacks, thread states, devices, the kernel log. When ranks
resume, there is an event `progress-resumed`. Nothing here waits: `take` is called at every flush.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterprof.agent.launch.election import read_small_json, write_private_file
from clusterprof.agent.launch.identity import read_stat_fields
from clusterprof.agent.launch.nccl import (
    ADDRESS_VARIABLE,
    DEFAULT_ADDRESS,
    DUMP_FOLDER,
    DUMP_PREFIX,
    OUTPUT_LINK,
    RasQuery,
)
from clusterprof.agent.processes.registry import MIN_FREE_BYTES, parse_registration
from clusterprof.agent.processes.span_rings import RankProgress, SpanRings
from clusterprof.trace.schema import Event, Record

MIN_BOUND_NS, MAX_BOUND_NS = 30_000_000_000, 300_000_000_000
"""Least and longest time without progress after which a rank hangs, ns. A first save or
evaluation may take half a minute; NCCL's own timeout ends a job after ten minutes."""
PAUSE_FACTOR = 3
"""Times the longest pause of the run so far."""
DIVERGED_STEPS = 10
"""Steps of a rank while another one waits in an operation, from which on they have diverged."""
MAX_ASLEEP_RATIO = 0.1
"""CPU time of a lone process over elapsed time, up to which it hangs and does not work."""
COLLECT_NS = 15_000_000_000
"""Time for which dumps and the answer of RAS are awaited, ns."""
HOOK_TIMEOUT_S = 60
MAX_AUTOPSIES = 20
"""Per recording: a job that hangs more often is known by then."""
MAX_DUMP_BYTES = 16 << 20
_MAX_RANKS = 128
_ABLE_STATES = ("R", "S", "D")
"""States of a process whose probe can still write a dump: not stopped, and not ended."""
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_WANTED = "wanted"
HOOK_LOG = "on-hang.log"
RESUMED_SUFFIX = ".resumed"
"""Behind the names of dumps of ranks that went on."""
# The recorder's own limits are not the command's; what it writes is bounded (blocks of 512 bytes).
# The command ends in time even if the recorder has ended before: its group kills itself.
_HOOK_SHELL = (
    f"( sleep {HOOK_TIMEOUT_S}; kill -KILL 0 ) & "
    'ulimit -S -v "$(ulimit -H -v)"; ulimit -f 32768; '
    'renice -n 10 -p $$ >/dev/null 2>&1; exec /bin/sh -c "$1"'
)


@dataclass(frozen=True, slots=True)
class HungRanks:
    """Ranks that hang."""

    since_ns: int
    """Time of the last progress, or of the begin of the wait."""
    begun_ns: int
    """When it counted as a hung_ranks."""
    bound_ns: int
    longest_pause_ns: int
    waiting: tuple[int, ...]
    """Processes that wait in an operation."""
    silent: tuple[int, ...]
    """Processes that mark nothing and wait in no operation that is known."""
    stepping: tuple[int, ...]
    """Processes that step on while others wait."""


class ProgressWatch:
    """Detects that ranks hang, and that they resume."""

    def __init__(self, hang_after_ns: int | None = None) -> None:
        """hang_after_ns: time without progress that counts; None = by the pace of the run."""
        self._hang_after_ns = hang_after_ns
        self._steps_before: dict[int, int] = {}  # pid -> its steps when another began to wait
        self._wait_ns = 0  # start of that wait

    def compute_bound_ns(self, ranks: Sequence[RankProgress]) -> int:
        """Compute how long ranks may make no progress, ns."""
        if self._hang_after_ns is not None:
            return self._hang_after_ns
        longest_ns = max((rank.longest_pause_ns for rank in ranks), default=0)
        return min(max(MIN_BOUND_NS, PAUSE_FACTOR * longest_ns), MAX_BOUND_NS)

    def check(
        self, alive: Sequence[RankProgress], ended_ns: int, is_asleep: bool, now_ns: int
    ) -> HungRanks | None:
        """Return which ranks hang, and how; None if they make progress.

        alive: ranks whose processes exist. ended_ns: when a rank ended last, 0 = none has.
        is_asleep: whether they have hardly used a CPU since their last progress.
        """
        if not alive:
            return None
        bound_ns = self.compute_bound_ns(alive)
        waits = [rank.waits_since_ns for rank in alive if rank.waits_since_ns]
        self._note_steps(alive, min(waits, default=0))
        waiting = [
            rank
            for rank in alive
            if rank.waits_since_ns and now_ns - rank.waits_since_ns >= bound_ns
        ]
        moving = [rank for rank in alive if now_ns - rank.last_ns < bound_ns]
        if not moving:
            # After other ranks have ended, one that is in no operation finishes the job.
            has_ended = ended_ns > min(rank.first_ns for rank in alive)
            if not waiting and (has_ended or (len(alive) == 1 and not is_asleep)):
                return None
        elif not waiting or not all(self._has_diverged(rank) for rank in moving):
            return None
        in_operation = {rank.pid for rank in alive if rank.waits_since_ns}
        stepping = {rank.pid for rank in moving} - in_operation
        since_ns = (
            min(rank.waits_since_ns for rank in waiting)
            if moving
            else max(rank.last_ns for rank in alive)
        )
        longest_ns = max(rank.longest_pause_ns for rank in alive)
        silent = {rank.pid for rank in alive} - in_operation - stepping
        groups = (tuple(sorted(pids)) for pids in (in_operation, silent, stepping))
        return HungRanks(since_ns, now_ns, bound_ns, longest_ns, *groups)

    def _note_steps(self, alive: Sequence[RankProgress], wait_ns: int) -> None:
        """Note the steps of each rank when the wait began that is under way."""
        if wait_ns != self._wait_ns:
            self._wait_ns = wait_ns
            self._steps_before = {rank.pid: rank.steps for rank in alive}

    def _has_diverged(self, rank: RankProgress) -> bool:
        return rank.steps - self._steps_before.get(rank.pid, rank.steps) >= DIVERGED_STEPS


class HangCollector:
    """A source of records that watches the ranks, and collects evidence while they hang."""

    def __init__(
        self,
        run_dir: Path,
        folder: Path,
        rings: SpanRings,
        proc: str = "/proc",
        hang_after_ns: int | None = None,
        on_hang: str = "",
    ) -> None:
        """folder: of the node's recording. on_hang: the user's command, "" = none."""
        self._run_dir, self._folder, self._rings, self._proc = run_dir, folder, rings, proc
        self._watch = ProgressWatch(hang_after_ns)
        self._hook = HangHook(on_hang, folder)
        self._cpu_ns: dict[int, tuple[int, int]] = {}  # pid -> last progress, CPU time then
        self._hung_ranks: HungRanks | None = None
        self._autopsies = 0
        self._collecting: _Collection | None = None

    def take(self, now_ns: int) -> list[Record]:
        """Return the events since the last call."""
        records: list[Record] = []
        self._hook.check()
        alive = self._rings.list_progress()
        if self._hung_ranks is not None:
            if has_resumed(self._hung_ranks, alive):
                records += self._note_resumption(self._hung_ranks, now_ns)
        elif alive:
            is_asleep = self._is_asleep(alive, now_ns)
            self._hung_ranks = self._watch.check(alive, self._rings.ended_ns, is_asleep, now_ns)
            if self._hung_ranks is not None:
                records.append(self._begin(self._hung_ranks, now_ns))
        if self._collecting is not None and self._collecting.poll(now_ns):
            records.append(self._finish_collection(now_ns))
        return records

    def finish(self, now_ns: int) -> list[Record]:
        """Return the last events; the user's command keeps running within its time."""
        if self._collecting is None:
            return []
        return [Event(now_ns, "autopsy-finished", self._collecting.finish())]

    def _begin(self, hung_ranks: HungRanks, now_ns: int) -> Event:
        pids = (*hung_ranks.waiting, *hung_ranks.silent, *hung_ranks.stepping)[:_MAX_RANKS]
        threads = [read_thread_state(self._proc, pid) for pid in pids]
        if self._autopsies < MAX_AUTOPSIES and self._collecting is None:
            self._autopsies += 1
            self._collecting = _Collection(self._run_dir, self._folder, threads, self._proc, now_ns)
        attributes: dict[str, Any] = {
            "since_ns": hung_ranks.since_ns,
            "bound_ns": hung_ranks.bound_ns,
            "longest_pause_ns": hung_ranks.longest_pause_ns,
            "waiting": list(hung_ranks.waiting[:_MAX_RANKS]),
            "silent": list(hung_ranks.silent[:_MAX_RANKS]),
            "stepping": list(hung_ranks.stepping[:_MAX_RANKS]),
            "threads": threads,
        }
        return Event(now_ns, "progress-stopped", attributes)

    def _note_resumption(self, hung_ranks: HungRanks, now_ns: int) -> list[Event]:
        """Note that ranks went on: the dumps no longer say how they are, and get another name."""
        self._hung_ranks = None
        events = [] if self._collecting is None else [self._finish_collection(now_ns)]
        for path in (self._folder / OUTPUT_LINK).glob(f"{DUMP_PREFIX}*.json"):
            with contextlib.suppress(OSError):
                path.rename(path.with_name(path.name + RESUMED_SUFFIX))
        return [*events, Event(now_ns, "progress-resumed", {"since_ns": hung_ranks.since_ns})]

    def _finish_collection(self, now_ns: int) -> Event:
        collection, self._collecting = self._collecting, None
        assert collection is not None
        attributes = collection.finish()
        if self._hung_ranks is not None:
            attributes["hook"] = self._hook.start(self._hung_ranks, now_ns)
        return Event(now_ns, "autopsy-finished", attributes)

    def _is_asleep(self, alive: list[RankProgress], now_ns: int) -> bool:
        """Return whether a lone process has hardly used a CPU since its last progress."""
        if len(alive) != 1:
            return False
        rank = alive[0]
        cpu_ns = read_cpu_ns(self._proc, rank.pid)
        before = self._cpu_ns.get(rank.pid)
        if cpu_ns is None:
            return False
        if before is None or before[0] != rank.last_ns:
            self._cpu_ns = {rank.pid: (rank.last_ns, cpu_ns)}
            return False
        return cpu_ns - before[1] <= MAX_ASLEEP_RATIO * (now_ns - rank.last_ns)


class _Collection:
    """Evidence written by others on request: dumps of the ranks, the answer of NCCL RAS."""

    def __init__(
        self, run_dir: Path, folder: Path, threads: list[dict[str, Any]], proc: str, now_ns: int
    ) -> None:
        """threads: state of each rank (`read_thread_state`)."""
        self._run_dir, self._folder = run_dir, folder
        self._end_ns = now_ns + COLLECT_NS
        self._dumps: list[str] = []
        pids = [thread["pid"] for thread in threads]
        self._without_dump = set(pids)
        self._awaited = {item["pid"] for item in threads if item["state"] in _ABLE_STATES}
        # Of the job that started the recorder. The environment of a rank is not read: the kernel
        # may let the reader wait for a process that is blocked.
        self._ras = RasQuery(os.environ.get(ADDRESS_VARIABLE, DEFAULT_ADDRESS), now_ns, proc)
        with contextlib.suppress(OSError):
            (run_dir / DUMP_FOLDER).mkdir(mode=0o700, exist_ok=True)
            write_private_file(run_dir / DUMP_FOLDER / _WANTED, b"")

    def poll(self, now_ns: int) -> bool:
        """Collect what has arrived; return whether nothing more is awaited."""
        has_answer = self._ras.poll(now_ns)
        for pid in sorted(self._awaited):
            path = self._run_dir / DUMP_FOLDER / f"{pid}.json"
            if path.exists():
                self._awaited.discard(pid)
                with contextlib.suppress(OSError):
                    if self._keep_dump(pid, path):
                        self._without_dump.discard(pid)
        return (has_answer and not self._awaited) or now_ns >= self._end_ns

    def finish(self) -> dict[str, Any]:
        """Return the attributes of the event, and ask for no more dumps."""
        self._ras.close()
        with contextlib.suppress(OSError):
            os.unlink(self._run_dir / DUMP_FOLDER / _WANTED)
        reason = self._ras.reason or ("" if self._ras.reply else "it was not awaited to the end")
        return {
            "dumps": self._dumps,
            "without_dump": sorted(self._without_dump),
            "ras_reply": self._ras.reply.decode("utf-8", "replace"),
            "ras_reason": reason,
        }

    def _keep_dump(self, pid: int, path: Path) -> bool:
        """Move a dump into the recording, under the rank of its process; return whether it is."""
        content = read_own_file(path, MAX_DUMP_BYTES)
        os.unlink(path)
        registration = read_small_json(str(self._run_dir / "register" / f"{pid}.json")) or {}
        rank = (parse_registration(registration) or {}).get("rank")
        stats = os.statvfs(self._folder)
        if rank is None or not content or stats.f_bavail * stats.f_frsize < MIN_FREE_BYTES:
            return False
        mode = stat.S_IMODE(os.stat(self._folder).st_mode)
        (self._folder / OUTPUT_LINK).mkdir(mode=mode, exist_ok=True)
        name = f"{DUMP_PREFIX}{rank}.json"
        write_private_file(self._folder / OUTPUT_LINK / name, content, mode & 0o666)
        self._dumps.append(name)
        return True


class HangHook:
    """The user's command for a hang: started once, in a session of its own, ended after a minute.

    It gets the variables CLUSTERPROF_RECORDING (folder of the node), CLUSTERPROF_HANG_PIDS (all
    ranks of the node), CLUSTERPROF_HANG_SILENT_PIDS (those that wait in no operation) and
    CLUSTERPROF_HANG_SECONDS. What it prints is in `on-hang.log` in that folder, at most 16 MiB.
    """

    def __init__(self, command: str, folder: Path) -> None:
        self._command, self._folder = command, folder
        self._pid = 0

    def start(self, hung_ranks: HungRanks, now_ns: int) -> str:
        """Start the command, unless it ran before; return what was done, "" = there is none."""
        command, self._command = self._command, ""
        if not command:
            return ""
        pids = (*hung_ranks.waiting, *hung_ranks.silent, *hung_ranks.stepping)
        environment = os.environ | {
            "CLUSTERPROF_RECORDING": str(self._folder),
            "CLUSTERPROF_HANG_PIDS": " ".join(map(str, pids)),
            "CLUSTERPROF_HANG_SILENT_PIDS": " ".join(map(str, hung_ranks.silent)),
            "CLUSTERPROF_HANG_SECONDS": str((now_ns - hung_ranks.since_ns) // 10**9),
        }
        log = str(self._folder / HOOK_LOG)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        try:
            self._pid = os.posix_spawn(
                "/bin/sh",
                ["/bin/sh", "-c", _HOOK_SHELL, "sh", command],
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, log, flags, 0o600),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
                setsid=True,
                setsigmask=(),
            )
        except (OSError, NotImplementedError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            return f"could not be started: {reason}"
        return "started"

    def check(self) -> None:
        """Collect the exit status of the command if it has ended."""
        if self._pid:
            with contextlib.suppress(ChildProcessError):
                if not os.waitpid(self._pid, os.WNOHANG)[0]:
                    return
            self._pid = 0


def has_resumed(hung_ranks: HungRanks, alive: Sequence[RankProgress]) -> bool:
    """Return whether a hung rank has marked a span since the hang began.

    Ranks that were ended have not gone on, and the wait for them is not over.
    """
    hung_pids = {*hung_ranks.waiting, *hung_ranks.silent}
    return any(rank.pid in hung_pids and rank.last_ns > hung_ranks.begun_ns for rank in alive)


def read_thread_state(proc: str, pid: int) -> dict[str, Any]:
    """Read the state of a process's main thread and the kernel function it sleeps in.

    state: letter of /proc; "" = not readable. wchan: "" = none, or not readable.
    """
    fields = read_stat_fields(proc, pid)
    try:
        with open(f"{proc}/{pid}/wchan", "rb") as file:
            wchan = file.read(128).decode("ascii", "replace")
    except OSError:
        wchan = ""
    state = "" if fields is None else fields[0].decode("ascii", "replace")
    return {"pid": pid, "state": state, "wchan": "" if wchan == "0" else wchan}


def read_cpu_ns(proc: str, pid: int) -> int | None:
    """Read the user and system time of a process, ns; None if it is gone."""
    fields = read_stat_fields(proc, pid)
    return None if fields is None else (int(fields[11]) + int(fields[12])) * _TICK_NS


def read_own_file(path: Path, max_bytes: int) -> bytes:
    """Read a plain file of this user; empty if it is larger than allowed, or something else.

    Raises: OSError when it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return b""
        return file.read(max_bytes) if status.st_size <= max_bytes else b""
