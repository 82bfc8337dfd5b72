"""From a profile's YAML to (value, origin) by dotted key, with the line in every complaint."""

from __future__ import annotations

import os
import stat
from importlib import resources
from importlib.abc import Traversable
from pathlib import Path
from typing import Any

from clusterprof.errors import UsageError
from clusterprof.profiles.keys import KEYS, nearest

MAX_BYTES = 64 * 1024
MAX_NESTING = 8
MAX_CHAIN = 8  # profiles that extend each other
Leaves = dict[str, tuple[Any, str]]
"""Dotted key -> (value, origin such as "profiles/ci.yaml:12")."""


def read_chain(name_or_path: str, folder: Path) -> Leaves:
    """Return the leaves of a profile laid over those of the profiles it extends.

    A name without a slash or a YAML suffix is a shipped profile, everything else a file, relative
    to `folder`.
    """
    layers: list[Leaves] = []
    seen: list[str] = []
    wanted: str | None = name_or_path
    where = ""
    while wanted is not None:
        text, label, identity, folder = _open(wanted, folder, where)
        if identity in seen or len(seen) >= MAX_CHAIN:
            raise UsageError(f"{where}: profiles extend each other in a circle or too deeply")
        seen.append(identity)
        leaves = _read_document(text, label)
        wanted, where = leaves.pop("extends", (None, ""))
        layers.append(leaves)
    merged: Leaves = {}
    for leaves in reversed(layers):
        merged.update(leaves)
    return merged


def shipped_names() -> tuple[str, ...]:
    """Return the names of the profiles that come with clusterprof, sorted."""
    names = (entry.name for entry in _shipped_folder().iterdir())
    return tuple(sorted(name[:-5] for name in names if name.endswith(".yaml")))


def _shipped_folder() -> Traversable:
    """The wheel carries the profiles inside the package; a checkout has them at its root."""
    inside = resources.files("clusterprof") / "_profiles"
    if inside.is_dir():
        return inside
    return Path(__file__).resolve().parents[2] / "profiles"


def _open(wanted: str, folder: Path, where: str) -> tuple[bytes, str, str, Path]:
    """Return text, the label for messages, an identity, and the folder of what it extends."""
    prefix = f"{where}: " if where else ""
    if "/" not in wanted and not wanted.endswith((".yaml", ".yml")):
        names = shipped_names()
        if wanted not in names:
            raise UsageError(
                f"{prefix}unknown profile {wanted!r}{nearest(wanted, names)}",
                "give the name of a shipped profile, or a path that ends in .yaml",
            )
        text = (_shipped_folder() / f"{wanted}.yaml").read_bytes()
        return text, f"profiles/{wanted}.yaml", f"shipped {wanted}", folder
    path = folder / Path(wanted).expanduser()
    try:
        # O_NONBLOCK: a FIFO put where a profile is expected must not stop us
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(f"{prefix}the profile {wanted} is not a regular file")
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(f"{prefix}cannot read the profile {wanted}: {reason}") from None
    return text, wanted.removeprefix("./"), str(path.resolve()), path.parent


def _read_document(text: bytes, label: str) -> Leaves:
    import yaml  # late: a recording without a profile never needs it

    if len(text) > MAX_BYTES:
        raise UsageError(f"{label}: a profile may have at most {MAX_BYTES >> 10} KiB")

    class Loader(yaml.SafeLoader):
        nesting = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            line = self.peek_event().start_mark.line + 1
            if self.check_event(yaml.AliasEvent):
                raise UsageError(f"{label}:{line}: aliases are refused in a profile")
            self.nesting += 1
            if self.nesting > MAX_NESTING:
                raise UsageError(f"{label}:{line}: nested too deeply")
            node = super().compose_node(parent, index)
            self.nesting -= 1
            return node

    leaves: Leaves = {}
    try:
        loader = Loader(text.decode("utf-8"))
        root = loader.get_single_node()
        if root is not None:
            _walk(loader, root, (), label, leaves)
    except UnicodeDecodeError:
        raise UsageError(f"{label}: is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", "not YAML")
        raise UsageError(f"{label}{at}: {problem}") from None
    return leaves


def _walk(loader: Any, node: Any, path: tuple[str, ...], label: str, leaves: Leaves) -> None:
    """Put the leaves below a node into `leaves`, or complain with the line."""
    import yaml

    origin = f"{label}:{node.start_mark.line + 1}"
    here = ".".join(path)
    pattern = _pattern_of(path)
    if pattern is not None:
        if here in leaves:
            raise UsageError(f"{origin}: {here} is set twice")
        leaves[here] = (_read_value(loader, node, pattern, f"{origin}: {here}"), origin)
        return
    if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null":
        return  # a section whose keys are all comments
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(f"{origin}: {here or 'a profile'} must be a mapping of keys to values")
    known = _children_of(path)
    for key_node, value_node in node.value:
        line = f"{label}:{key_node.start_mark.line + 1}"
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if key is None or "." in key or ("*" not in known and key not in known):
            name = ".".join((*path, str(key)))
            raise UsageError(f"{line}: unknown key {name!r}{nearest(str(key), known)}")
        _walk(loader, value_node, (*path, key), label, leaves)


def _read_value(loader: Any, node: Any, pattern: str, where: str) -> Any:
    read = KEYS[pattern].read
    try:
        return read(loader.construct_object(node, deep=True))
    except ValueError as error:  # of our own readers, or of int() on a number of 64 KiB
        raise UsageError(f"{where} {error}") from None


def _matches(pattern: str, path: tuple[str, ...]) -> bool:
    """True when the path is the beginning of the pattern, or the whole of it."""
    parts = pattern.split(".")
    return len(parts) >= len(path) and all(
        part in ("*", key) for part, key in zip(parts, path, strict=False)
    )


def _pattern_of(path: tuple[str, ...]) -> str | None:
    whole = [p for p in KEYS if p.count(".") + 1 == len(path) and _matches(p, path)]
    return whole[0] if whole else None


def _children_of(path: tuple[str, ...]) -> set[str]:
    deeper = [p.split(".") for p in KEYS if _matches(p, path)]
    return {parts[len(path)] for parts in deeper if len(parts) > len(path)}
