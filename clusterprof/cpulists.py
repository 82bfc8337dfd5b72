"""Lists of CPUs and NUMA nodes as the kernel writes them: "0-3,8", "" for none.

https://docs.kernel.org/admin-guide/kernel-parameters.html ("cpu lists"), also with a stride:
"0-10:2/4" names two of every four.
"""

from __future__ import annotations

from collections.abc import Iterable

_MOST = 1 << 16  # more than any kernel is built for: what says so is no list


def parse_cpulist(text: str) -> frozenset[int]:
    """Return the numbers of a list; raise ValueError when it is not one."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if not part:
            continue
        span, _, stride = part.partition(":")
        low, dash, high = span.partition("-")
        first = int(low)
        last = int(high) if dash else first
        used, _, group = stride.partition("/")
        if not 0 <= first <= last < _MOST:
            raise ValueError(f"{part!r} is no range of CPUs")
        if stride and not 0 < int(used) <= int(group):
            raise ValueError(f"{part!r} is no range of CPUs")
        for number in range(first, last + 1):
            if not stride or (number - first) % int(group) < int(used):
                found.add(number)
    return frozenset(found)


def cpulist(numbers: Iterable[int]) -> str:
    """Return numbers as the kernel would write them."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
