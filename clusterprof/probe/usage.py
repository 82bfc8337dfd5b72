"""What the calling thread used of CPU and disk, exact to the microsecond."""

import resource
from time import thread_time_ns
from typing import Any, Tuple

SECTOR_BYTES = 512  # getrusage counts blocks of this size whatever the file system's own


def usage() -> Any:
    """Return the thread's resource usage as of this instant.

    getrusage alone does not count what the running thread used since its last scheduler tick, up
    to 4 ms that would look like blocked time; reading the thread's clock brings it up to date.
    """
    thread_time_ns()
    return resource.getrusage(resource.RUSAGE_THREAD)


def used_since(before: Any) -> Tuple[int, int, int]:
    """Return (user CPU ns, system CPU ns, bytes read from block devices) since `before`."""
    now = usage()
    return (
        round((now.ru_utime - before.ru_utime) * 1e9),
        round((now.ru_stime - before.ru_stime) * 1e9),
        (now.ru_inblock - before.ru_inblock) * SECTOR_BYTES,
    )
