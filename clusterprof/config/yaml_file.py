"""Define the keys of a profile: the type of each value, and its default.

It also parses a profile's YAML to (value, origin) by dotted key, with the line in every error.
"""

from __future__ import annotations

import difflib
import math
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterprof.errors import UsageError
from clusterprof.units import infer_unit, parse_quantity

if TYPE_CHECKING:
    from importlib.abc import Traversable  # moved in 3.11, and gone from here in 3.14


@dataclass(frozen=True, slots=True)
class Key:
    """Default and parser of one key; the parser returns the value or raises ValueError."""

    default: Any
    parse: Callable[[Any], Any]


def format_suggestion(word: str, candidates: Iterable[str]) -> str:
    """Return '; did you mean "x"?' for a word close to a known one, else the known words."""
    choices = [str(choice) for choice in candidates]
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; choose from {', '.join(sorted(choices)[:12])}" if choices else ""


def _make_number_parser(at_least: float, at_most: float = math.inf) -> Callable[[Any], float]:
    def read(raw: Any) -> float:
        if isinstance(raw, bool) or not isinstance(raw, (int, float)) or not math.isfinite(raw):
            raise ValueError("must be a number")
        if not at_least <= raw <= at_most:
            limit = f"from {at_least:g} to {at_most:g}" if math.isfinite(at_most) else "0 or more"
            raise ValueError(f"must be {limit}")
        return float(raw)

    return read


def _parse_optional_number(raw: Any) -> float | None:
    return None if raw is None else _make_number_parser(0)(raw)


