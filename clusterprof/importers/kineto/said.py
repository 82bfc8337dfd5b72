"""What operations between ranks say of themselves; the same said again is kept once."""

from __future__ import annotations

from dataclasses import dataclass

from clusterprof.importers.kineto import words
from clusterprof.importers.kineto.decode import CommArgs

_KEYS_AT_MOST = 1 << 16
_ITEM_BYTES = {
    "float": 4, "float32": 4, "double": 8, "half": 2, "bfloat16": 2, "int": 4, "long": 8,
    "short": 2, "char": 1, "byte": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comm:
    """What an operation between ranks says of itself."""

    operation: int
    group: str | None
    ranks: str | None
    bytes: int
    sequence: int
    source: int
    target: int


class Said:
    """All that was said so far."""

    def __init__(self) -> None:
        self.all: list[Comm] = []
        self._place_of: dict[tuple[object, ...], int] = {}

    def place(self, name: str, args: object) -> int:
        """Return the place in `all` of what an operation says."""
        if not isinstance(args, CommArgs) or args.collective is None:
            key: tuple[object, ...] = (name,)
            known = self._place_of.get(key)
            if known is None:
                known = self._keep(key, Comm(words.operation_of(name), None, None, -1, -1, -1, -1))
            return known
        key = (
            args.collective, args.group, args.ranks, args.elements, args.dtype, args.sequence,
            args.source, args.target,
        )  # fmt: skip
        known = self._place_of.get(key)
        if known is None:
            item = _ITEM_BYTES.get((args.dtype or "").lower())
            size = -1 if item is None or args.elements < 0 else args.elements * item
            known = self._keep(key, Comm(
                words.operation_of(args.collective), args.group, args.ranks, size,
                args.sequence, args.source, args.target,
            ))  # fmt: skip
        return known

    def _keep(self, key: tuple[object, ...], said: Comm) -> int:
        if len(self._place_of) < _KEYS_AT_MOST:
            self._place_of[key] = len(self.all)
        self.all.append(said)
        return len(self.all) - 1
