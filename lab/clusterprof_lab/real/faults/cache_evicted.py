"""Data that fits the page cache but not a memory limit: each epoch reads it from disk again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from clusterprof_lab.real.faults import cgroups, disks
from clusterprof_lab.real.faults.base import Log, Options, Place, make_read_options, now_ns
from clusterprof_lab.real.faults.disk_cap import READ_BYTES, get_data_bytes
from clusterprof_lab.real.faults.memory_limit import limit_memory_to_need

CACHE_BYTES = 8 << 20


class CacheEvicted:
    """A disk as slow with the fault as without; without it everything comes from the cache.

    Records are read at random, so a read finds as large a part of them cached as the cache holds.
    """

    name = "cache-evicted"

    def why_not_here(self) -> str:
        """Return why it cannot be made here, "" when it can."""
        return disks.why_not_here() or cgroups.check_controller("memory")

    @contextmanager
    def apply(self, place: Place) -> Iterator[Options]:
        """Mount a disk with records, to be read through the cache; make a group with a limit."""
        size = max(get_data_bytes(place), 2 * CACHE_BYTES)
        with ExitStack() as stack:
            group = stack.enter_context(
                cgroups.make_group("memory", place.make_path("evicted").name)
            )
            disk = stack.enter_context(disks.mount_disk(place, self.name, size))
            data = disk.write_data("records", size, place)
            log = Log(place.make_path("cache-evicted.jsonl"))
            missed = 1.0 - CACHE_BYTES / size
            batch_bytes = place.items * READ_BYTES * place.ranks
            if place.clean:
                (disk.reach / "records").read_bytes()  # cached, and charged to us
            else:
                stack.enter_context(limit_memory_to_need(group, CACHE_BYTES))
            disk.limit("read", round(missed * batch_bytes * 1e9 / place.slowed_ns))
            start_ns = now_ns()
            options = [*make_read_options(str(data), 1, READ_BYTES), "--buffered"]
            yield Options(options, group.folder, log=log.path)
            if not place.clean:
                log.write(start_ns, now_ns(), "storage-cold-cache", cache_bytes=CACHE_BYTES)


FAULT = CacheEvicted()
