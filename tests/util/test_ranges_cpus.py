"""Lists of CPUs, as the kernel writes them and as it must not."""

from __future__ import annotations

import pytest

from clusterprof.util.ranges import format_cpulist, parse_cpulist


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", []),
        ("\n", []),
        ("3\n", [3]),
        ("0-3,8,10-11", [0, 1, 2, 3, 8, 10, 11]),
        ("0-10:2/4", [0, 1, 4, 5, 8, 9]),
        ("1,", [1]),
    ],
)
def test_cpu_lists_are_parsed(text: str, numbers: list[int]) -> None:
    assert sorted(parse_cpulist(text)) == numbers


@pytest.mark.parametrize("text", ["all", "3-1", "-1", "0-99999999999", "1-", "0-3:0/4", "0-3:5/4"])
def test_an_invalid_cpu_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_cpulist(text)


def test_cpu_lists_are_formatted_in_kernel_syntax() -> None:
    assert format_cpulist([11, 3, 0, 1, 2, 8, 10, 1]) == "0-3,8,10-11"
    assert format_cpulist([]) == ""
