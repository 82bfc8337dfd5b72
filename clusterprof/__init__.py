"""clusterprof: says why the GPUs of a training cluster idle.

Nothing here is needed to record a job. For those who want exact marks there are two words:

    import clusterprof

    for batch in batches:
        with clusterprof.span("augment"):
            batch = augment(batch)
        train_on(batch)
        clusterprof.step()

Both do nothing, in well under a microsecond, when nobody records.
"""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager

__all__ = ["__version__", "span", "step"]

__version__ = "0.1.0"

_PROBE = "_clusterprof_probe"  # the name under which a recorded process carries the probe
_nothing = contextlib.nullcontext()

if _PROBE in sys.modules:
    sys.modules[_PROBE].prepare()


def step() -> None:
    """Mark the end of one optimizer step of this process.

    From the first mark on, steps are what you mark, and no longer what the optimizers do.
    """
    probe = sys.modules.get(_PROBE)
    if probe is not None:
        probe.step()


def span(name: str) -> AbstractContextManager[None]:
    """Return a context manager that records what this process does inside it as `name`.

    name: up to 48 bytes of UTF-8, at most 64 different ones in a process. The names data_wait,
    forward, backward, collective, eval, compile, checkpoint and h2d mean these phases; fetch is
    for the worker of a loader of your own: how one batch was made, its CPU time and reads too.
    """
    probe = sys.modules.get(_PROBE)
    if probe is None:
        return _nothing
    return probe.span(name) or _nothing