def _parse_count(raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or raw < 0:
        raise ValueError("must be a whole number, 0 or more")
    return raw


def _parse_size(raw: Any) -> int:
    if not isinstance(raw, str):
        return _parse_count(raw)
    value, unit = parse_quantity(raw)
    if unit not in ("bytes", "") or value < 0 or value != int(value):
        raise ValueError("must be a size such as 64 MiB")
    return int(value)


def _parse_ratio(raw: Any) -> float:
    if isinstance(raw, str):
        raw, unit = parse_quantity(raw)
        if unit not in ("ratio", ""):
            raise ValueError("must be a ratio such as 0.9 or 90%")
    return _make_number_parser(0, 1)(raw)


def _parse_boolean(raw: Any) -> bool:
    if not isinstance(raw, bool):
        raise ValueError("must be true or false")
    return raw


def _parse_boolean_or_auto(raw: Any) -> bool | str:
    if raw != "auto" and not isinstance(raw, bool):
        raise ValueError("must be true, false or auto")
    return bool(raw) if isinstance(raw, bool) else "auto"


def _parse_text(raw: Any) -> str:
    if not isinstance(raw, str):
        raise ValueError("must be text")
    return raw


def _parse_texts(raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(item, str) for item in raw):
        raise ValueError("must be a list of texts, each in quotes")
    return tuple(raw)


def _make_choice_parser(*words: str) -> Callable[[Any], str]:
    def read(raw: Any) -> str:
        if raw not in words:
            raise ValueError(
                f"must be one of {', '.join(words)}{format_suggestion(str(raw), words)}"
            )
        return str(raw)

    return read


def _parse_limit(raw: Any) -> Any:
    if not isinstance(raw, (bool, int, float, str)):
        raise ValueError("must be a number, or a number with its unit")
    return raw


KEYS: dict[str, Key] = {
    "extends": Key("", _parse_text),
    "sampling.hz": Key(10.0, _make_number_parser(0.01, 1000)),
    "sampling.gpm": Key("auto", _parse_boolean_or_auto),
    "sampling.collectors.*.enabled": Key(True, _parse_boolean),
    "sampling.collectors.*.hz": Key(None, _make_number_parser(0.001, 1000)),
    "recording.segment_bytes": Key(64 << 20, _parse_size),
    "recording.max_bytes": Key(2 << 30, _parse_size),
    "recording.keep_free_bytes": Key(256 << 20, _parse_size),
    "recording.live_helper": Key(True, _parse_boolean),
    "metrics.to": Key((), _parse_texts),
    "metrics.interval_s": Key(15, _parse_count),
    "stacks.enabled": Key(True, _parse_boolean),
    "stacks.paths": Key("full", _make_choice_parser("full", "hash", "names")),
    "facts.gpu_price_per_hour": Key(None, _parse_optional_number),
    "facts.currency": Key("USD", _parse_text),
    "limits.*.*": Key(None, _parse_limit),
    "gate.assertions": Key((), _parse_texts),
    "gate.regressions": Key((), _parse_texts),
    "gate.min_steps": Key(20, _parse_count),
    "gate.min_coverage_ratio": Key(0.9, _parse_ratio),
    "gate.max_damaged_bytes": Key(64 << 10, _parse_size),
    "gate.max_dropped_spans": Key(100, _parse_count),
    "gate.min_ranks_ratio": Key(1.0, _parse_ratio),
    "gate.between_runs_ratio": Key(0.005, _parse_ratio),
    "gate.aggregate": Key("median", _make_choice_parser("median", "pessimistic", "optimistic")),
    "gate.allow_unlike": Key((), _parse_texts),
    "gate.on_inconclusive": Key("fail", _make_choice_parser("fail", "warn", "pass")),
}


def read_limit(name: str, raw: Any, default: Any, where: str) -> Any:
    """Parse a limit to the type of its default.

    Raises: UsageError with the value's origin when it is invalid.
    """
    try:
        if isinstance(raw, str) and not isinstance(default, str):
            raw, unit = parse_quantity(raw)
            if unit and unit != infer_unit(name):
                raise ValueError(f"is given in {unit}, but {name} is in {infer_unit(name)}")
            raw = int(raw) if isinstance(default, int) and raw == int(raw) else raw
        if isinstance(default, float):
            return _make_number_parser(0)(raw)
        if isinstance(raw, bool) is not isinstance(default, bool) or not isinstance(
            raw, type(default)
        ):
            raise ValueError(f"must have the type of its default, {default!r}")
    except ValueError as error:
        raise UsageError(f"{where}: the limit {name} {error}") from None
    return raw


MAX_BYTES = 64 * 1024
MAX_NESTING = 8
MAX_EXTENDED_PROFILES = 8  # length of a chain of profiles that extend each other
ProfileValues = dict[str, tuple[Any, str]]
"""Dotted key -> (value, origin such as "profiles/ci.yaml:12")."""


def read_chain(name_or_path: str, folder: Path) -> ProfileValues:
    """Read a profile merged with the profiles it extends.

    A name without a slash or a YAML suffix is a shipped profile, everything else a file
    relative to `folder`.
    Raises: UsageError for a cycle, an unreadable profile, or an invalid key or value.
    """
    layers: list[ProfileValues] = []
    paths_read: list[str] = []
    wanted: str | None = name_or_path
    where = ""
    while wanted is not None:
        text, label, identity, folder = _read_profile_file(wanted, folder, where)
        if identity in paths_read or len(paths_read) >= MAX_EXTENDED_PROFILES:
            raise UsageError(f"{where}: profiles extend each other in a cycle or too deeply")
        paths_read.append(identity)
        leaves = _read_document(text, label)
        wanted, where = leaves.pop("extends", (None, ""))
        layers.append(leaves)
    merged: ProfileValues = {}
    for leaves in reversed(layers):
        merged.update(leaves)
    return merged


def list_shipped_profiles() -> tuple[str, ...]:
    """List the names of the profiles shipped with clusterprof, sorted."""
    names = (entry.name for entry in _locate_shipped_folder().iterdir())
    return tuple(sorted(name[:-5] for name in names if name.endswith(".yaml")))


def _locate_shipped_folder() -> Traversable:
    """Return the folder of shipped profiles: inside the package in a wheel, at the root of a
    checkout.
    """
    inside = resources.files("clusterprof") / "_profiles"
    if inside.is_dir():
        return inside
    return Path(__file__).resolve().parents[2] / "profiles"


def _read_profile_file(wanted: str, folder: Path, where: str) -> tuple[bytes, str, str, Path]:
    """Return text, label for messages, identity, and the folder for a profile it extends."""
    prefix = f"{where}: " if where else ""
    if "/" not in wanted and not wanted.endswith((".yaml", ".yml")):
        names = list_shipped_profiles()
        if wanted not in names:
            raise UsageError(
                f"{prefix}unknown profile {wanted!r}{format_suggestion(wanted, names)}",
                "give the name of a shipped profile, or a path that ends in .yaml",
            )
        text = (_locate_shipped_folder() / f"{wanted}.yaml").read_bytes()
        return text, f"profiles/{wanted}.yaml", f"shipped {wanted}", folder
    path = folder / Path(wanted).expanduser()
    try:
        # O_NONBLOCK: a FIFO in place of a profile must not block us
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(f"{prefix}the profile {wanted} is not a regular file")
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(f"{prefix}cannot read the profile {wanted}: {reason}") from None
    return text, wanted.removeprefix("./"), str(path.resolve()), path.parent


def _read_document(text: bytes, label: str) -> ProfileValues:
    import yaml  # imported late: a recording without a profile never needs it

    if len(text) > MAX_BYTES:
        raise UsageError(f"{label}: a profile may have at most {MAX_BYTES >> 10} KiB")

    class Loader(yaml.SafeLoader):
        nesting = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            line = self.peek_event().start_mark.line + 1
            if self.check_event(yaml.AliasEvent):
                raise UsageError(f"{label}:{line}: aliases are not allowed in a profile")
            self.nesting += 1
            if self.nesting > MAX_NESTING:
                raise UsageError(f"{label}:{line}: nested too deeply")
            node = super().compose_node(parent, index)
            self.nesting -= 1
            return node

    leaves: ProfileValues = {}
    try:
        loader = Loader(text.decode("utf-8"))
        root = loader.get_single_node()
        if root is not None:
            _collect_values(loader, root, (), label, leaves)
    except UnicodeDecodeError:
        raise UsageError(f"{label}: is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        location = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", "not YAML")
        raise UsageError(f"{label}{location}: {problem}") from None
    return leaves


def _collect_values(
    loader: Any, node: Any, path: tuple[str, ...], label: str, leaves: ProfileValues
) -> None:
    """Collect the values below a node into `leaves`."""
    import yaml

    origin = f"{label}:{node.start_mark.line + 1}"
    dotted = ".".join(path)
    pattern = _find_pattern(path)
    if pattern is not None:
        if dotted in leaves:
            raise UsageError(f"{origin}: {dotted} is set twice")
        leaves[dotted] = (_read_value(loader, node, pattern, f"{origin}: {dotted}"), origin)
        return
    if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null":
        return  # a section whose keys are all comments
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(f"{origin}: {dotted or 'a profile'} must be a mapping of keys to values")
    child_keys = _list_child_keys(path)
    for key_node, value_node in node.value:
        line = f"{label}:{key_node.start_mark.line + 1}"
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if key is None or "." in key or ("*" not in child_keys and key not in child_keys):
            name = ".".join((*path, str(key)))
            raise UsageError(
                f"{line}: unknown key {name!r}{format_suggestion(str(key), child_keys)}"
            )
        _collect_values(loader, value_node, (*path, key), label, leaves)


def _read_value(loader: Any, node: Any, pattern: str, where: str) -> Any:
    read = KEYS[pattern].parse
    try:
        return read(loader.construct_object(node, deep=True))
    except OverflowError:
        raise UsageError(f"{where} is too large") from None
    except ValueError as error:  # raised by our own parsers, or by int() on a number of 64 KiB
        raise UsageError(f"{where} {error}") from None


def _match_path(pattern: str, path: tuple[str, ...]) -> bool:
    """Return whether the path is a prefix of the pattern, or all of it."""
    parts = pattern.split(".")
    return len(parts) >= len(path) and all(
        part in ("*", key) for part, key in zip(parts, path, strict=False)
    )


def _find_pattern(path: tuple[str, ...]) -> str | None:
    matches = [p for p in KEYS if p.count(".") + 1 == len(path) and _match_path(p, path)]
    return matches[0] if matches else None


def _list_child_keys(path: tuple[str, ...]) -> set[str]:
    deeper = [p.split(".") for p in KEYS if _match_path(p, path)]
    return {parts[len(path)] for parts in deeper if len(parts) > len(path)}
