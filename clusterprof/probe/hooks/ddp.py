"""DistributedDataParallel: how long a backward pass waits for the gradients of other ranks.

One hook at the end of each forward pass, however many parameters there are, and none on
the communication: when the backward pass reaches the model's output, a callback is
queued with the autograd engine. The engine runs it when all local gradients are
computed. It queues a second callback, which runs after the one in which DDP waits for
its buckets: the exposed wait lies between the two. On CUDA the stream waits instead of
the host, and events measure how long.

The output alone does not show two things, so one parameter is observed as well: that
this pass reduces gradients (unlike, say, `torch.autograd.grad` of a penalty), and that
DDP waits at the end of this pass (not of one nested in it, of a re-entrant checkpoint:
the waits of models with nested passes are left out). In the first pass all parameters
are observed, to find which one is last.
"""

import itertools
import sys
import weakref
from time import monotonic_ns
from types import ModuleType
from typing import Any, Callable, List, MutableMapping, Optional, Tuple

from .. import handle_error, layout, ring
from . import cuda, process_groups, wrap

MAX_OUTPUTS = 64
UNKNOWN = NO_PASS = -1

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]
_models: "MutableMapping[Any, _DdpModel]" = weakref.WeakKeyDictionary()


class _DdpModel:
    """State of one DistributedDataParallel; holds no reference to it or its parameters."""

    def __init__(self, ddp: Any) -> None:
        parameters = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        self.bytes = sum([parameter.numel() * parameter.element_size() for parameter in parameters])
        self.newest_pass: Optional[_ForwardPass] = None
        self.gradient_graph = (
            NO_PASS  # graph id of the pass that gave the observed parameter its gradient
        )
        self._last = UNKNOWN  # number of the parameter that got its gradient last
        self._learning: List[Any] = []
        # Where ranks may use different parameters, no parameter is sure to get a gradient.
        dynamic = ddp.find_unused_parameters and not ddp.static_graph
        self.has_listener = not dynamic and getattr(ddp, "mixed_precision", None) is None
        if self.has_listener:
            self._learning = [
                self._listen(number, parameter) for number, parameter in enumerate(parameters)
            ]

    def learn(self) -> None:
        """After the first pass with gradients, observe the last parameter only."""
        if self._learning and self._last != UNKNOWN:
            for number, handle in enumerate(self._learning):
                if number != self._last:
                    handle.remove()
            self._learning = []

    def _listen(self, number: int, parameter: Any) -> Any:
        def accumulated(*unused: Any) -> None:
            if wrap.is_compiling():
                return
            try:
                if _probe.on:  # type: ignore[attr-defined]
                    self.gradient_graph = _get_graph_id()
                    self._last = number
            except BaseException as error:
                handle_error(error)

        # The node that accumulates the gradient: DDP keeps it alive, and no tensor shows the hook.
        return parameter.view_as(parameter).grad_fn.next_functions[0][0].register_hook(accumulated)


class _ForwardPass:
    """One forward pass, and the backward pass that may follow it."""

    def __init__(self, model: _DdpModel, group: process_groups.Group) -> None:
        self._model = model
        self._group = group
        self._graph = NO_PASS
        self._start_ns = 0
        self._mark: cuda.WaitMark = None

    def begin_backward(self, gradients: Any) -> None:
        """Begin the backward pass: the gradient of an output is known, no earlier one is."""
        if wrap.is_compiling():
            return
        try:
            graph = _get_graph_id()
            if _probe.on and self._model.newest_pass is self and self._graph != graph:  # type: ignore[attr-defined]
                self._graph = graph
                self._model.gradient_graph = NO_PASS
                _append_callback(self._handle_gradients)
        except BaseException as error:
            handle_error(error)

    def _handle_gradients(self) -> None:
        try:
            model = self._model
            model.learn()
            if not _probe.on or (model.has_listener and model.gradient_graph != self._graph):  # type: ignore[attr-defined]
                return  # no gradients, or DDP has already waited for them
            model.newest_pass = None
            self._mark = cuda.begin_wait(cuda.MAX_PENDING_COLLECTIVES)
            # Its number is assigned when it ends; until then it is the next of its group.
            self._start_ns = ring.enter(self._group.number, UNKNOWN, model.bytes, layout.GRADIENTS)
            _append_callback(self._handle_reduction)
        except BaseException as error:
            handle_error(error)

    def _handle_reduction(self) -> None:
        try:
            end = monotonic_ns()
            group, start = self._group, self._start_ns
            number = next(group.operations)
            size, operation = self._model.bytes, layout.GRADIENTS
            sequence = ring.emit(
                layout.COLLECTIVE, start, end, group.number, number, size, operation
            )
            cuda.finish_wait(self._mark, sequence, start, end, layout.EXPOSED_COLLECTIVE)
        except BaseException as error:
            handle_error(error)


