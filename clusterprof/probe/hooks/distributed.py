"""torch.distributed: when this rank entered each collective operation, and when it left it.

The functions of distributed_c10d that a job calls are wrapped; a call from within
another wrapped function is not counted again. An asynchronous operation gives two
spans, its issue and the wait for its end (`probe.hooks.pending_work`). With a device the host
does not wait; events measure how long the default stream was idle.

When ranks hang, the recorder creates `dumps/wanted` in the run directory. The probe's thread
looks for it every two seconds and writes PyTorch's flight recorder to `dumps/<pid>.json`: the
thread that trains does not hold the interpreter lock while it waits in an operation. Only the JSON
form is used. With stack traces PyTorch would need the interpreter lock while it holds its own. A
process that uses a device is left alone: a dump asks the driver about events, and could wait for it
with the interpreter lock. NCCL's own thread dumps at its timeouts.
"""

import atexit
import functools
import os
import sys
from _thread import get_ident
from threading import main_thread
from time import monotonic_ns
from types import ModuleType
from typing import Any, Optional, Tuple

from .. import handle_error, interpreter_lock, layout, remove_own_frame, ring
from . import coalescing as hooks_coalescing
from . import cuda, other_calls, pending_work, point_to_point, process_groups
from . import wrap as hooks_wrap

# function of distributed_c10d: (operation, position of this rank's input or -1)
COLLECTIVE_FUNCTIONS = {
    "all_reduce": (layout.ALL_REDUCE, 0),
    "all_reduce_coalesced": (layout.ALL_REDUCE, 0),
    "all_gather": (layout.ALL_GATHER, 1),
    "all_gather_into_tensor": (layout.ALL_GATHER, 1),
    "all_gather_single": (layout.ALL_GATHER, 1),
    "all_gather_coalesced": (layout.ALL_GATHER, 1),
    "reduce_scatter": (layout.REDUCE_SCATTER, 1),
    "reduce_scatter_tensor": (layout.REDUCE_SCATTER, 1),
    "reduce_scatter_single": (layout.REDUCE_SCATTER, 1),
    "broadcast": (layout.BROADCAST, 0),
    "reduce": (layout.REDUCE, 0),
    "gather": (layout.GATHER, 0),
    "scatter": (layout.SCATTER, 1),
    "all_to_all": (layout.ALL_TO_ALL, 1),
    "all_to_all_single": (layout.ALL_TO_ALL, 1),
    "barrier": (layout.BARRIER, -1),
}
MESSAGE_FUNCTIONS = {
    "send": layout.SEND,
    "isend": layout.SEND,
    "recv": layout.RECV,
    "irecv": layout.RECV,
}
ABSENT = 99  # a position beyond those of any call
LOOK_NS = 2_000_000_000
"""Time between two looks for the recorder's wish, ns."""
MAX_DUMP_BYTES = 16 << 20
MAX_EXIT_DUMP_BYTES = 4 << 20
"""Of a dump at the end of a process, which waits in memory for the recorder: 2,000 operations, as
`record` sets it, need about 1 MB."""
_DUMPS, _WANTED, _AT_EXIT = "dumps", "wanted", "at-exit"
_OLD_NAMES = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
"""Names of variables since PyTorch 2.9, and before."""

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]


def install(module: ModuleType) -> bool:
    """Wrap the functions here and, if already imported there, under torch.distributed."""
    c10d: Any = module
    c10d._world.default_pg, c10d._world.pg_group_ranks  # noqa: B018 - needed to identify groups
    for name, (operation, input_at) in COLLECTIVE_FUNCTIONS.items():
        original = getattr(c10d, name, None)
        if original is not None and not hasattr(original, "_is_clusterprof"):
            _replace_function(
                c10d, name, original, wrap_collective(c10d, original, operation, input_at)
            )
    for name, operation in MESSAGE_FUNCTIONS.items():
        original = getattr(c10d, name, None)
        if original is not None:
            begin = point_to_point.make_message_reader(c10d, original, operation)
            _replace_function(c10d, name, original, other_calls.wrap_call(original, begin))
    # The method, not the function of this name, which warns with its caller's line.
    group_class = c10d.ProcessGroup
    original = group_class.monitored_barrier
    group_class.monitored_barrier = other_calls.wrap_call(original, _make_barrier_reader(c10d))
    c10d.Work.wait = pending_work.wrap_wait(c10d.Work.wait)
    manager = c10d._coalescing_manager
    if not hasattr(manager, "_is_clusterprof"):
        _replace_function(
            c10d, "_coalescing_manager", manager, hooks_coalescing.wrap_manager(c10d, manager)
        )
    set_old_names(str(getattr(sys.modules.get("torch"), "__version__", "")))
    if write_wanted_dump not in interpreter_lock.on_look:
        interpreter_lock.on_look.append(write_wanted_dump)
        atexit.register(write_exit_dump, os.getpid())
    return True


