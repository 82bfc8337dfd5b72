"""DistributedDataParallel: how long a backward pass waits for gradients that others still compute.

One hook at the end of each forward pass, however many parameters there are, and none on the
communication: as the backward pass reaches the model's output, a callback is queued with the
autograd engine. The engine runs it when all local gradients are there. Before it returns it queues
another, which comes after the one in which DDP waits for its buckets: between the two lies the
exposed wait. On CUDA the host does not wait there but the stream does, and events say how long.

Two things the output alone cannot tell, so one parameter is listened to as well: that this is a
pass which reduces gradients (and not, say, `torch.autograd.grad` of a penalty), and that DDP waits
at the end of this pass (and not of one nested in it, of a re-entrant checkpoint: such a model's
waits are left out). In the first pass all parameters are listened to, to learn which is the last.
"""

import itertools
import sys
import weakref
from time import monotonic_ns
from types import ModuleType
from typing import Any, Callable, List, MutableMapping, Optional, Tuple

from .. import failed, layout, ring
from . import cuda, groups, seam

OUTPUTS_AT_MOST = 64
UNKNOWN = NO_PASS = -1

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]
_models: "MutableMapping[Any, _Model]" = weakref.WeakKeyDictionary()


class _Model:
    """What is known of one DistributedDataParallel; neither it nor its parameters are held."""

    def __init__(self, ddp: Any) -> None:
        parameters = [each for each in ddp.module.parameters() if each.requires_grad]
        self.bytes = sum([each.numel() * each.element_size() for each in parameters])
        self.newest: Optional[_Pass] = None
        self.graph = NO_PASS  # of the pass in which the parameter we listen to got its gradient
        self._last = UNKNOWN  # which parameter got its gradient last
        self._learning: List[Any] = []
        # Where ranks may use different parameters, none is sure to get a gradient.
        dynamic = ddp.find_unused_parameters and not ddp.static_graph
        self.listens = not dynamic and getattr(ddp, "mixed_precision", None) is None
        if self.listens:
            self._learning = [self._listen(n, each) for n, each in enumerate(parameters)]

    def learn(self) -> None:
        """After the first pass with gradients, listen to the last parameter alone."""
        if self._learning and self._last != UNKNOWN:
            for number, handle in enumerate(self._learning):
                if number != self._last:
                    handle.remove()
            self._learning = []

    def _listen(self, number: int, parameter: Any) -> Any:
        def accumulated(*unused: Any) -> None:
            if seam.is_compiling():
                return
            try:
                if _probe.on:  # type: ignore[attr-defined]
                    self.graph = _graph()
                    self._last = number
            except BaseException as error:
                failed(error)

        # The node that accumulates the gradient: DDP keeps it alive, and no tensor shows a hook.
        return parameter.view_as(parameter).grad_fn.next_functions[0][0].register_hook(accumulated)


class _Pass:
    """One forward pass, and the backward pass that may follow it."""

    def __init__(self, model: _Model, group: groups.Group) -> None:
        self._model = model
        self._group = group
        self._graph = NO_PASS
        self._start_ns = 0
        self._mark: cuda.Mark = None

    def reached(self, gradients: Any) -> None:
        """Begin: the gradient of an output is known, nothing before it."""
        if seam.is_compiling():
            return
        try:
            graph = _graph()
            if _probe.on and self._model.newest is self and self._graph != graph:  # type: ignore[attr-defined]
                self._graph = graph
                self._model.graph = NO_PASS
                _queue(self._computed)
        except BaseException as error:
            failed(error)

    def _computed(self) -> None:
        try:
            model = self._model
            model.learn()
            if not _probe.on or (model.listens and model.graph != self._graph):  # type: ignore[attr-defined]
                return  # no gradients, or DDP has waited for them already
            model.newest = None
            self._mark = cuda.before_wait(cuda.COLLECTIVES)
            # Its number is taken when it ends: until then it is the next of its group.
            self._start_ns = ring.enter(self._group.number, UNKNOWN, model.bytes, layout.GRADIENTS)
            _queue(self._reduced)
        except BaseException as error:
            failed(error)

    def _reduced(self) -> None:
        try:
            end = monotonic_ns()
            group, start = self._group, self._start_ns
            number = next(group.operations)
            size, what = self._model.bytes, layout.GRADIENTS
            sequence = ring.emit(layout.COLLECTIVE, start, end, group.number, number, size, what)
            cuda.after_wait(self._mark, sequence, start, end, layout.EXPOSED_COLLECTIVE)
        except BaseException as error:
            failed(error)


