"""The one door through which foreign text reaches any output.

Names of hosts, processes, disks, mounts and metrics come from machines we do not control. Printed
as they are they could move the cursor, hide or reorder words, or command a CI runner. `safe_text`
makes every character visible and harmless; what it does not let through it spells out:

    safe_text("disk\\x1b[2Ja")     'disk\\\\x1b[2Ja'
    safe_text("a\\u202eb")         'a\\\\u202eb'
"""

from __future__ import annotations

import unicodedata

# Letters and symbols by category that show nothing, or one thing on top of another.
_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
_UNSAFE_CATEGORIES = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
_MARKDOWN = frozenset("\\`*_[]<>#|~@&")


def safe_text(text: str, limit: int = 200) -> str:
    """Return text without a character that controls, hides or reorders; at most `limit` long.

    Control characters (C0, C1, ESC), bidirectional and zero-width marks, surrogates, private-use
    and unassigned characters are spelled out; other white space becomes a blank; variation
    selectors are left out; `::` at the start and `##[`, which CI runners obey, are pulled apart.
    """
    shown = "".join(_safe_character(character) for character in text[: limit + 1])
    shown = shown.replace("##[", "## [")
    if shown.lstrip().startswith("::"):
        shown = shown.replace("::", ": :", 1)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def safe_line(line: str) -> str:
    """Return a whole line of output that no CI runner takes for a command (`::error::…`)."""
    return line.replace("::", ": :", 1) if line.lstrip().startswith("::") else line


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
    return sum(_width(character) for character in text)


def fit(text: str, width: int) -> str:
    """Cut a safe text to a number of columns, with an ellipsis, and pad it to exactly that."""
    if columns(text) > width:
        kept = ""
        for character in text:
            if columns(kept) + _width(character) > width - 1:
                break
            kept += character
        text = kept + "…"
    return text + " " * (width - columns(text))


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Break a safe text at blanks into lines of at most `width` columns; long words are cut."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        while columns(word) > width:
            if line:
                lines.append(line)
                line = ""
            head = fit(word, width + 1).rstrip().removesuffix("…")
            lines.append(head)
            word = word[len(head) :]
        if line and columns(line) + 1 + columns(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    if line:
        lines.append(line)
    return [safe_line(indent + part) for part in lines]


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
