"""A local disk with few bytes per second, all the time or in turn with other nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from clusterprof_lab.real.faults import disks
from clusterprof_lab.real.faults.base import Log, Options, Place, make_read_options, now_ns

DATA_MB = 64
READ_BYTES = 327_680
_CAUSE = "storage-local"


def get_data_bytes(place: Place) -> int:
    """Return the size of the data set: `data_mb` of the scenario, or 64 MiB."""
    return round(place.get_number("data_mb", DATA_MB)) << 20


class DiskCap:
    """Reads of a node's disk are limited so that a batch takes as long to read as a slowed step.

    With `period_s` and `turns` of the scenario the limit wanders: of so many nodes (`nodes`), each
    has the slow disk for a period in its turn, `turn`.
    """

    name = "disk-cap"

    def why_not_here(self) -> str:
        """Return why no disk can be capped here, "" when one can."""
        return disks.why_not_here()

    @contextmanager
    def apply(self, place: Place) -> Iterator[Options]:
        """Mount a slow disk with records; reads go past the page cache."""
        with disks.mount_disk(place, "disk-cap", get_data_bytes(place)) as disk:
            data = disk.write_data("records", get_data_bytes(place), place)
            log = Log(place.make_path("disk-cap.jsonl"))
            batch_bytes = place.items * READ_BYTES * place.ranks
            rate = 0 if place.clean else batch_bytes * 1_000_000_000 // place.slowed_ns
            options = Options(make_read_options(str(data), 1, READ_BYTES), log=log.path)
            if "period_s" in place.options and not place.clean:
                with _move_slow_disk(place, disk, log, rate):
                    yield options
                return
            start_ns = now_ns()
            disk.limit("read", rate)
            yield options
            if rate:
                log.write(start_ns, now_ns(), _CAUSE, bytes_per_second=rate)


@contextmanager
def _move_slow_disk(place: Place, disk: disks.Disk, log: Log, rate: int) -> Iterator[None]:
    period_ns = round(place.get_number("period_s", 4.0) * 1e9)
    turns = int(place.options.get("turns", max(len(place.nodes), 1)))
    names = [node.name for node in place.nodes]
    own = names.index(place.node.name) if place.node is not None and names else 0
    turn = int(place.options.get("turn", own))
    over = threading.Event()

    def wander() -> None:
        start_ns = 0  # of our turn; 0 = it is another's
        while True:
            now = time.monotonic_ns()
            ours = not over.is_set() and now // period_ns % turns == turn
            if ours != bool(start_ns):
                disk.limit("read", rate if ours else 0)
                if not ours:
                    log.write(start_ns, now_ns(), _CAUSE, bytes_per_second=rate)
                start_ns = now if ours else 0
            if over.is_set():
                return
            over.wait((period_ns - now % period_ns) / 1e9)

    thread = threading.Thread(target=wander)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


FAULT = DiskCap()
