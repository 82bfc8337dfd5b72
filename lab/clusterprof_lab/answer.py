"""A tool's answer about one run, in the terms of the corpus: all that the scorer reads of the tool.

Any tool can be scored: write one `answer.json` per run (`dump`), or a function from a recording to
an `Answer`. None means that the tool does not claim it; it then counts neither as right nor as
wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = "clusterprof-answer"
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class NamedCause:
    """One cause a tool names."""

    family: str
    """Top-level group of `families.FAMILIES`."""
    leaf: str | None
    """The finer cause; None when the tool stops at the group."""
    share_ratio: float | None
    """Of the in-step device time of all ranks; None when the tool gives no amount."""
    confidence_ratio: float | None = None
    culprits: tuple[int, ...] | None = None
    """Ranks it blames, most first; () = says nobody is to blame; None = not claimed."""
    outside_steps: bool = False
    covers: tuple[str, ...] = ()
    """Further groups that the tool's word stands for and does not distinguish ("input-bound"
    is the loader's CPU or its storage); () = it means `family` alone."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One tool's answer to one run."""

    tool: str
    """Name and version."""
    causes: tuple[NamedCause, ...] | None
    """Largest first; () = says nothing is wrong; None = claims no causes at all."""
    family_ratio: Mapping[str, float] | None = None
    """Share of the in-step time by group, "unattributed" included; None = not claimed."""
    culprits: tuple[int, ...] | None = None
    """Ranks blamed for the run as a whole, most first; () = nobody; None = not claimed."""
    residual_ns: int | None = None
    """Lost time less the sum of all buckets, at the level where it is largest."""
    lost_ratio: float | None = None
    """Lost time of the in-step time."""
    gain_ratio: float | None = None
    """Part of the step time that fixing what is named would win back; None = not claimed."""
    leaves: bool = True
    """False: the tool never names anything finer than a group, by design."""


def dump(answer: Answer, path: Path) -> None:
    """Write an answer as JSON."""
    document = {"format": FORMAT, "schema": SCHEMA, **asdict(answer)}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Answer:
    """Read an answer; ValueError when it is not one."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if document.pop("format", "") != FORMAT or document.pop("schema", 0) != SCHEMA:
        raise ValueError(f"{path}: not an answer of schema {SCHEMA}")
    causes = document.get("causes")
    document["causes"] = None if causes is None else tuple(_parse_cause(cause) for cause in causes)
    if document.get("culprits") is not None:
        document["culprits"] = tuple(document["culprits"])
    try:
        return Answer(**document)
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from error


def _parse_cause(fields: dict[str, Any]) -> NamedCause:
    blamed = fields.get("culprits")
    lists = {
        "culprits": None if blamed is None else tuple(blamed),
        "covers": tuple(fields.get("covers", ())),
    }
    return NamedCause(**{"leaf": None, "share_ratio": None, **fields, **lists})
