"""Colours of the terminal report; without colour every brush leaves the text as it is."""

from __future__ import annotations

from dataclasses import dataclass

_CODES = {
    "bold": "1",
    "dim": "2",
    "good": "32",
    "bad": "1;31",
    "warn": "1;33",
    "heading": "1;36",
}


@dataclass(frozen=True, slots=True)
class Paint:
    """Wraps finished, already padded text in SGR codes; nothing else writes an escape."""

    on: bool

    def __call__(self, brush: str, text: str) -> str:
        return f"\x1b[{_CODES[brush]}m{text}\x1b[0m" if self.on and text else text
