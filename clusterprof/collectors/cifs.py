"""What every mounted CIFS share was asked, how long its server took, and what waits to be sent.

Columns: per share its bytes, and per "<share>:<OP>" its requests (READ and WRITE always, others
once they have happened); the share goes by its mount point where it is mounted once, else as
"//server/share". Per server the requests that are not answered, those that wait for a credit, and
the credits left; per "<server>:<OP>" the time of its requests, where the kernel was built to keep
it (CONFIG_CIFS_STATS2), in steps of a jiffy. Nothing here touches the server.

## Source

`/proc/fs/cifs/{Stats,DebugData}` (docs.kernel.org/admin-guide/cifs/usage).

## Privilege

None; times need a kernel built with CONFIG_CIFS_STATS2.

## Cost

Two reads once a second, which grow with shares, and with sessions and open files.

## Where it is blind

Which of a server's shares waited, where it has several: queues and times are the server's. Times
come in steps of a jiffy (1 to 10 ms).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from clusterprof import signals
from clusterprof.collectors.base import Context, Value
from clusterprof.errors import DevicesChanged, Unavailable
from clusterprof.linux import cifs
from clusterprof.linux.held import LONG_RECORDS, HeldFile, hold, read_once
from clusterprof.signals import Signal

_BYTES: tuple[Signal, ...] = (signals.CIFS_READ_BYTES, signals.CIFS_WRITE_BYTES)
_QUEUE: tuple[Signal, ...] = (
    signals.CIFS_CREDITS,
    signals.CIFS_IN_FLIGHT,
    signals.CIFS_WAITING,
)
_ALWAYS = ("READ", "WRITE")
_WRAP = 1 << 32
_INT64 = 1 << 63
_NO_TIME = Unavailable("absent", "the kernel was built without CONFIG_CIFS_STATS2", "")
_NOT_WRITTEN = Unavailable("absent", "the kernel does not write it for this share", "")


class CifsCollector:
    """Bytes and requests of every CIFS share, and the queue and time of its server."""

    name: ClassVar[str] = "cifs"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 1_000_000_000

    def __init__(self, context: Context) -> None:
        self._context = context

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open Stats and DebugData, and find the shares and where they are mounted."""
        folder = self._context.roots.proc / "fs/cifs"
        pids = self._context.job_pids()
        self._pid = pids[0] if pids else None
        try:
            self._stats = HeldFile(folder / "Stats", longest_record=LONG_RECORDS)
        except Unavailable as why:
            if why.kind == "absent":
                raise Unavailable("absent", "no CIFS file system is mounted", "") from None
            raise
        self._debug = hold(folder / "DebugData", longest_record=LONG_RECORDS)
        self._points = cifs.points(self._mountinfo())
        self._turns: dict[str, tuple[int, int]] = {}
        now = self._now()
        if not now:
            self.close()
            raise Unavailable("absent", "no CIFS file system is mounted", "")
        self._columns = list(now)
        return self._columns

    def sample(self) -> Sequence[Value]:
        """Return bytes and requests since each share was mounted, and the queues of now."""
        if self._pid is None and self._context.job_pids():
            raise DevicesChanged  # the job may have it mounted elsewhere than we
        now = self._now()
        if list(now) != self._columns:
            raise DevicesChanged
        return list(now.values())

    def close(self) -> None:
        """Close both files."""
        self._stats.close()
        self._debug.close()

    def _now(self) -> dict[tuple[Signal, str], Value]:
        values: dict[tuple[Signal, str], Value] = {}
        names: list[str] = []
        for number, server in enumerate(cifs.parse_stats(self._stats.read())):
            shares = [share for share in server.shares if not share.name.endswith("/IPC$")]
            for share in shares:
                self._share(values, share, number)
            if shares:
                names.append(shares[0].name.split("/")[2])
                self._time(values, names[-1], server)
        if values:
            self._queues(values, names)
        return values

    def _share(
        self, values: dict[tuple[Signal, str], Value], share: cifs.Share, number: int
    ) -> None:
        points = self._points.get(share.name.lower(), [])
        device = points[0] if len(points) == 1 else share.name
        for signal, total in zip(_BYTES, (share.read_bytes, share.write_bytes)):
            _add(values, signal, device, total)
        for operation in sorted({*_ALWAYS, *(o for o, n in share.operations.items() if n)}):
            key = f"{number} {share.name}:{operation}"
            count = self._unwrapped(key, share.operations.get(operation, 0))
            _add(values, signals.CIFS_OPS, f"{device}:{operation}", count)

    def _unwrapped(self, key: str, value: int) -> int:
        """A count of 32 bits that began anew goes on; one that was cleared begins at zero."""
        last, turned = self._turns.get(key, (0, 0))
        if value < last:
            turned = turned + _WRAP if last - value > _WRAP // 2 else 0
        self._turns[key] = value, turned
        return value + turned

    def _time(
        self, values: dict[tuple[Signal, str], Value], name: str, server: cifs.Server
    ) -> None:
        for operation in sorted({*_ALWAYS, *(o for o, ns in server.time_ns.items() if ns)}):
            ns = server.time_ns.get(operation, 0) if server.keeps_time else None
            _add(values, signals.CIFS_OP_TIME, f"{name}:{operation}", ns, _NO_TIME)

    def _queues(self, values: dict[tuple[Signal, str], Value], names: Sequence[str]) -> None:
        try:
            queues = cifs.parse_debug(self._debug.read())
        except Unavailable as why:
            values.update({(signal, name): why for name in names for signal in _QUEUE})
            return
        for queue in queues:
            numbers = (queue.credits, queue.in_flight, queue.waiting)
            for signal, number in zip(_QUEUE, numbers):
                _add(values, signal, queue.server, number)

    def _mountinfo(self) -> bytes:
        for pid in (self._pid, "self"):
            try:
                return read_once(self._context.roots.proc / str(pid) / "mountinfo")
            except Unavailable:
                continue  # not ours to look into, or gone: our own view is the second best
        return b""


def _add(
    values: dict[tuple[Signal, str], Value],
    signal: Signal,
    device: str,
    number: int | None,
    why: Unavailable = _NOT_WRITTEN,
) -> None:
    """Enter a number; a share or server that is there twice is added up."""
    before = values.get((signal, device), 0)
    if number is None or isinstance(before, Unavailable):
        values[signal, device] = why if number is None else before
        return
    value = before + number
    too_large = Unavailable("failed", "the kernel's counter does not fit 63 bits", "")
    values[signal, device] = value if value < _INT64 else too_large
