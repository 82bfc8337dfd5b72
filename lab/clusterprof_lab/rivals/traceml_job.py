"""A training script under TraceML as its guide asks for it, without touching the script.

    traceml run traceml_job.py --nproc-per-node 2 --args SCRIPT [ARGUMENTS]

TraceML's guide for a plain loop (https://traceopt-ai.github.io/traceml/user_guide/quickstart/) adds
two lines: `traceml.init(mode="auto")`, and `with traceml.trace_step(model):` around the body of
`for batch in loader:`. Here both are put around every loop over a torch DataLoader: a step lasts
from the moment the loop has its batch until it asks for the next one. Runs in TraceML's own
environment; imports nothing of ours.
"""

from __future__ import annotations

import functools
import gc
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import traceml_ai as traceml
from torch.utils.data import DataLoader


def main() -> None:
    """Run the script named on the command line as `python SCRIPT …` would."""
    script, *arguments = sys.argv[1:]
    traceml.init(mode="auto")
    timed = DataLoader.__iter__

    def steps(loader: DataLoader) -> Iterator[Any]:
        batches = timed(loader)
        for batch in batches:
            with traceml.trace_step(find_model()):
                yield batch

    DataLoader.__iter__ = steps
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


@functools.cache
def find_model() -> torch.nn.Module:
    """Return the module that has most parameters and is no other's child; DDP's wrapper counts."""
    modules = [item for item in gc.get_objects() if issubclass(type(item), torch.nn.Module)]
    inner = {id(child) for module in modules for child in list(module.modules())[1:]}
    outer = [module for module in modules if id(module) not in inner]
    return max(outer, key=lambda module: sum(part.numel() for part in module.parameters()))


if __name__ == "__main__":
    main()
