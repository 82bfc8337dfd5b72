"""Foreign text is made harmless, and stays readable."""

from __future__ import annotations

import unicodedata

import pytest

from clusterprof.output.renderers.text.safety import (
    count_columns,
    escape_markdown,
    escape_text,
    fit_to_width,
    wrap_text,
)
from tests.support.hostile_names import HOSTILE


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("vda", "vda"),
        ("/data/größe 1", "/data/größe 1"),
        ("disk\x1b[2Ja", "disk\\x1b[2Ja"),
        ("a\u202eb", "a\\u202eb"),
        ("a\x9b31m", "a\\x9b31m"),
        ("a\nb\tc", "a\\x0ab\\x09c"),
        ("a\ud800b", "a\\ud800b"),
        ("a\u00a0b\u3000c", "a b c"),
        ("heart\ufe0f", "heart"),
        ("\U000e0041", "\\U000e0041"),
        ("fe80::1", "fe80::1"),
        ("::error::x", ": :error::x"),
        ("a ::b::c", "a : :b::c"),
        ("a:::b", "a: : :b"),
        ("x ##[error]y", "x ## [error]y"),
    ],
)
def test_unsafe_characters_are_escaped_visibly(text: str, safe: str) -> None:
    assert escape_text(text) == safe


def test_the_corpus_has_at_least_300_strings() -> None:
    assert len(HOSTILE) >= 300


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_escaped_corpus_strings_contain_no_control_characters(text: str) -> None:
    shown = escape_text(text)
    unsafe = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    assert [c for c in shown if unicodedata.category(c) in unsafe] == []
    assert len(shown) <= 200
    assert not shown.lstrip().startswith("::")
    shown.encode("utf-8")  # a lone surrogate would raise


def test_every_unicode_character_is_escaped_safely() -> None:
    everything = escape_text("".join(map(chr, range(0x110000))), 10**8)
    unsafe = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    assert {c for c in set(everything) if unicodedata.category(c) in unsafe} == set()


def test_a_long_text_ends_with_an_ellipsis() -> None:
    assert escape_text("abcdef", 5) == "abcd…"
    assert escape_text("abcde", 5) == "abcde"


def test_wide_letters_count_two_columns_and_combining_marks_none() -> None:
    assert [count_columns("ab"), count_columns("漢字"), count_columns("e\u0301")] == [2, 4, 1]
    assert (
        fit_to_width("漢字漢字", 6) == "漢字… "
    )  # 2 + 2 + 1 and a blank: a third letter would make 7
    assert fit_to_width("ab", 4) == "ab  "


def test_wrapping_keeps_the_width_for_any_text() -> None:
    assert wrap_text("aaa bbb ccc", 7) == ["aaa bbb", "ccc"]
    assert wrap_text("abcdefghij k", 4, "  ") == ["  abcd", "  efgh", "  ij k"]
    for text in HOSTILE:
        assert all(count_columns(line) <= 20 for line in wrap_text(escape_text(text, 6000), 20))


def test_wrapped_lines_never_become_ci_workflow_commands() -> None:
    assert wrap_text(escape_text("aaaa ::error::x"), 12) == ["aaaa :", ":error::x"]
    assert wrap_text(escape_text("aaaa::b"), 4) == ["aaa", "a::b"]  # not aaaa and ::b
    assert wrap_text(escape_text(":" * 9), 4) == [": :", ": :", ": :", ": :", ":"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[a](http://x)", "&#91;a&#93;(http&#58;//x)"),
        ("a|b", "a&#124;b"),
        ("<b>", "&#60;b&#62;"),
        ("@all #1 &amp;", "&#64;all &#35;1 &#38;amp;"),
        ("www.x.org", "www&#46;x.org"),
        ("snake_case `x`", "snake&#95;case &#96;x&#96;"),
    ],
)
def test_markdown_shows_escaped_text_literally(text: str, shown: str) -> None:
    assert escape_markdown(text) == shown
