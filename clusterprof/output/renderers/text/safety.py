"""The one door through which foreign text reaches any output.

Names of hosts, processes, disks, mounts and metrics come from machines we do not control. Printed
as they are they could move the cursor, hide or reorder words, or command a CI runner. `safe_text`
makes every character visible and harmless; what it does not let through it spells out:

    safe_text("disk\\x1b[2Ja")     'disk\\\\x1b[2Ja'
    safe_text("a\\u202eb")         'a\\\\u202eb'
"""

from __future__ import annotations

import re
import unicodedata

# Letters and symbols by category that show nothing, or one thing on top of another.
_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
_UNSAFE_CATEGORIES = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
_COLONS = re.compile(r"(?<!\S)::+|:{3,}")
_HASHES = re.compile(r"##(?=[a-z]*\[)", re.IGNORECASE)  # ##[…] ##vso[…] ##teamcity[…]
_OPTION = re.compile(r"--?[A-Za-z]")
_MARKDOWN = frozenset("\\`*_[]<>#|~@&")


def safe_text(text: str, limit: int = 200) -> str:
    """Return text without a character that controls, hides or reorders; at most `limit` long.

    Control characters (C0, C1, ESC), bidirectional and zero-width marks, surrogates, private-use
    and unassigned characters are spelled out; other white space becomes a blank; variation
    selectors are left out. What CI runners obey at the start of a line (`::`) or anywhere in it
    (`##vso[`) is pulled apart, at the start of every word, because lines may be broken there.
    """
    shown = "".join(_safe_character(character) for character in text[: limit + 1])
    shown = _COLONS.sub(lambda match: " ".join(match[0]), shown)
    shown = _HASHES.sub("## ", shown)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def markdown_text(text: str, limit: int = 200) -> str:
    """Return foreign text that Markdown shows literally: no link, tag, mention or table cell.

    For the middle of a line: what is special only at its beginning is left alone.
    """
    shown = "".join(
        f"&#{ord(character)};" if character in _MARKDOWN else character
        for character in safe_text(text, limit)
    )
    return shown.replace("://", "&#58;//").replace("www.", "www&#46;")


def columns(text: str) -> int:
    """Return how many terminal columns a safe text takes: wide letters two, marks none."""
    return len(text) if text.isascii() else sum(_width(character) for character in text)


def fit(text: str, width: int) -> str:
    """Cut a safe text to a number of columns, with an ellipsis, and pad it to exactly that."""
    if columns(text) > width:
        text = _head(text, width - 1) + "…"
    return text + " " * (width - columns(text))


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Break a safe text at blanks into lines of at most `width` columns; long words are cut.

    An option ("-x", "--long") stays with the word before it, so that a command goes on behind it.
    """
    lines: list[str] = []
    line = ""
    for word in _with_options(text.split(), width):
        while columns(word) > width:
            if line:
                lines.append(line)
                line = ""
            head = _head(word, width)
            if word[len(head) :].startswith("::"):
                head = head[:-1]  # never begin a line with it: see safe_text
            lines.append(head)
            word = word[len(head) :]
        if line and columns(line) + 1 + columns(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    if line:
        lines.append(line)
    return [indent + part for part in lines]


def _with_options(words: list[str], width: int) -> list[str]:
    joined: list[str] = []
    for word in words:
        longer = f"{joined[-1]} {word}" if joined else ""
        if longer and _OPTION.match(word) and columns(longer) <= width:
            joined[-1] = longer
        else:
            joined.append(word)
    return joined


def _head(text: str, width: int) -> str:
    if text.isascii():
        return text[:width]
    taken = 0
    for index, character in enumerate(text):
        taken += _width(character)
        if taken > width:
            return text[:index]
    return text


def _safe_character(character: str) -> str:
    code = ord(character)
    if 0x20 <= code < 0x7F:
        return character
    if 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF or 0x180B <= code <= 0x180F:
        return ""
    category = unicodedata.category(character)
    if category == "Zs":
        return " "
    if category in _UNSAFE_CATEGORIES or character in _INVISIBLE:
        if code < 0x100:
            return f"\\x{code:02x}"
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return character


def _width(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


_ASCII = {
    **dict(zip(map(ord, "▁▂▃▄▅▆▇█"), "_.-:=+*#")),
    **dict(zip(map(ord, "░─·µ°…≤–—×±"), ".- ud~<--x~")),
}


def ascii_only(text: str) -> str:
    """Return a text in ASCII: our own marks as letters of the same width, all others spelled out.

    A bar is one of `_.-:=+*#`; "≤ 5 µs" becomes "< 5 us".
    """
    text = text.translate(_ASCII)
    return text if text.isascii() else text.encode("ascii", "backslashreplace").decode("ascii")
