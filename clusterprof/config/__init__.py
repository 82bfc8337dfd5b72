"""Reads a profile; unknown keys are refused with the nearest known one and the line.

A profile is YAML and data only: no aliases, no tags, at most 64 KiB. `keys.KEYS` is all it may say.

    extends: ci
    sampling: {hz: 5, collectors: {mounts: {hz: 0.5}, network: {enabled: false}}}
    recording: {max_bytes: 512 MiB}
    limits: {storage-local: {waited_at_least_ratio: 0.2}}
    gate: {assertions: ["gpu.busy_ratio >= 70%"], min_steps: 50}

Precedence: `--profile`, else CLUSTERPROF_PROFILE, else `clusterprof.yaml` in the working directory,
else the defaults. A profile may extend one other: a shipped one by name, or a file beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterprof.errors import UsageError
from clusterprof.profiles.keys import KEYS, nearest, read_limit
from clusterprof.profiles.text import read_chain, shipped_names

__all__ = ["Profile", "bind_limits", "check_collectors", "load", "nearest", "shipped_names"]

VARIABLE = "CLUSTERPROF_PROFILE"
WORKING_DIRECTORY_FILE = "clusterprof.yaml"
DEFAULT = "default"  # the origin of a value that no profile set


@dataclass(frozen=True, slots=True)
class Profile:
    """Effective values by dotted key, and the origin of each."""

    name: str
    """As the user gave it; "default" when no profile was chosen."""
    values: Mapping[str, Any]
    """Dotted key -> value in canonical units; every key of `keys.KEYS` without a `*` is present."""
    origins: Mapping[str, str]
    """Dotted key -> "profiles/ci.yaml:12", or "default"."""

    def section(self, prefix: str) -> dict[str, Any]:
        """Return what lies under a dotted prefix as nested dicts ({} when there is nothing)."""
        found: Any = self.effective()
        for part in prefix.split("."):
            found = found.get(part, {})
        return dict(found)

    def effective(self) -> dict[str, Any]:
        """Return all values as nested dicts, the shape of a profile file."""
        nested: dict[str, Any] = {"sampling": {"collectors": {}}, "limits": {}}
        for dotted, value in self.values.items():
            *parents, last = dotted.split(".")
            place = nested
            for part in parents:
                place = place.setdefault(part, {})
            place[last] = list(value) if isinstance(value, tuple) else value
        return nested


def load(name_or_path: str | None, environ: Mapping[str, str], cwd: Path) -> Profile:
    """Return the profile that the precedence chooses; raise UsageError on anything unclear."""
    chosen = name_or_path or environ.get(VARIABLE) or None
    if chosen is None and (cwd / WORKING_DIRECTORY_FILE).exists():
        chosen = f"./{WORKING_DIRECTORY_FILE}"
    fixed = [dotted for dotted in KEYS if "*" not in dotted and dotted != "extends"]
    values = {dotted: KEYS[dotted].default for dotted in fixed}
    origins = dict.fromkeys(values, DEFAULT)
    if chosen is not None:
        for dotted, (value, origin) in read_chain(chosen, cwd).items():
            values[dotted], origins[dotted] = value, origin
    return Profile(chosen or DEFAULT, values, origins)


def bind_limits(profile: Profile, known: Mapping[str, type]) -> dict[str, Any]:
    """Return one limits object per known cause id: its dataclass's defaults, then the profile's.

    `known` maps a cause id to a frozen dataclass whose field names carry units and whose defaults
    give the types. A limit may be written with its unit ("250 ms").
    """
    given: dict[str, dict[str, Any]] = {cause: {} for cause in known}
    for dotted, value in profile.values.items():
        section, _, rest = dotted.partition(".")
        if section != "limits":
            continue
        cause, _, name = rest.partition(".")
        where = profile.origins[dotted]
        if cause not in known:
            raise UsageError(f"{where}: unknown cause {cause!r}{nearest(cause, known)}")
        fields = {field.name: field for field in dataclasses.fields(known[cause])}
        if name not in fields:
            hint = nearest(name, fields)
            raise UsageError(f"{where}: the cause {cause} has no limit {name!r}{hint}")
        given[cause][name] = read_limit(name, value, fields[name].default, where)
    return {cause: known[cause](**arguments) for cause, arguments in given.items()}


def check_collectors(profile: Profile, known: Iterable[str]) -> None:
    """Raise UsageError when the profile speaks of a collector that does not exist."""
    names = tuple(known)
    for dotted, origin in profile.origins.items():
        if dotted.startswith("sampling.collectors."):
            name = dotted.split(".")[2]
            if name not in names:
                raise UsageError(f"{origin}: unknown collector {name!r}{nearest(name, names)}")
