"""Load a profile; unknown keys are rejected with the nearest known key and the line.

A profile is YAML and data only: no aliases, no tags, at most 64 KiB. `KEYS` lists
all keys.

    extends: ci
    sampling: {hz: 5, collectors: {mounts: {hz: 0.5}, network: {enabled: false}}}
    recording: {max_bytes: 512 MiB}
    stacks: {paths: hash}
    limits: {storage-local: {waited_at_least_ratio: 0.2}}
    gate: {assertions: ["gpu.busy_ratio >= 70%"], min_steps: 50}

Precedence: `--profile`, else CLUSTERPROF_PROFILE, else `clusterprof.yaml` in the
working directory, else the defaults. A profile may extend one other: a shipped one by
name, or a file in the same folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterprof.config.yaml_file import (
    KEYS,
    format_suggestion,
    list_shipped_profiles,
    read_chain,
    read_limit,
)
from clusterprof.errors import UsageError

__all__ = [
    "KEYS",
    "Profile",
    "build_limits",
    "check_collectors",
    "format_suggestion",
    "list_shipped_profiles",
    "load_profile",
    "read_chain",
    "read_limit",
]

VARIABLE = "CLUSTERPROF_PROFILE"
WORKING_DIRECTORY_FILE = "clusterprof.yaml"
DEFAULT_ORIGIN = "default"  # the origin of a value that no profile set


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
        """Return the values below a dotted prefix as nested dicts; {} when there are none."""
        section: Any = self.effective()
        for part in prefix.split("."):
            section = section.get(part, {})
        return dict(section)

    def effective(self) -> dict[str, Any]:
        """Return all values as nested dicts, the shape of a profile file."""
        nested: dict[str, Any] = {"sampling": {"collectors": {}}, "limits": {}}
        for dotted, value in self.values.items():
            *parents, last = dotted.split(".")
            parent = nested
            for part in parents:
                parent = parent.setdefault(part, {})
            parent[last] = list(value) if isinstance(value, tuple) else value
        return nested


def load_profile(name_or_path: str | None, environ: Mapping[str, str], cwd: Path) -> Profile:
    """Load the profile selected by the precedence.

    Raises: UsageError when it cannot be read or holds an invalid key or value.
    """
    selected = name_or_path or environ.get(VARIABLE) or None
    if selected is None and (cwd / WORKING_DIRECTORY_FILE).exists():
        selected = f"./{WORKING_DIRECTORY_FILE}"
    fixed_keys = [dotted for dotted in KEYS if "*" not in dotted and dotted != "extends"]
    values = {dotted: KEYS[dotted].default for dotted in fixed_keys}
    origins = dict.fromkeys(values, DEFAULT_ORIGIN)
    if selected is not None:
        for dotted, (value, origin) in read_chain(selected, cwd).items():
            values[dotted], origins[dotted] = value, origin
    return Profile(selected or DEFAULT_ORIGIN, values, origins)


def build_limits(profile: Profile, classes: Mapping[str, type]) -> dict[str, Any]:
    """Build one limits object per known cause id: the defaults of its dataclass, then the
    profile's.

    classes: cause id -> frozen dataclass whose field names carry units and whose defaults
    give the types. A limit may be written with its unit ("250 ms").
    Raises: UsageError for an unknown cause or limit, or an invalid value.
    """
    values_by_cause: dict[str, dict[str, Any]] = {cause: {} for cause in classes}
    for dotted, value in profile.values.items():
        section, _, rest = dotted.partition(".")
        if section != "limits":
            continue
        cause, _, name = rest.partition(".")
        where = profile.origins[dotted]
        if cause not in classes:
            raise UsageError(f"{where}: unknown cause {cause!r}{format_suggestion(cause, classes)}")
        fields = {field.name: field for field in dataclasses.fields(classes[cause])}
        if name not in fields:
            hint = format_suggestion(name, fields)
            raise UsageError(f"{where}: the cause {cause} has no limit {name!r}{hint}")
        values_by_cause[cause][name] = read_limit(name, value, fields[name].default, where)
    return {cause: classes[cause](**arguments) for cause, arguments in values_by_cause.items()}


def check_collectors(profile: Profile, known: Iterable[str]) -> None:
    """Check that every collector named in the profile exists.

    Raises: UsageError for an unknown collector.
    """
    names = tuple(known)
    for dotted, origin in profile.origins.items():
        if dotted.startswith("sampling.collectors."):
            name = dotted.split(".")[2]
            if name not in names:
                raise UsageError(
                    f"{origin}: unknown collector {name!r}{format_suggestion(name, names)}"
                )
