"""Host lists: hand-made ones compared whole, and the reader as the inverse of the writer."""

from __future__ import annotations

import random
import re

import pytest

from clusterprof.util.ranges import format_host_list, format_number_list

_MAX_NAMES = 1 << 20  # of one list when expanding it
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_LIST_ITEM = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")


def expand_host_list(text: str) -> list[str]:
    """Expand a host list to its names.

    Raises: ValueError when the text is not a host list, or names more than 2**20 hosts.
    """
    if not text:
        return []
    names: list[str] = []
    at = 0
    while at <= len(text):
        part = _LIST_ITEM.match(text, at)
        if part is None:
            raise ValueError(f"{text!r} is not a host list: nothing to read at {at}")
        names += _expand_item(part[0], text)
        at = part.end() + 1
        if len(names) > _MAX_NAMES:
            raise ValueError(f"{text!r} names more than {_MAX_NAMES:,} hosts")
        if at <= len(text) and text[at - 1] != ",":
            raise ValueError(f"{text!r} is not a host list: nothing to read at {at - 1}")
    return names


def _expand_item(part: str, text: str) -> list[str]:
    """Expand one list item: all combinations of its brackets, the last varying fastest."""
    names = [""]
    for fragment in re.split(r"(\[[^\[\]]*\])", part):
        if fragment.startswith("["):
            numbers = _expand_ranges(fragment[1:-1], text)
            if len(names) * len(numbers) > _MAX_NAMES:
                raise ValueError(f"{text!r} names more than {_MAX_NAMES:,} hosts")
            names = [name + number for name in names for number in numbers]
        else:
            names = [name + fragment for name in names]
    return names


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise ValueError(f"{text!r} is not a host list: {item!r} is not a number or range")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low) or int(high) - int(low) >= _MAX_NAMES:
            raise ValueError(f"{text!r} is not a host list: {item!r} runs backwards or too far")
        width = len(low) if low.startswith("0") else 0
        numbers += [str(number).zfill(width) for number in range(int(low), int(high) + 1)]
    return numbers


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["node7"], "node7"),
        (["login"], "login"),
        ([f"node{n:03d}" for n in range(1, 129)], "node[001-128]"),
        (["gpu-a3", "gpu-a1", "gpu-a7", "gpu-a2", "gpu-a1"], "gpu-a[1-3,7]"),
        (["node9", "node10", "node11"], "node[9-11]"),
        (["node09", "node10", "node11"], "node[09-11]"),
        (["n099", "n100"], "n[099-100]"),
        (["n1", "n01", "n2", "n02"], "n[01,1,02,2]"),
        (["n98", "n099", "n100"], "n[98,099-100]"),
        (["a1", "b1", "a2", "login", "b3"], "a[1-2],b[1,3],login"),
        (["n1.x.example", "n2.x.example", "n3.y.example"], "n[1-2].x.example,n3.y.example"),
        (["10.0.0.9", "10.0.0.10", "10.0.0.11"], "10.0.0.[9-11]"),
        # the number in which most differ: the rack of the first, the node of the second
        (["gpu1-ib0", "gpu2-ib0", "gpu3-ib0"], "gpu[1-3]-ib0"),
        ([f"r{r}n{n}" for r in (1, 2) for n in (1, 2, 3)], "r1n[1-3],r2n[1-3]"),
        (["0", "1", "5"], "[0-1,5]"),
        (["login", "login1", "login2"], "login,login[1-2]"),
        (["a[1-2]", "b c", "d,e", "n1", "n2"], "a[1-2],b c,d,e,n[1-2]"),
    ],
)
def test_host_lists_are_formatted_as_ranges(names: list[str], text: str) -> None:
    assert format_host_list(names) == text


def test_numbers_are_formatted_as_ranges() -> None:
    assert format_number_list([12, 0, 1, 2, 2, 13]) == "0-2,12-13"
    assert format_number_list([]) == ""


def test_slurm_host_lists_are_expanded() -> None:
    assert expand_host_list("rack[1-2]node[08-10],login") == [
        "rack1node08",
        "rack1node09",
        "rack1node10",
        "rack2node08",
        "rack2node09",
        "rack2node10",
        "login",
    ]


def names_of(chance: random.Random) -> list[str]:
    """Names as clusters have them, and some that nobody would give."""
    stems = chance.sample(["node", "gpu-a", "login", "r1-n", "", "10.0.0.", "x9y", "é"], 3)
    ends = chance.choice([[""], ["", ".a.example"], ["-ib0", "-ib1"], ["", "b", "0"]])
    width = chance.choice([0, 0, 2, 3, 5])
    highest = chance.choice([3, 12, 120, 100_000])
    numbers = [str(chance.randrange(highest)).zfill(width) for _ in range(chance.randrange(40))]
    return [chance.choice(stems) + n + chance.choice(ends) for n in numbers] + ["login"]


def test_expanding_reverses_formatting_of_host_lists() -> None:
    for seed in range(3000):
        names = names_of(random.Random(seed))
        text = format_host_list(names)
        assert sorted(expand_host_list(text)) == sorted(set(names)), text
        assert format_host_list(expand_host_list(text)) == text
        assert format_host_list(reversed(names)) == text


@pytest.mark.parametrize(
    "text",
    [
        "a,",
        ",a",
        "a,,b",
        "a[1",
        "a]",
        "a[]",
        "a[2-1]",
        "a[1-]",
        "a[x]",
        "a[1-9999999]",
        "a[1-9999][1-9999]",
        "a[[1]]",
    ],
)
def test_an_invalid_host_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="host"):
        expand_host_list(text)
