"""Another process reads from the job's disk as fast as it can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from clusterprof_lab.real.faults import disks, processes
from clusterprof_lab.real.faults.base import Log, Options, Place, now_ns, read_options
from clusterprof_lab.real.faults.disk_cap import READ_BYTES, data_bytes

NEIGHBOURS = 4
# Threads, each with one read under way past the page cache; a read leaves the interpreter free.
_READ = """
import mmap, os, random, sys, threading
size = int(sys.argv[2])
def read():
    file = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
    records, into = os.lseek(file, 0, os.SEEK_END) // size, [mmap.mmap(-1, size)]
    while True:
        os.preadv(file, into, random.randrange(records) * size)
for _ in range(int(sys.argv[3])):
    threading.Thread(target=read).start()
"""


class DiskNeighbour:
    """The disk has one speed, with and without the neighbors: first come, first served.

    Reads of equal size wait in one queue, so a rank's read waits for one of every other rank and
    every neighbor; from that the speed follows at which a batch takes as long as a slowed step.
    """

    name = "disk-neighbour"

    def why_not_here(self) -> str:
        """Return why it cannot be made here, "" when it can."""
        return disks.why_not_here()

    @contextmanager
    def apply(self, place: Place) -> Iterator[Options]:
        """Mount a disk with records and let others read it too."""
        size = data_bytes(place)
        with ExitStack() as stack:
            disk = stack.enter_context(disks.disk(place, "disk-neighbour", 2 * size))
            data = disk.put("records", size, place)
            others = disk.put("others", size, place)
            log = Log(place.path("disk-neighbour.jsonl"))
            turns = place.items * (place.ranks + NEIGHBOURS)
            disk.limit("read", turns * READ_BYTES * 1_000_000_000 // place.slowed_ns)
            start_ns = now_ns()
            if not place.clean:
                read = processes.python(_READ, str(others), str(READ_BYTES), str(NEIGHBOURS))
                stack.enter_context(processes.running(place.within(*read)))
            yield Options(read_options(str(data), 1, READ_BYTES), log=log.path)
            if not place.clean:
                log.write(start_ns, now_ns(), "storage-local", neighbours=NEIGHBOURS)


FAULT = DiskNeighbour()
