"""Many names as few: `node[001-128]`, the notation of Slurm's host lists, and back.

    fold(["gpu-a1", "gpu-a2", "gpu-a3", "gpu-a7", "login"])    "gpu-a[1-3,7],login"
    unfold("gpu-a[1-3,7],login")                               those five names

One number of a name is folded: of several, the one in which most names differ. Zero padding is
kept ("node[08-11]"), and what follows the number too ("n[1-2].cluster.example"). Names that hold
what the notation itself uses (`[ ] ,` and blanks) are left as they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

_MOST_NAMES = 1 << 20  # of one list, when unfolded
_SPECIAL = re.compile(r"[\[\],\s]")
_NUMBER = re.compile(r"[0-9]+")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_PART = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")


def fold(names: Iterable[str]) -> str:
    """Write names, each once and in order, as one host list."""
    every = sorted(set(names), key=_in_order)
    split = {name: _splits(name) for name in every}
    common = Counter(ends for parts in split.values() for ends, _ in parts)
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in every:
        if not split[name]:
            groups[(name,)] = []
            continue
        # of equally common ones the last number, as in rack2-node07
        ends, number = max(reversed(split[name]), key=lambda part: common[part[0]])
        groups.setdefault(ends, []).append(number)
    return ",".join(_group(ends, numbers) for ends, numbers in groups.items())


def fold_numbers(numbers: Iterable[int]) -> str:
    """Write numbers that are not negative, each once and in order: "0-7,12"."""
    return ",".join(_ranges([str(number) for number in sorted(set(numbers))]))


def unfold(text: str) -> list[str]:
    """Return the names of a host list; raise ValueError when it is none, or a very long one."""
    if not text:
        return []
    names: list[str] = []
    at = 0
    while at <= len(text):
        part = _PART.match(text, at)
        if part is None:
            raise ValueError(f"{text!r} is not a host list: nothing to read at {at}")
        names += _unfolded(part[0], text)
        at = part.end() + 1
        if len(names) > _MOST_NAMES:
            raise ValueError(f"{text!r} names more than {_MOST_NAMES:,} hosts")
        if at <= len(text) and text[at - 1] != ",":
            raise ValueError(f"{text!r} is not a host list: nothing to read at {at - 1}")
    return names


def _in_order(name: str) -> tuple[list[tuple[str, int]], str]:
    """Sort node2 before node10; two spellings of one number stay apart."""
    texts, numbers = _NUMBER.split(name), _NUMBER.findall(name)
    return [(text, int(n)) for text, n in zip(texts, [*numbers, "0"])], name


def _splits(name: str) -> list[tuple[tuple[str, str], str]]:
    """Return every number of a name with what stands before and after it."""
    if _SPECIAL.search(name):
        return []
    found = _NUMBER.finditer(name)
    return [((name[: one.start()], name[one.end() :]), one[0]) for one in found]


def _group(ends: tuple[str, ...], numbers: list[str]) -> str:
    if not numbers:
        return ends[0]
    before, after = ends
    if len(numbers) == 1:
        return before + numbers[0] + after
    return f"{before}[{','.join(_ranges(numbers))}]{after}"


def _ranges(numbers: list[str]) -> list[str]:
    """Join numbers that follow each other, spelled alike: 1-3 and 001-003, never 1-03."""
    ranges: list[str] = []
    first = last = ""
    for number in [*numbers, ""]:
        if first and number and number == _after(last, first):
            last = number
            continue
        if first:
            ranges.append(first if first == last else f"{first}-{last}")
        first = last = number
    return ranges


def _after(number: str, first: str) -> str:
    width = len(first) if first.startswith("0") else 0
    return str(int(number) + 1).zfill(width)


def _unfolded(part: str, text: str) -> list[str]:
    """Return the names of one part: of several brackets all combinations, the last moving first."""
    names = [""]
    for piece in re.split(r"(\[[^\[\]]*\])", part):
        if piece.startswith("["):
            numbers = _numbers(piece[1:-1], text)
            if len(names) * len(numbers) > _MOST_NAMES:
                raise ValueError(f"{text!r} names more than {_MOST_NAMES:,} hosts")
            names = [name + number for name in names for number in numbers]
        else:
            names = [name + piece for name in names]
    return names


def _numbers(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for one in ranges.split(","):
        match = _RANGE.fullmatch(one)
        if match is None:
            raise ValueError(f"{text!r} is not a host list: {one!r} is not a number or range")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low) or int(high) - int(low) >= _MOST_NAMES:
            raise ValueError(f"{text!r} is not a host list: {one!r} runs backwards or too far")
        width = len(low) if low.startswith("0") else 0
        numbers += [str(number).zfill(width) for number in range(int(low), int(high) + 1)]
    return numbers
