"""The user's own spans: `with clusterprof.span("tokenise"):`."""

from time import monotonic_ns
from typing import Any, Dict, Optional, Tuple, Union

from . import failed, layout, ring, steps, usage

# Names that mean a kind we know; its values as "unknown".
KNOWN: Dict[str, Tuple[int, int, int]] = {
    "data_wait": (layout.DATA_WAIT, -1, -1),
    "checkpoint": (layout.CHECKPOINT, -1, 0),
    "h2d": (layout.H2D, -1, 0),
    "forward": (layout.FORWARD, 0, 0),
    "backward": (layout.BACKWARD, 0, 0),
    "collective": (layout.COLLECTIVE, 0, -1),  # of a group that is not known, without a number
    "eval": (layout.EVAL, 0, 0),
    "compile": (layout.COMPILE, 0, 0),
    "sync": (layout.SYNC, layout.WHOLE_NS, 1),
}


class Span:
    """Records from its entry to its exit, also when an exception leaves it."""

    __slots__ = ("a", "b", "began_ns", "kind")

    def __init__(self, kind: int, a: int, b: int) -> None:
        self.kind = kind
        self.a = a
        self.b = b
        self.began_ns = 0

    def __enter__(self) -> None:
        self.began_ns = monotonic_ns()

    def __exit__(self, *exception: Any) -> None:
        try:
            steps.saw(self.began_ns)
            ring.emit(self.kind, self.began_ns, monotonic_ns(), self.a, self.b)
        except BaseException as error:
            failed(error)


class Fetch:
    """Records how a loader of the user's own made a batch: wall, CPU time, bytes read."""

    __slots__ = ("before", "began_ns")

    def __init__(self) -> None:
        self.before: Any = None
        self.began_ns = 0

    def __enter__(self) -> None:
        try:
            self.before = usage.usage()
        except BaseException as error:
            failed(error)
        self.began_ns = monotonic_ns()

    def __exit__(self, *exception: Any) -> None:
        try:
            ended_ns = monotonic_ns()
            if self.before is not None:
                ring.emit(layout.FETCH, self.began_ns, ended_ns, 1, *usage.used_since(self.before))
        except BaseException as error:
            failed(error)


def span(name: str) -> "Optional[Union[Span, Fetch]]":
    """Return a span of this name, or None when there is no room for another name."""
    if name == "fetch":
        return Fetch()
    known = KNOWN.get(name)
    if known is not None:
        return Span(*known)
    kind = ring.kind_of(name)
    return None if kind < 0 else Span(kind, 0, 0)
