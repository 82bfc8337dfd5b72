"""clusterprof: explains why the GPUs of a training cluster are idle.

Nothing in this module is needed to record a job. Two functions add exact marks:

    import clusterprof

    for batch in batches:
        with clusterprof.span("augment"):
            batch = augment(batch)
        train_on(batch)
        clusterprof.step()

Without a recorder both do nothing, in well under a microsecond.

`analyze` analyzes a recording, as the command of this name does, and `gate` judges it. They need
numpy, and are therefore imported when they are first used (clusterprof.api):

    report = clusterprof.analyze("clusterprof-out/job-77")
    for finding in report.findings:
        print(finding.cause.id, finding.lost_ns / 1e9)
"""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager

TYPE_CHECKING = False  # known to type checkers under this name; `typing` need not be imported
if TYPE_CHECKING:
    from clusterprof.api import RunReport, analyze, record

__all__ = ["RunReport", "__version__", "analyze", "gate", "record", "span", "step"]

__version__ = "0.1.0"

_PROBE_MODULE = "_clusterprof_probe"  # the name of the probe module in a recorded process
_NULL_CONTEXT = contextlib.nullcontext()

if _PROBE_MODULE in sys.modules:
    sys.modules[_PROBE_MODULE].prepare()


def step(number: int = -1) -> None:
    """Mark the end of one optimizer step of this process.

    From the first mark on, steps are counted by these marks instead of by optimizer calls.
    number: the job's own number of this step, which goes on after a restart from a checkpoint. The
    report can then tell which steps were done twice. -1 = not stated.
    """
    probe = sys.modules.get(_PROBE_MODULE)
    if probe is not None:
        probe.step(number)


def span(name: str) -> AbstractContextManager[None]:
    """Return a context manager that records the enclosed work of this process as a span
    `name`.

    name: up to 48 bytes of UTF-8, at most 64 different names in a process. The names
    data_wait, forward, backward, collective, eval, compile, checkpoint and h2d mean these
    phases; fetch is for the worker process of a custom data loader: it records how one
    batch was made, with its CPU time and reads.
    """
    probe = sys.modules.get(_PROBE_MODULE)
    if probe is None:
        return _NULL_CONTEXT
    return probe.span(name) or _NULL_CONTEXT


def __getattr__(name: str) -> object:
    """Import `analyze`, `gate`, `record` and `RunReport` when they are first used (PEP 562).

    Raises: AttributeError for any other name.
    """
    if name not in ("analyze", "gate", "record", "RunReport"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    if name == "gate":
        return importlib.import_module("clusterprof.gate")  # a package that can be called
    globals()[name] = getattr(importlib.import_module("clusterprof.api"), name)
    return globals()[name]
