"""Format host lists in the notation of Slurm: `node[001-128]`.

    format_host_list(["gpu-a1", "gpu-a2", "gpu-a3", "gpu-a7", "login"])

returns "gpu-a[1-3,7],login".

Only one number of a name is put in brackets: if it has several, the one in which most
names differ. Zero padding is kept ("node[08-11]"), and so is a suffix
("n[1-2].cluster.example"). Names that contain characters of the notation (`[ ] ,` and
blanks) are left unchanged.

It also parses and formats lists of CPUs and NUMA nodes as the kernel writes them: "0-3,8", "" for
none.

https://docs.kernel.org/admin-guide/kernel-parameters.html ("cpu lists"), also with a
stride: "0-10:2/4" means two of every four.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

_SPECIAL_CHARACTERS = re.compile(r"[\[\],\s]")
_NUMBER = re.compile(r"[0-9]+")


def format_host_list(names: Iterable[str]) -> str:
    """Format names as one host list, sorted and without duplicates."""
    ordered = sorted(set(names), key=_make_sort_key)
    split = {name: _split_at_numbers(name) for name in ordered}
    common = Counter(ends for parts in split.values() for ends, _ in parts)
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in ordered:
        if not split[name]:
            groups[(name,)] = []
            continue
        # if several are equally common, the last number, as in rack2-node07
        ends, number = max(reversed(split[name]), key=lambda part: common[part[0]])
        groups.setdefault(ends, []).append(number)
    return ",".join(_format_group(ends, numbers) for ends, numbers in groups.items())


def format_number_list(numbers: Iterable[int]) -> str:
    """Format nonnegative numbers as ranges, sorted and without duplicates: "0-7,12"."""
    return ",".join(_join_ranges([str(number) for number in sorted(set(numbers))]))


def _make_sort_key(name: str) -> tuple[list[tuple[str, int]], str]:
    """Return a key that sorts node2 before node10 and separates two spellings of one number."""
    texts, numbers = _NUMBER.split(name), _NUMBER.findall(name)
    return [(text, int(n)) for text, n in zip(texts, [*numbers, "0"])], name


def _split_at_numbers(name: str) -> list[tuple[tuple[str, str], str]]:
    """Return every number of a name with the text before and after it."""
    if _SPECIAL_CHARACTERS.search(name):
        return []
    matches = _NUMBER.finditer(name)
    return [((name[: match.start()], name[match.end() :]), match[0]) for match in matches]


def _format_group(ends: tuple[str, ...], numbers: list[str]) -> str:
    if not numbers:
        return ends[0]
    before, after = ends
    if len(numbers) == 1:
        return before + numbers[0] + after
    return f"{before}[{','.join(_join_ranges(numbers))}]{after}"


def _join_ranges(numbers: list[str]) -> list[str]:
    """Join consecutive numbers of equal padding: 1-3 and 001-003, never 1-03."""
    ranges: list[str] = []
    first = last = ""
    for number in [*numbers, ""]:
        if first and number and number == _compute_successor(last, first):
            last = number
            continue
        if first:
            ranges.append(first if first == last else f"{first}-{last}")
        first = last = number
    return ranges


def _compute_successor(number: str, first: str) -> str:
    width = len(first) if first.startswith("0") else 0
    return str(int(number) + 1).zfill(width)


_MAX_CPU = 1 << 16  # more CPUs than any kernel is built for


def parse_cpulist(text: str) -> frozenset[int]:
    """Parse a CPU list.

    Raises: ValueError when the text is not a CPU list.
    """
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if not part:
            continue
        bounds, _, stride = part.partition(":")
        low, dash, high = bounds.partition("-")
        first = int(low)
        last = int(high) if dash else first
        used, _, group = stride.partition("/")
        if not 0 <= first <= last < _MAX_CPU:
            raise ValueError(f"{part!r} is not a range of CPUs")
        if stride and not 0 < int(used) <= int(group):
            raise ValueError(f"{part!r} is not a range of CPUs")
        for number in range(first, last + 1):
            if not stride or (number - first) % int(group) < int(used):
                numbers.add(number)
    return frozenset(numbers)


def format_cpulist(numbers: Iterable[int]) -> str:
    """Format numbers as the kernel writes them: "0-3,8"."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