def install(module: ModuleType) -> bool:
    """Wrap the forward pass, and the broadcast of buffers that may be part of it."""
    kind: Any = module.DistributedDataParallel  # type: ignore[attr-defined]
    tensors_in: Callable[[Any], Any] = module._find_tensors  # type: ignore[attr-defined]

    def after_forward(
        token: None, start: int, end: int, output: Any, ddp: Any, *inputs: Any, **named: Any
    ) -> None:
        if _is_reducing(ddp):
            _observe_outputs(ddp, tensors_in(output))

    sys.modules["torch"]._C._current_graph_task_id  # noqa: B018 - needed below
    wrap.wrap_function(kind, "forward", after_forward, traced=True)
    wrap.wrap_function(
        kind, "_distributed_broadcast_coalesced", _finish_broadcast, _begin_broadcast, traced=True
    )
    if hasattr(kind, "_match_all_reduce_for_bwd_pass"):  # only in some versions
        wrap.wrap_function(kind, "_match_all_reduce_for_bwd_pass", _record_join_reduce)
    return True


def _is_reducing(ddp: Any) -> bool:
    return bool(
        sys.modules["torch"].is_grad_enabled()
        and ddp.require_backward_grad_sync  # False within no_sync()
        and not getattr(ddp, "_use_python_reducer", False)
        and not getattr(ddp, "_delay_all_reduce_all_params", False)
    )


def _observe_outputs(ddp: Any, outputs: Any) -> None:
    group = process_groups.find_group(_get_c10d(), ddp.process_group)
    if group is None:
        return
    model = _models.get(ddp)
    if model is None:
        model = _models[ddp] = _DdpModel(ddp)
    model.newest_pass = newest = _ForwardPass(model, group)
    for tensor in itertools.islice(outputs, MAX_OUTPUTS):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(newest.begin_backward)


def _begin_broadcast(ddp: Any, *unused: Any, **named: Any) -> Tuple[Any, int, Any, int]:
    group = process_groups.find_group(_get_c10d(), ddp.process_group)
    if group is None:
        return None, UNKNOWN, None, 0
    number = next(group.operations)
    mark = cuda.begin_wait(cuda.MAX_PENDING_COLLECTIVES, default_stream=True)
    return group, number, mark, ring.enter(group.number, number, UNKNOWN, layout.BROADCAST)


def _finish_broadcast(
    token: Tuple[Any, int, Any, int],
    unused: int,
    end: int,
    result: Any,
    ddp: Any,
    tensors: Any,
    buffer_size: int,
    authoritative_rank: int = 0,
) -> None:
    group, number, mark, start = token
    if group is None:
        return
    size = sum([tensor.numel() * tensor.element_size() for tensor in tensors])
    sent_bytes = size if group.global_rank(authoritative_rank) == group.rank else 0
    operation = layout.BROADCAST
    sequence = ring.emit(layout.COLLECTIVE, start, end, group.number, number, sent_bytes, operation)
    cuda.finish_wait(mark, sequence, start, end, layout.EXPOSED_COLLECTIVE)


def _record_join_reduce(token: None, start: int, end: int, result: Any, ddp: Any) -> None:
    """Record the reduction of zeros by a rank that has no more batches (`join`)."""
    group = process_groups.find_group(_get_c10d(), ddp.process_group)
    if group is not None:
        size = sum(
            [
                parameter.numel() * parameter.element_size()
                for parameter in ddp.parameters()
                if parameter.requires_grad
            ]
        )
        number = next(group.operations)
        ring.emit(layout.COLLECTIVE, start, end, group.number, number, size, layout.GRADIENTS)


def _get_c10d() -> Any:
    return sys.modules["torch.distributed.distributed_c10d"]


def _get_graph_id() -> int:
    return int(sys.modules["torch"]._C._current_graph_task_id())


def _append_callback(callback: Callable[[], None]) -> None:
    sys.modules["torch"].autograd.Variable._execution_engine.queue_callback(callback)


def _clear_models() -> None:
    _models.clear()


ring.after_fork.append(_clear_models)
