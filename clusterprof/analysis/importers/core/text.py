"""Foreign files of lines and of one JSON value: read in blocks, and what is broken is left out.

    for line in lines_of(source, account): ...
    value = json_of(line)

Nothing here raises for what stands in a file; a whole file that is no JSON is a CannotImportError.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from clusterprof.importers.base import Account, CannotImportError, Source

LINE_BYTES_AT_MOST = 1 << 20
WHOLE_BYTES_AT_MOST = 64 << 20
"""A file that is one JSON value is held in memory; none of those we read is near this."""
HELD_BYTES_AT_MOST = 192 << 20
_HELD = ((b"{", 150), (b"[", 80), (b",", 60), (b":", 100))
"""What values take in memory, by the signs they are written with: `[[],[],[]]` thirty times its
size."""
TIME_AT_MOST_NS = 1 << 62
_BETWEEN = re.compile(r"[\s,]*")


def lines_of(source: Source, account: Account) -> Iterator[bytes]:
    """Yield the lines of a file without their ends; those over 1 MiB are counted and left out."""
    rest, skipping = b"", False
    for block in source.blocks(1 << 20):
        *whole, last = (rest + block).split(b"\n")
        if whole and skipping:
            whole, skipping = whole[1:], False
        for line in whole:
            if len(line) > LINE_BYTES_AT_MOST:
                account.skipped["lines of more than 1 MiB"] += 1
            else:
                yield line
        rest = b"" if skipping else last
        if len(rest) > LINE_BYTES_AT_MOST:
            account.skipped["lines of more than 1 MiB"] += 1
            rest, skipping = b"", True
    if rest:
        yield rest


def json_of(data: bytes | bytearray) -> Any:
    """Return the value of some JSON, None of what is none; NaN and bad UTF-8 are let pass."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None


def whole_bytes(source: Source, most: int = WHOLE_BYTES_AT_MOST) -> bytearray:
    """Return a file that is one JSON value.

    Raises CannotImportError for one that is too long, or whose values would fill the memory.
    """
    data = bytearray()
    for block in source.blocks(1 << 20):
        data += block
        if len(data) > most:
            raise CannotImportError(
                f"{source.path.name}: more than {most >> 20} MiB of JSON in one value",
                "leave it out",
            )
    if held_bytes(data) > HELD_BYTES_AT_MOST:
        raise CannotImportError(
            f"{source.path.name}: one JSON value whose parts take more than"
            f" {HELD_BYTES_AT_MOST >> 20} MiB of memory", "leave it out",
        )  # fmt: skip
    return data


def held_bytes(data: bytes | bytearray) -> int:
    """Return what the values of some JSON take in memory, at most."""
    return 2 * len(data) + sum(held * data.count(sign) for sign, held in _HELD)


def whole_json(source: Source) -> Any:
    """Return the one value of a file. Raises CannotImportError for what is too large or no JSON."""
    found = json_of(whole_bytes(source))
    if found is None:
        why = source.damage or "broken, or cut off"
        raise CannotImportError(f"{source.path.name}: no JSON ({why})", "copy it again")
    return found


def number(value: Any) -> float | None:
    """Return a finite number, None of all else; text, true and false are no numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def text_number(text: str) -> float | None:
    """Return the finite number that some digits write, None of all else."""
    try:
        return number(float(text))
    except ValueError:
        return None


def whole_ns(value: Any, unit_ns: int) -> int | None:
    """Return a time in whole ns, exact where it was a whole number; None of what is no time."""
    known = number(value)
    if known is None or abs(known) > TIME_AT_MOST_NS / unit_ns:
        return None
    return int(value) * unit_ns if isinstance(value, int) else round(value * unit_ns)


def objects_of(source: Source, account: Account) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file that is a list of them, each as soon as it is whole."""
    decoder = json.JSONDecoder()
    buffer, at, begun = "", 0, False
    for block in source.blocks(1 << 20):
        buffer, at = buffer[at:] + block.decode("utf-8", "replace"), 0
        while True:
            between = _BETWEEN.match(buffer, at)
            at = between.end() if between else at  # it matches nothing, too
            if not begun:
                at, begun = at + buffer.startswith("[", at), True
                continue
            if at >= len(buffer) or buffer[at] == "]":
                break
            try:
                found, at = decoder.raw_decode(buffer, at)
            except (ValueError, RecursionError):
                break
            if isinstance(found, dict):
                yield found
            else:
                account.skipped["entries that are no object"] += 1
        if len(buffer) - at > 8 * LINE_BYTES_AT_MOST:
            break
    if buffer[at:].strip(" \t\r\n,]"):
        account.cut = account.cut or "broken, or cut off; what came before was read"
