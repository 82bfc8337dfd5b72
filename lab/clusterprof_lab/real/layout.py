"""How the job of a scenario is spread over machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TWO_NODES = "two-nodes"


@dataclass(frozen=True)
class Layout:
    """How a scenario's job lies on machines."""

    nodes: int
    """0 = this machine itself."""
    ranks: int
    """Per node."""
    words: tuple[str, ...]
    """Options of the script, of every job of the scenario."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return max(self.nodes, 1) * self.ranks

    @property
    def key(self) -> str:
        """Name of what the clean jobs of equal layouts share."""
        words = "".join(word for word in self.words).replace("--", "_").replace("/", "")
        return f"{self.nodes}x{self.ranks}{words}"


def read_layout(real: Mapping[str, Any]) -> Layout:
    """Read the layout of a scenario's `real:` section."""
    two = real.get("layout", "one-machine") == TWO_NODES
    options = {"collectives": real.get("collectives", "device"), **real.get("script", {})}
    words = tuple(
        f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()
    )
    return Layout(2 if two else 0, int(real.get("ranks", 2)), words)
