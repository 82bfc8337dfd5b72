"""Functional collectives: torch.ops._c10d_functional, whoever calls it while nothing is compiled.

Such an operation returns a tensor, and who needs its values waits with `wait_tensor`: two spans,
found together by where the values lie in memory. The operators stay the objects they are; what each
calls in the end is replaced by something that looks the same to all who ask. Compiled code calls
their overloads, and is not seen.
"""

import sys
from _thread import get_ident
from time import monotonic_ns
from types import ModuleType
from typing import Any, Dict, List, Tuple

from .. import failed, layout, ring, without_our_frame
from . import calls, cuda, groups, seam

WAITS_AT_MOST = 512  # results under way whose wait we would recognise
NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")
OPERATORS = {
    "all_reduce": layout.ALL_REDUCE,
    "all_reduce_": layout.ALL_REDUCE,
    "all_reduce_coalesced": layout.ALL_REDUCE,
    "all_reduce_coalesced_": layout.ALL_REDUCE,
    "all_gather_into_tensor": layout.ALL_GATHER,
    "all_gather_into_tensor_out": layout.ALL_GATHER,
    "all_gather_into_tensor_coalesced": layout.ALL_GATHER,
    "reduce_scatter_tensor": layout.REDUCE_SCATTER,
    "reduce_scatter_tensor_out": layout.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": layout.REDUCE_SCATTER,
    "all_to_all_single": layout.ALL_TO_ALL,
    "broadcast": layout.BROADCAST,
    "broadcast_": layout.BROADCAST,
}

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]
Under = Tuple[List[int], int, int, int, int]  # where the results lie, a, b, c, d
_under_way: Dict[int, Under] = {}  # by where a result lies, oldest first
_waited_ns = 0  # when the last wait ended


def install(module: ModuleType) -> bool:
    """Put our own function behind each operator that this version has."""
    torch = sys.modules["torch"]
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    eager = {torch.Tensor, torch.nn.Parameter, module.AsyncCollectiveTensor}  # type: ignore[attr-defined]
    c10d._resolve_process_group  # noqa: B018 - or the names of groups mean nothing
    for name in NAMESPACES:
        operators = getattr(torch.ops, name)  # type: ignore[attr-defined]
        for function, operation in OPERATORS.items():
            if hasattr(operators, function):
                packet = getattr(operators, function)
                schema = packet.default._schema.arguments
                group_at = [one.name for one in schema].index("group_name")
                _put(packet, _Issue(packet._op, c10d, operation, group_at, eager))
    packet = torch.ops._c10d_functional.wait_tensor  # type: ignore[attr-defined]
    _put(packet, _Wait(packet._op, eager))
    return True


def _put(packet: Any, ours: Any) -> None:
    if isinstance(packet._op, _Operator):
        return
    # TorchScript knows functions by their id.
    builtins = sys.modules["torch.jit._builtins"]
    builtins._register_builtin(ours, packet._qualified_op_name)
    packet._op = ours


class _Operator:
    """Stands for the function that an operator calls: the same hash, the same attributes."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __hash__(self) -> int:
        return hash(self.original)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.original

    def __repr__(self) -> str:
        return repr(self.original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


class _Issue(_Operator):
    """An operation is begun; when the caller goes on, its result is not there yet."""

    def __init__(self, original: Any, c10d: Any, operation: int, group_at: int, eager: Any) -> None:
        super().__init__(original)
        self._c10d = c10d
        self._operation = operation
        self._group_at = group_at
        self._eager = eager  # types of tensors that are real; others are traced
        self._named: Dict[str, Any] = {}

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        call = None
        try:
            if _probe.on:  # type: ignore[attr-defined]
                call = self._begin(arguments, keywords)
        except BaseException as error:
            failed(error)
        try:
            result = self.original(*arguments, **keywords)
        except BaseException as error:
            if call is not None:
                calls.inside.discard(call[0])
            without_our_frame(error)
            raise
        if call is not None:
            try:
                self._issued(call, monotonic_ns(), result)
            except BaseException as error:
                failed(error)
        return result

    def _begin(self, arguments: Any, keywords: Any) -> "calls.Call | None":
        thread = get_ident()
        if thread in calls.inside or not arguments or seam.compiler._is_compiling_flag:
            return None
        brought = arguments[0]
        first = brought[0] if type(brought) is list and brought else brought
        if type(first) not in self._eager:
            return None
        at = self._group_at
        named = arguments[at] if len(arguments) > at else keywords.get("group_name")
        if isinstance(named, str):
            named = self._c10d._resolve_process_group(named)
        group = groups.find(self._c10d, named) if named is not None else None
        if group is None:
            return None
        size = calls.bytes_of(brought)
        if self._operation == layout.BROADCAST:
            source = arguments[1] if len(arguments) > 1 else keywords.get("src")
            size = size if group.rank == group.global_rank(source) else 0
        b = next(group.operations)
        calls.inside.add(thread)
        d = self._operation | layout.ISSUE << layout.FORM_SHIFT
        return thread, group, b, size, d, None, ring.enter(group.number, b, size, d)

    def _issued(self, call: calls.Call, end: int, result: Any) -> None:
        thread, group, b, size, d, _, start = call
        calls.inside.discard(thread)
        # What it brings may be the result of another: the wait for that comes first.
        ring.emit(layout.COLLECTIVE, max(start, _waited_ns), end, group.number, b, size, d)
        if len(_under_way) >= WAITS_AT_MOST:
            for key in list(_under_way)[: WAITS_AT_MOST // 4]:  # nobody waits for these any more
                _under_way.pop(key, None)
        places = [_place(one) for one in result] if type(result) is list else [_place(result)]
        waits = d + (layout.WAIT - layout.ISSUE << layout.FORM_SHIFT)
        for place in places:
            if place:
                _under_way.pop(place, None)  # the oldest first, also when memory is used again
                _under_way[place] = (places, group.number, b, size, waits)


class _Wait(_Operator):
    """The caller needs a result; of those of one operation the first that is needed counts."""

    def __init__(self, original: Any, eager: Any) -> None:
        super().__init__(original)
        self._eager = eager

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        known = None
        mark = None
        start = 0
        try:
            ready = arguments and _under_way and _probe.on and not seam.compiler._is_compiling_flag  # type: ignore[attr-defined]
            if ready and type(arguments[0]) in self._eager:
                known = _under_way.get(_place(arguments[0]))
                if known is not None:
                    for place in known[0]:
                        _under_way.pop(place, None)
                    mark = cuda.before_wait(cuda.COLLECTIVES, default_stream=True)
                    start = ring.enter(*known[1:])
        except BaseException as error:
            failed(error)
        try:
            result = self.original(*arguments, **keywords)
        except BaseException as error:
            without_our_frame(error)
            raise
        try:
            if start and known is not None:
                _waited(known, start, monotonic_ns(), mark)
        except BaseException as error:
            failed(error)
        return result


def _waited(known: Under, start: int, end: int, mark: cuda.Mark) -> None:
    global _waited_ns
    _waited_ns = end
    sequence = ring.emit(layout.COLLECTIVE, start, end, *known[1:])
    cuda.after_wait(mark, sequence, start, end, layout.EXPOSED_COLLECTIVE)


def _place(tensor: Any) -> int:
    """Return where the values of a tensor lie; 0 when it has none of its own."""
    try:
        return int(tensor.data_ptr())
    except RuntimeError:
        return 0  # a tensor that is traced, or stands for many


ring.after_fork.append(_under_way.clear)