def install(module: ModuleType) -> bool:
    """Wrap the forward pass, and the broadcast of buffers that may be in it."""
    kind: Any = module.DistributedDataParallel  # type: ignore[attr-defined]
    tensors_in: Callable[[Any], Any] = module._find_tensors  # type: ignore[attr-defined]

    def forwarded(
        token: None, start: int, end: int, output: Any, ddp: Any, *inputs: Any, **named: Any
    ) -> None:
        if _reduces(ddp):
            _follow(ddp, tensors_in(output))

    sys.modules["torch"]._C._current_graph_task_id  # noqa: B018 - a version that has it
    seam.wrap(kind, "forward", forwarded, traced=True)
    seam.wrap(kind, "_distributed_broadcast_coalesced", _sent, _sends, traced=True)
    if hasattr(kind, "_match_all_reduce_for_bwd_pass"):  # in this version
        seam.wrap(kind, "_match_all_reduce_for_bwd_pass", _matched)
    return True


def _reduces(ddp: Any) -> bool:
    return bool(
        sys.modules["torch"].is_grad_enabled()
        and ddp.require_backward_grad_sync  # False within no_sync()
        and not getattr(ddp, "_use_python_reducer", False)
        and not getattr(ddp, "_delay_all_reduce_all_params", False)
    )


def _follow(ddp: Any, outputs: Any) -> None:
    group = groups.find(_c10d(), ddp.process_group)
    if group is None:
        return
    model = _models.get(ddp)
    if model is None:
        model = _models[ddp] = _Model(ddp)
    model.newest = newest = _Pass(model, group)
    for tensor in itertools.islice(outputs, OUTPUTS_AT_MOST):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(newest.reached)


def _sends(ddp: Any, *unused: Any, **named: Any) -> Tuple[Any, int, Any, int]:
    group = groups.find(_c10d(), ddp.process_group)
    if group is None:
        return None, UNKNOWN, None, 0
    number = next(group.operations)
    mark = cuda.before_wait(cuda.COLLECTIVES, default_stream=True)
    return group, number, mark, ring.enter(group.number, number, UNKNOWN, layout.BROADCAST)


def _sent(
    token: Tuple[Any, int, Any, int], unused: int, end: int, result: Any, ddp: Any,
    tensors: Any, buffer_size: int, authoritative_rank: int = 0,
) -> None:  # fmt: skip
    group, number, mark, start = token
    if group is None:
        return
    size = sum([each.numel() * each.element_size() for each in tensors])
    brought = size if group.global_rank(authoritative_rank) == group.rank else 0
    what = layout.BROADCAST
    sequence = ring.emit(layout.COLLECTIVE, start, end, group.number, number, brought, what)
    cuda.after_wait(mark, sequence, start, end, layout.EXPOSED_COLLECTIVE)


def _matched(token: None, start: int, end: int, result: Any, ddp: Any) -> None:
    """A rank that has no more batches (`join`) reduces zeros with the gradients of the others."""
    group = groups.find(_c10d(), ddp.process_group)
    if group is not None:
        size = sum([e.numel() * e.element_size() for e in ddp.parameters() if e.requires_grad])
        number = next(group.operations)
        ring.emit(layout.COLLECTIVE, start, end, group.number, number, size, layout.GRADIENTS)


def _c10d() -> Any:
    return sys.modules["torch.distributed.distributed_c10d"]


def _graph() -> int:
    return int(sys.modules["torch"]._C._current_graph_task_id())


def _queue(callback: Callable[[], None]) -> None:
    sys.modules["torch"].autograd.Variable._execution_engine.queue_callback(callback)


def _forget() -> None:
    _models.clear()


ring.after_fork.append(_forget)
