"""Escaping of foreign text, which every output must use.

Names of hosts, processes, disks, mounts and metrics come from machines we do not control. Printed
as they are they could move the cursor, hide or reorder words, or command a CI runner. `escape_text`
leaves visible, harmless characters as they are and escapes all others:

    escape_text("disk\\x1b[2Ja")     'disk\\\\x1b[2Ja'
    escape_text("a\\u202eb")         'a\\\\u202eb'
"""

from __future__ import annotations

import re
import unicodedata

# Letters and symbols by category, but with no glyph or drawn on top of another character.
_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
_UNSAFE_CATEGORIES = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
_COLONS = re.compile(r"(?<!\S)::+|:{3,}")
_HASHES = re.compile(r"##(?=[a-z]*\[)", re.IGNORECASE)  # ##[…] ##vso[…] ##teamcity[…]
_ATTACHED = re.compile(
    r"--?[A-Za-z]|%|±|sure\)"
)  # an option, or the rest of "(95 % sure)", "5 % ± 1"
NONBREAKING_BLANK = "\ue000"
"""One column wide, and in no safe text: stands for a blank at which `wrap_text` breaks no line."""
ASCII_WORDS = str.maketrans(
    {"µ": "u", "°": "degrees ", "…": "...", "≤": "at most ", "→": "->", "±": "+-"}
)
"""Our own marks as words or letters of ASCII, where no columns are to be kept."""
_MARKDOWN_SPECIAL = frozenset("\\`*_[]<>#|~@&")


def escape_text(text: str, limit: int = 200) -> str:
    """Escape characters that control, hide or reorder text, and cut it to `limit` characters.

    Control characters (C0, C1, ESC), bidirectional and zero-width marks, surrogates,
    private-use and unassigned characters are replaced by their hexadecimal code; other
    white space becomes a blank; variation selectors are dropped. Commands of CI runners
    (`::` at the start of a line, `##vso[` anywhere) are broken up at the start of every
    word, because lines may be wrapped there.
    """
    shown = "".join(_escape_character(character) for character in text[: limit + 1])
    shown = _COLONS.sub(lambda match: " ".join(match[0]), shown)
    shown = _HASHES.sub("## ", shown)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def escape_markdown(text: str, limit: int = 200) -> str:
    """Escape foreign text so that Markdown shows it literally, without links or tags.

    For text inside a line: characters that are special only at the start of a line are
    kept.
    """
    shown = "".join(
        f"&#{ord(character)};" if character in _MARKDOWN_SPECIAL else character
        for character in escape_text(text, limit)
    )
    return shown.replace("://", "&#58;//").replace("www.", "www&#46;")


def escape_comment(text: str, limit: int) -> str:
    """Escape a text for the comment of a job: one line of ASCII, at most `limit` characters.

    It holds no character that shells and Slurm's own lists interpret.
    """
    safe = escape_text(text.translate(ASCII_WORDS), 4 * limit)
    safe = safe.encode("ascii", "replace").decode()
    safe = "".join("'" if letter in '"`\\' else letter for letter in safe).replace("$", "S")
    return safe if len(safe) <= limit else safe[: limit - 3] + "..."


def count_columns(text: str) -> int:
    """Count the terminal columns of a safe text: wide characters two, combining marks none."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # only where it is needed: most texts are ASCII

    return cell_len(text)


def fit_to_width(text: str, width: int) -> str:
    """Cut a safe text to `width` columns with an ellipsis, and pad it to exactly that width."""
    if count_columns(text) > width:
        text = _take_columns(text, width - 1) + "…"
    return text + " " * (width - count_columns(text))


def wrap_text(text: str, width: int, indent: str = "") -> list[str]:
    """Wrap a safe text at blanks into lines of at most `width` columns; longer words are cut.

    An option ("-x", "--long") stays on the line of the word before it, so that the line
    reads as a command; so do the unit of a share ("5 %") and its error.
    """
    lines: list[str] = []
    line = ""
    for word in _join_attached(text.split(), width):
        while count_columns(word) > width:
            if line:
                lines.append(line)
                line = ""
            head = _take_columns(word, width)
            if word[len(head) :].startswith("::"):
                head = head[:-1]  # a line never begins with "::", see escape_text
            lines.append(head)
            word = word[len(head) :]
        if line and count_columns(line) + 1 + count_columns(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    if line:
        lines.append(line)
    return [indent + part for part in lines]


def _join_attached(words: list[str], width: int) -> list[str]:
    joined: list[str] = []
    for word in words:
        longer = f"{joined[-1]} {word}" if joined else ""
        is_attached = _ATTACHED.match(word) or longer.endswith(f"± {word}")
        if longer and is_attached and count_columns(longer) <= width:
            joined[-1] = longer
        else:
            joined.append(word)
    return joined


def _take_columns(text: str, width: int) -> str:
    if text.isascii():
        return text[:width]
    from rich.cells import set_cell_size

    head = set_cell_size(text, width)  # half of a wide character becomes a blank
    return head if text.startswith(head) else head[:-1]


def _escape_character(character: str) -> str:
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


_ASCII_REPLACEMENTS = {
    **dict(zip(map(ord, "▁▂▃▄▅▆▇█"), "_.-:=+*#")),
    **dict(zip(map(ord, "░─·µ°…≤–—×±→"), ".- ud~<--x~>")),
}


def convert_to_ascii(text: str) -> str:
    """Convert a text to ASCII: our own marks keep their width, others are escaped.

    A bar becomes one of `_.-:=+*#`; "≤ 5 µs" becomes "< 5 us".
    """
    text = text.translate(_ASCII_REPLACEMENTS)
    return text if text.isascii() else text.encode("ascii", "backslashreplace").decode("ascii")
