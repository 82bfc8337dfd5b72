"""Traces of PyTorch's profiler (Kineto), in Chrome's JSON.

    torch.profiler.profile(..., on_trace_ready=tensorboard_trace_handler("traces/"))
    clusterprof analyze traces/

## What is read

Files of `export_chrome_trace` and `tensorboard_trace_handler`, of PyTorch 1.8 and later, as they
are or packed with gzip, zstd or zip: the object with `traceEvents`, and the bare list of old
versions. One file is one rank, which `distributedInfo` tells, or the file's name (`rank3`,
`rank-3`, `rank_3`). NVIDIA, AMD, Intel and other devices; traces without a device; several devices
in one file.

## How it is understood

* **Busy** is a device while any of its streams runs a kernel, a copy or a memset; it is idle for
  the rest of the window. The window goes from the start of the first `ProfilerStep#` to the end of
  the last. Without these, steps end where the optimizer's do; without that, all from the first to
  the last work on the device is one step.
* **Exposed** is of a kernel of NCCL, RCCL, oneCCL, … the time in which no other kernel ran on the
  device; copies beside it hide nothing. Of two at once it counts once. Lost is idle plus exposed.
* **The host was late** in a gap of more than 1 µs when the call that launched the next work (by
  correlation id) had not ended as the gap began; of a copy between host and device, whose call
  may return only after it: had not begun. Such a gap is `starved` until that call's end, with what
  the threads that launch work did meanwhile. In other gaps work lay ready, and waited for other
  work.
* **Waits for data** are `enumerate(DataLoader)#….__next__` in the thread of the steps. What
  operators computed in it, with no worker processes, is loading.
* **Waits for the device** are synchronising calls, and copies from it whose call returned only
  after the copy. Copies to it of which the same is true are `h2d`.
* **Operations between ranks** are matched by process group and sequence number where kernels say
  them, else by their order in the group, else by their order among those of a kind on all ranks.

## Where it is blind

What a loader's worker processes did, what Python did between operators, storage, network and other
processes: nothing of these is in the file. Steps that the profiler did not record are not there.
The profiler itself slows the host: launches take longer than without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from clusterprof.importers import heap
from clusterprof.importers.base import Account, Source
from clusterprof.importers.tables import NodeTables

_LISTED = re.compile(
    rb'"cat"\s*:\s*"(?:Operator|Kernel|Runtime|Memcpy|Memset|cpu_op|kernel|cuda_runtime|'
    rb'hip_runtime|xpu_runtime|gpu_memcpy|gpu_memset|python_function|user_annotation)"'
)
_NAMED = (b'"traceEvents"', b'"deviceProperties"', b'"distributedInfo"')


class Kineto:
    """PyTorch profiler traces."""

    name: ClassVar[str] = "kineto"
    title: ClassVar[str] = "PyTorch profiler (Kineto) trace"
    together: ClassVar[bool] = False

    def recognises(self, head: bytes, path: Path) -> bool:
        """Say whether a file is one: by words that stand in all of them."""
        start = head.lstrip(b" \t\r\n\xef\xbb\xbf")[:1]
        if start == b"{":
            return any(word in head for word in _NAMED)
        return start == b"[" and _LISTED.search(head) is not None

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield the node of each file. Raises CannotImportError when one says nothing."""
        for source, account in zip(sources, accounts):
            yield _node(source, account)


def _node(source: Source, account: Account) -> NodeTables:
    from clusterprof.importers.kineto.blocks import Trace  # numpy and msgspec only when needed
    from clusterprof.importers.kineto.gather import Gathered
    from clusterprof.importers.kineto.lay import laid
    from clusterprof.importers.kineto.usual import Usual

    gathered = Gathered(account)
    trace = Trace(source, account, Usual(gathered.kinds).events)
    for events in trace.events():
        gathered.take(events)
        gathered.kinds.checked()
        del events  # before the next ones are made
    gathered.finish()
    heap.return_at_once()
    return laid(gathered, trace.document, source)
