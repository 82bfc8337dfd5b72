"""Functional collectives: calls of torch.ops._c10d_functional outside compiled code.

The operation returns a tensor, and the caller waits with `wait_tensor` before using its
values: two spans, matched by the memory address of the values. The operator objects
stay unchanged; the function that each calls is replaced by an object that looks
identical. Compiled code calls their overloads and is not recorded.
"""

import sys
from _thread import get_ident
from time import monotonic_ns
from types import ModuleType
from typing import Any, Dict, List, Tuple

from .. import handle_error, layout, remove_own_frame, ring
from . import cuda, other_calls, process_groups, wrap

MAX_PENDING_RESULTS = 512  # pending results whose wait can be recognized
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
PendingOperation = Tuple[List[int], int, int, int, int]  # addresses of the results, then a, b, c, d
_pending: Dict[int, PendingOperation] = {}  # by address of a result, oldest first
_waited_ns = 0  # end of the last wait


def install(module: ModuleType) -> bool:
    """Replace the function behind each operator that this version has."""
    torch = sys.modules["torch"]
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    eager = {torch.Tensor, torch.nn.Parameter, module.AsyncCollectiveTensor}  # type: ignore[attr-defined]
    c10d._resolve_process_group  # noqa: B018 - needed to resolve group names
    for name in NAMESPACES:
        operators = getattr(torch.ops, name)  # type: ignore[attr-defined]
        for function, operation in OPERATORS.items():
            if hasattr(operators, function):
                packet = getattr(operators, function)
                schema = packet.default._schema.arguments
                group_at = [argument.name for argument in schema].index("group_name")
                _install_operator(
                    packet, _IssueOperator(packet._op, c10d, operation, group_at, eager)
                )
    packet = torch.ops._c10d_functional.wait_tensor  # type: ignore[attr-defined]
    _install_operator(packet, _WaitOperator(packet._op, eager))
    return True


def _install_operator(packet: Any, operator: Any) -> None:
    if isinstance(packet._op, _Operator):
        return
    # TorchScript identifies functions by their id.
    builtins = sys.modules["torch.jit._builtins"]
    builtins._register_builtin(operator, packet._qualified_op_name)
    packet._op = operator


class _Operator:
    """Replaces the function that an operator calls, with an equal hash and attributes."""

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


class _IssueOperator(_Operator):
    """Begins an operation; when the call returns, its result is not complete yet."""

    def __init__(self, original: Any, c10d: Any, operation: int, group_at: int, eager: Any) -> None:
        super().__init__(original)
        self._c10d = c10d
        self._operation = operation
        self._group_at = group_at
        self._eager = eager  # types of real tensors; others are traced
        self._named: Dict[str, Any] = {}

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        call = None
        try:
            if _probe.on:  # type: ignore[attr-defined]
                call = self._begin(arguments, keywords)
        except BaseException as error:
            handle_error(error)
        try:
            result = self.original(*arguments, **keywords)
        except BaseException as error:
            if call is not None:
                other_calls.active_threads.discard(call[0])
            remove_own_frame(error)
            raise
        if call is not None:
            try:
                self._record_issue(call, monotonic_ns(), result)
            except BaseException as error:
                handle_error(error)
        return result

    def _begin(self, arguments: Any, keywords: Any) -> "other_calls.PendingCall | None":
        thread = get_ident()
        if (
            thread in other_calls.active_threads
            or not arguments
            or wrap.compiler._is_compiling_flag
        ):
            return None
        input_tensors = arguments[0]
        first = input_tensors[0] if type(input_tensors) is list and input_tensors else input_tensors
        if type(first) not in self._eager:
            return None
        position = self._group_at
        process_group = (
            arguments[position] if len(arguments) > position else keywords.get("group_name")
        )
        if isinstance(process_group, str):
            process_group = self._c10d._resolve_process_group(process_group)
        group = (
            process_groups.find_group(self._c10d, process_group)
            if process_group is not None
            else None
        )
        if group is None:
            return None
        size = other_calls.sum_tensor_bytes(input_tensors)
        if self._operation == layout.BROADCAST:
            source = arguments[1] if len(arguments) > 1 else keywords.get("src")
            size = size if group.rank == group.global_rank(source) else 0
        b = next(group.operations)
        other_calls.active_threads.add(thread)
        d = self._operation | layout.ISSUE << layout.FORM_SHIFT
        return thread, group, b, size, d, None, ring.enter(group.number, b, size, d)

    def _record_issue(self, call: other_calls.PendingCall, end: int, result: Any) -> None:
        thread, group, b, size, d, _, start = call
        other_calls.active_threads.discard(thread)
        # Its input may be the result of another operation: the wait for that comes first.
        ring.emit(layout.COLLECTIVE, max(start, _waited_ns), end, group.number, b, size, d)
        if len(_pending) >= MAX_PENDING_RESULTS:
            for key in list(_pending)[: MAX_PENDING_RESULTS // 4]:  # these are no longer waited for
                _pending.pop(key, None)
        addresses = (
            [_get_data_address(tensor) for tensor in result]
            if type(result) is list
            else [_get_data_address(result)]
        )
        waits = d + (layout.WAIT - layout.ISSUE << layout.FORM_SHIFT)
        for address in addresses:
            if address:
                _pending.pop(address, None)  # keeps the oldest first, also when memory is reused
                _pending[address] = (addresses, group.number, b, size, waits)


class _WaitOperator(_Operator):
    """Waits for a result; of the results of one operation only the first wait is recorded."""

    def __init__(self, original: Any, eager: Any) -> None:
        super().__init__(original)
        self._eager = eager

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        pending = None
        mark = None
        start = 0
        try:
            ready = arguments and _pending and _probe.on and not wrap.compiler._is_compiling_flag  # type: ignore[attr-defined]
            if ready and type(arguments[0]) in self._eager:
                pending = _pending.get(_get_data_address(arguments[0]))
                if pending is not None:
                    for address in pending[0]:
                        _pending.pop(address, None)
                    mark = cuda.begin_wait(cuda.MAX_PENDING_COLLECTIVES, default_stream=True)
                    start = ring.enter(*pending[1:])
        except BaseException as error:
            handle_error(error)
        try:
            result = self.original(*arguments, **keywords)
        except BaseException as error:
            remove_own_frame(error)
            raise
        try:
            if start and pending is not None:
                _record_wait(pending, start, monotonic_ns(), mark)
        except BaseException as error:
            handle_error(error)
        return result


def _record_wait(pending: PendingOperation, start: int, end: int, mark: cuda.WaitMark) -> None:
    global _waited_ns
    _waited_ns = end
    sequence = ring.emit(layout.COLLECTIVE, start, end, *pending[1:])
    cuda.finish_wait(mark, sequence, start, end, layout.EXPOSED_COLLECTIVE)


def _get_data_address(tensor: Any) -> int:
    """Return the memory address of a tensor's values; 0 when it has none of its own."""
    try:
        return int(tensor.data_ptr())
    except RuntimeError:
        return 0  # a traced tensor, or one that represents several


ring.after_fork.append(_pending.clear)
