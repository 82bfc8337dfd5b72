"""What a signal is, and the list into which each is entered where it is declared."""

from __future__ import annotations

from dataclasses import dataclass

from clusterprof.units import unit_of


@dataclass(frozen=True, slots=True)
class Signal:
    """One named kind of number; `device` says of what there is one value each ("" = the node)."""

    name: str
    device: str
    doc: str

    def __post_init__(self) -> None:
        unit_of(self.name)  # raises ValueError when the name does not end with its unit

    @property
    def unit(self) -> str:
        """The canonical unit the name promises."""
        return unit_of(self.name)

    @property
    def is_counter(self) -> bool:
        """True for integrals that only grow; False for gauges, which are values of an instant."""
        return self.name.endswith("_total")


DECLARED: list[Signal] = []
"""Every signal, in the order of declaration."""


def declare(name: str, device: str, doc: str) -> Signal:
    """Return a new signal that the catalogue lists; raise ValueError without a unit."""
    signal = Signal(name, device, doc)
    DECLARED.append(signal)
    return signal
