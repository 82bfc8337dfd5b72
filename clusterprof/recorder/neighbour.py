"""Good manners of the recorder's process: where it stands when the machine is short of something.

SCHED_BATCH at nice 0 (a niced sampler wakes a third of a second late on a full machine, a batch
one 8 ms), first in line for the OOM killer, a bounded address space, no collector of garbage.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource

OOM_SCORE_ADJUST = 500
ADDRESS_SPACE_BYTES = 512 << 20


def settle() -> None:
    """Apply all of it to this process; what the system refuses is left as it is."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        # A launcher may have bound the rank that started us to cores of its own; stay off them
        # if there is any other. The kernel cuts the set down to what the cgroup allows.
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


def bound_memory() -> None:
    """Bound the address space; only the soft limit, so that a helper with a driver may widen it."""
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, hard))


def freeze() -> None:
    """Take what start-up has built out of the garbage collector's sight, and switch it off.

    The loop makes no cycles; what exceptions tie up is collected once a minute by `collect`.
    """
    gc.collect()
    gc.freeze()
    gc.disable()


def collect() -> None:
    """Collect the few cycles that exceptions have left."""
    gc.collect()