def set_old_names(version: str) -> None:
    """Set the variables of the flight recorder for a PyTorch before 2.9.

    A later one warns of the old names in the output of the job.
    """
    numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    if len(numbers) == 2 and numbers < [2, 9]:
        for name, old_name in _OLD_NAMES.items():
            if name in os.environ:
                os.environ.setdefault(old_name, os.environ[name])


def _replace_function(c10d: Any, name: str, original: Any, wrapper: Any) -> None:
    wrapper._is_clusterprof = True
    setattr(c10d, name, wrapper)
    public = sys.modules.get("torch.distributed")
    if getattr(public, name, None) is original:
        setattr(public, name, wrapper)


def wrap_collective(c10d: Any, original: Any, operation: int, input_at: int) -> Any:
    """Wrap one collective, all in one function: with cold caches each further call costs 1 µs."""
    group_at, async_at, source_at, input_name = _locate_arguments(original, operation, input_at)
    world, inside, find = c10d._world, other_calls.active_threads, process_groups.find_group
    coalescing, by_object = getattr(world, "pg_coalesce_state", {}), process_groups.by_object
    tensor, sum_bytes = other_calls.get_tensor_class(), other_calls.sum_tensor_bytes
    collective, issue_code = layout.COLLECTIVE, operation | layout.ISSUE << layout.FORM_SHIFT

    @functools.wraps(original)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        if hooks_wrap.is_traced():
            return original(*arguments, **keywords)
        start, mark, group, by = 0, None, None, 0
        try:
            thread = get_ident()
            if _probe.on and thread not in inside and not hooks_wrap.compiler._is_compiling_flag:  # type: ignore[attr-defined]
                count = len(arguments)
                members = arguments[group_at] if count > group_at else keywords.get("group")
                members = world.default_pg if members is None else members
                entry = by_object.get(id(members))
                group = entry[1] if entry and entry[0]() is members else find(c10d, members)
            if group is not None:
                size, code, by = 0, operation, _get_caller_flag(thread)
                if input_name:
                    tensors = arguments[input_at] if count > input_at else keywords.get(input_name)
                    single = tensors if type(tensors) is tensor else None
                    size = single.nbytes if single is not None else sum_bytes(tensors)
                if source_at != ABSENT:
                    size = _get_broadcast_bytes(size, group, source_at, arguments, keywords)
                if coalescing and hooks_coalescing.append_to_batch(operation, size, group):
                    group = None
                elif arguments[async_at] if count > async_at else keywords.get("async_op"):
                    code = issue_code
                elif hooks_wrap.cuda._initialized or cuda.accelerator is not None:
                    mark = cuda.begin_wait(cuda.MAX_PENDING_COLLECTIVES, default_stream=True)
            if group is not None:
                b = next(group.operations)
                inside.add(thread)
                start = ring.enter(group.number, b, size, code | by)
        except BaseException as error:
            handle_error(error)
        try:
            result = original(*arguments, **keywords)
        except BaseException as error:
            if start:
                inside.discard(thread)
            remove_own_frame(error)
            raise
        if start and group is not None:
            try:
                end = monotonic_ns()
                inside.discard(thread)
                sequence = ring.emit(collective, start, end, group.number, b, size, code | by)
                if mark is not None or (code != operation and result is not None):
                    _watch_completion(group, b, size, code, result, mark, sequence, start, end)
            except BaseException as error:
                handle_error(error)
        return result

    return wrapper


