"""Define the signal, and the table of all declared signals."""

from __future__ import annotations

from dataclasses import dataclass

from clusterprof.units import infer_unit


@dataclass(frozen=True, slots=True)
class Signal:
    """One named kind of number; `device` names what has one value each ("" = the node)."""

    name: str
    device: str
    doc: str

    def __post_init__(self) -> None:
        infer_unit(self.name)  # raises ValueError when the name has no unit suffix

    @property
    def unit(self) -> str:
        """The canonical unit that the name's suffix gives."""
        return infer_unit(self.name)

    @property
    def is_counter(self) -> bool:
        """True for integrals that only grow; False for gauges, which are instantaneous values."""
        return self.name.endswith("_total")


BY_NAME: dict[str, Signal] = {}
"""Every declared signal by name, in the order of declaration."""


def register_signal(name: str, device: str, doc: str) -> Signal:
    """Declare a signal.

    Raises: ValueError when the name has no unit suffix, or is declared already.
    """
    if name in BY_NAME:
        raise ValueError(f"the signal {name!r} is declared twice")
    BY_NAME[name] = Signal(name, device, doc)
    return BY_NAME[name]
