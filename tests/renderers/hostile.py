"""Strings that a hostile machine could use as the name of a host, process, disk or mount."""

from __future__ import annotations

_SINGLE = [chr(code) for code in (*range(0x00, 0x20), *range(0x7F, 0xA0))]
_INVISIBLE = [
    "\u00ad", "\u034f", "\u061c", "\u115f", "\u17b4", "\u180e", "\u200b", "\u200c", "\u200d",
    "\u200e", "\u200f", "\u2028", "\u2029", "\u202a", "\u202b", "\u202c", "\u202d", "\u202e",
    "\u2060", "\u2061", "\u2066", "\u2067", "\u2068", "\u2069", "\u206f", "\u2800", "\u3164",
    "\ufe0f", "\ufeff", "\uffa0", "\ufff9", "\uffff", "\ue000", "\ud800", "\udc9b", "\udfff",
    "\U000e0001", "\U000e0041", "\U000e0100", "\U0010ffff",
]  # fmt: skip
_WHOLE = [
    "\x1b[2J\x1b[H",
    "\x1b]0;owned\x07",
    "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "\x9b31m",
    "\x1bP1$r\x1b\\",
    "[/]",
    "[bold red]",
    "[link=http://evil.example]click[/link]",
    "data[bold]",
    "a\r\nb",
    "::error file=x::owned",
    "  ::set-output name=x::1",
    "\n::add-mask::x",
    "##[error]owned",
    "::",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[click](http://evil.example)",
    "![x](http://evil.example/x.png)",
    "https://evil.example/",
    "www.evil.example",
    "@everyone",
    "#1",
    "| a | b |",
    "`code`",
    "**bold**",
    "=cmd|' /C calc'!A0",
    "%s%n%x",
    "{0.__class__}",
    "$(id)",
    "\\x1b[2J",
    "漢字" * 60,
    "e\u0301" * 300,
    "a" * 5000,
    "a b " * 2000,
    "",
    " ",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
]

HOSTILE: list[str] = [
    *(f"a{character}b" for character in _SINGLE),
    *(f"a{character}b" for character in _INVISIBLE),
    *_INVISIBLE,
    *(f"{'x' * number}::error::x" for number in range(15)),
    *(f"{character}::error::x" for character in [*_SINGLE, *_INVISIBLE]),
    *_WHOLE,
]