def _get_caller_flag(thread: int) -> int:
    return 0 if thread == main_thread().ident else layout.OTHER_THREAD


def _locate_arguments(original: Any, operation: int, input_at: int) -> Tuple[int, int, int, str]:
    """Return the positions of group, async_op and src in this version, and the input's name."""
    names = other_calls.list_argument_names(original)
    async_at = names.index("async_op") if "async_op" in names else ABSENT
    source_at = names.index("src") if operation == layout.BROADCAST else ABSENT
    return names.index("group"), async_at, source_at, names[input_at] if input_at >= 0 else ""


def _watch_completion(
    group: process_groups.Group,
    b: int,
    size: int,
    code: int,
    result: Any,
    mark: cuda.WaitMark,
    sequence: int,
    start: int,
    end: int,
) -> None:
    """Watch for a later end: the device's part of a wait, or an operation only issued."""
    if mark is not None:
        cuda.finish_wait(mark, sequence, start, end, layout.EXPOSED_COLLECTIVE)
    else:
        pending_work.register_work(result, group.number, b, size, code)


def _get_broadcast_bytes(
    size: int, group: process_groups.Group, position: int, arguments: Any, keywords: Any
) -> int:
    """Return the bytes that this rank contributes to a broadcast: 0 for receivers."""
    return (
        size
        if point_to_point.find_peer(group, position, "src", arguments, keywords) == group.rank
        else 0
    )


def _make_barrier_reader(c10d: Any) -> other_calls.CallReader:
    def begin(arguments: Any, keywords: Any) -> Optional[other_calls.PendingCall]:
        thread = get_ident()
        group = (
            process_groups.find_group(c10d, arguments[0])
            if thread not in other_calls.active_threads
            else None
        )
        if group is None:
            return None
        b = next(group.operations)
        other_calls.active_threads.add(thread)
        start = ring.enter(group.number, b, 0, layout.BARRIER)
        return thread, group, b, 0, layout.BARRIER, None, start

    return begin


_looked_ns = 0
_handled_ns = 0


def write_wanted_dump(now_ns: int) -> None:
    """Write a dump if the recorder wants it and has not got it; gives the interpreter lock away.

    now_ns: CLOCK_MONOTONIC. Every error is ignored: the recording then has no dump of this process.
    """
    global _looked_ns, _handled_ns
    if now_ns - _looked_ns < LOOK_NS:
        return
    _looked_ns = now_ns
    try:
        folder = _probe.run_dir + "/" + _DUMPS
        wanted_ns = os.stat(folder + "/" + _WANTED).st_mtime_ns
        if wanted_ns == _handled_ns:
            return
        _handled_ns = wanted_ns
        data = _read_flight_recorder()
        if data and len(data) <= MAX_DUMP_BYTES:
            _write_dump(folder, "%d.json" % os.getpid(), data)
    except Exception:
        pass


def write_exit_dump(pid: int) -> None:
    """Write a dump as the process ends, if a recorder is there to take it.

    pid: of the process that registered this; a child that it forked writes none. Every error is
    ignored: the recording then has no dump of this process.
    """
    try:
        folder = _probe.run_dir + "/" + _DUMPS
        if os.getpid() != pid or not _probe.on or not os.path.exists(folder + "/" + _AT_EXIT):
            return
        data = _read_flight_recorder()
        if data and len(data) <= MAX_EXIT_DUMP_BYTES:
            _write_dump(folder, "%d.exit.json" % pid, data)
    except Exception:
        pass


def _read_flight_recorder() -> bytes:
    """Return the operations of this process as JSON; empty if there are none."""
    module = sys.modules.get("torch._C._distributed_c10d")
    function = getattr(module, "_dump_fr_trace_json", None)
    uses_device = hooks_wrap.cuda._initialized or cuda.accelerator is not None
    if function is None or uses_device:
        return b""
    data = bytes(function())
    return data if b'"profiling_name"' in data else b""


def _write_dump(folder: str, name: str, data: bytes) -> None:
    path = folder + "/" + name
    temporary = path + ".tmp"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        while data:
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)
    os.rename(temporary, path)
