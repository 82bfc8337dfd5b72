"""Data is read for the first time: nothing of it is in the page cache, and it is kept out."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clusterprof_lab.real.faults import disks
from clusterprof_lab.real.faults.base import Log, Options, Place, make_read_options, now_ns
from clusterprof_lab.real.faults.disk_cap import READ_BYTES, get_data_bytes

_EVERY_S = 0.2


class Cold:
    """Drops what was read of the file with `posix_fadvise`; the disk is equally slow with and
    without the fault."""

    name = "cold"

    def why_not_here(self) -> str:
        """Return why it cannot be made here, "" when it can."""
        return disks.why_not_here()

    @contextmanager
    def apply(self, place: Place) -> Iterator[Options]:
        """Mount a disk with records, to be read through the cache."""
        with disks.mount_disk(place, self.name, get_data_bytes(place)) as disk:
            data = disk.write_data("records", get_data_bytes(place), place)
            log = Log(place.make_path("cold.jsonl"))
            batch_bytes = place.items * READ_BYTES * place.ranks
            disk.limit("read", batch_bytes * 1_000_000_000 // place.slowed_ns)
            options = Options(
                [*make_read_options(str(data), 1, READ_BYTES), "--buffered"], log=log.path
            )
            start_ns = now_ns()
            if place.clean:
                disk.limit("read", 0)
                (disk.reach / "records").read_bytes()
                yield options
                return
            with _drop_cache_repeatedly(disk.reach / "records"):
                yield options
            log.write(start_ns, now_ns(), "storage-cold-cache")


@contextmanager
def _drop_cache_repeatedly(path: Path) -> Iterator[None]:
    over = threading.Event()
    file = os.open(path, os.O_RDONLY)

    def forget() -> None:
        while not over.wait(_EVERY_S):
            disks.drop_page_cache(file)

    thread = threading.Thread(target=forget)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        os.close(file)


FAULT = Cold()
