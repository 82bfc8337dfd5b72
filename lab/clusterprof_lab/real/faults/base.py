"""A real fault of the environment, the place where it is applied, and the options the job gets.

A fault has two parts: what the job does, so that the fault can slow it at all, and what happens to
the job's environment. `Place.clean` leaves the second part out: this is the paired clean job.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

ITEMS_PER_BATCH = 8
"""Items of the training script's batch; `items` of a scenario says otherwise."""


class Node(Protocol):
    """What a fault must know of a node."""

    @property
    def pid(self) -> int:
        """A process whose namespaces are the node's."""

    @property
    def name(self) -> str:
        """Host name."""

    @property
    def cpu(self) -> int:
        """The CPU on which the node's ranks run."""


@dataclass(frozen=True)
class Place:
    """Where a fault is applied, and how strong it must be."""

    node: Node | None
    """None: this machine itself."""
    folder: Path
    """On a real disk; the fault may write there, and cleans up."""
    random: np.random.Generator
    share: float
    """Of step time the fault is aimed to cost, from 0 to below 1."""
    step_ns: int
    """Of the clean job."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The scenario's `real:` section."""
    nodes: Sequence[Node] = ()
    """All nodes of the job, for faults between two of them."""
    clean: bool = False
    """Give the job the same to do in the same place, but let nothing be wrong."""
    label: str = ""
    """Keeps apart what is applied twice to a node."""

    @property
    def slowed_ns(self) -> int:
        """How long a step takes when the fault costs its share of it."""
        return round(self.step_ns / (1.0 - self.share))

    @property
    def stall_ns(self) -> int:
        """How much longer than a clean step that is."""
        return self.slowed_ns - self.step_ns

    @property
    def ranks(self) -> int:
        """Ranks of the node (`ranks` of the scenario, 2 when it says nothing)."""
        return int(self.options.get("ranks", 2))

    @property
    def items(self) -> int:
        """Items of a batch (`items` of the scenario)."""
        return int(self.options.get("items", ITEMS_PER_BATCH))

    def get_number(self, name: str, otherwise: float) -> float:
        """Return a number of the scenario's `real:` section."""
        return float(self.options.get(name, otherwise))

    def make_path(self, name: str) -> Path:
        """Return a path below the folder that no other node of the same folder uses."""
        own = Path(name)
        node_suffix = "" if self.node is None else f"-{self.node.name}"
        return self.folder / f"{own.stem}{node_suffix}{self.label}{own.suffix}"

    def make_node_command(self, *command: str) -> list[str]:
        """Return the command line that runs a command in the node's mounts and network.

        It stays in this machine's process namespace, so its number is the one that `Popen` says.
        """
        if self.node is None:
            return list(command)
        return ["nsenter", f"--target={self.node.pid}", "--mount", "--net", "--uts", "--", *command]


@dataclass(frozen=True)
class Options:
    """What the job gets from a fault."""

    script: list[str] = field(default_factory=list)
    """Options of the training script on that node."""
    cgroup: Path | None = None
    """Folder whose `cgroup.procs` the node's ranks enter before they start."""
    environment: dict[str, str] = field(default_factory=dict)
    log: Path | None = None
    """What was injected: JSON lines with `start_ns`, `end_ns` (CLOCK_MONOTONIC) and `cause`."""
    link: Mapping[str, float] | None = None
    """Fields of the cable's `Link` for the node's link; None = leave it as it is."""
    switch: Callable[[bool], None] | None = None
    """Puts the fault on or off while the job runs; None = it cannot be, or there is none."""

    def combine(self, other: Options) -> Options:
        """Return these options with those of a second fault of the same node."""
        return replace(
            self,
            script=[*self.script, *other.script],
            cgroup=self.cgroup or other.cgroup,
            environment={**self.environment, **other.environment},
            log=self.log or other.log,
            link=self.link if other.link is None else other.link,
            switch=self.switch or other.switch,
        )


class Fault(Protocol):
    """One fault; an object without state, listed in `registry.FAULTS`."""

    @property
    def name(self) -> str:
        """Its name in a scenario's `real:` section."""

    def why_not_here(self) -> str:
        """Return why it cannot be made on this machine by this user, "" when it can."""

    def apply(self, place: Place) -> AbstractContextManager[Options]:
        """Return a context in which the fault is in force; afterwards nothing is left of it."""


class Log:
    """Writes what was injected, a JSON line each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def write(self, start_ns: int, end_ns: int, cause: str, **more: Any) -> None:
        """Note one injected stretch of time."""
        line = {"start_ns": start_ns, "end_ns": end_ns, "cause": cause, **more}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def now_ns() -> int:
    """Return CLOCK_MONOTONIC, the clock of all truths."""
    return time.monotonic_ns()


def make_read_options(path: str, reads: int, read_bytes: int) -> list[str]:
    """Return the script's options for so many reads per item."""
    return [f"--data={path}", f"--reads={reads}", f"--read-bytes={read_bytes}"]


def check_root(what: str) -> str:
    """Return why this user may not do it, "" for root."""
    return "" if os.geteuid() == 0 else f"{what} needs root"
