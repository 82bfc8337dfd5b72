"""Another process reads from the job's disk as fast as it can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from clusterprof_lab.real.faults import disks, processes
from clusterprof_lab.real.faults.base import Log, Options, Place, make_read_options, now_ns
from clusterprof_lab.real.faults.disk_cap import READ_BYTES, get_data_bytes

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
        size = get_data_bytes(place)
        with ExitStack() as stack:
            disk = stack.enter_context(disks.mount_disk(place, "disk-neighbour", 2 * size))
            data = disk.write_data("records", size, place)
            others = disk.write_data("others", size, place)
            log = Log(place.make_path("disk-neighbour.jsonl"))
            turns = place.items * (place.ranks + NEIGHBOURS)
            disk.limit("read", turns * READ_BYTES * 1_000_000_000 // place.slowed_ns)
            start_ns = now_ns()
            if not place.clean:
                read = processes.make_python_command(
                    _READ, str(others), str(READ_BYTES), str(NEIGHBOURS)
                )
                stack.enter_context(processes.keep_running(place.make_node_command(*read)))
            yield Options(make_read_options(str(data), 1, READ_BYTES), log=log.path)
            if not place.clean:
                log.write(start_ns, now_ns(), "storage-local", neighbours=NEIGHBOURS)


FAULT = DiskNeighbour()
