"""A change laid out in lines: prose flows, and what is pasted stays whole.

A command goes on in the line where it fits. Where it does not it stands alone, over several lines
if need be, broken at blanks outside quotes with a backslash, as a shell (and Python) takes it:

    Change: mount anew:
      umount /data; mount -t nfs -o nconnect=8,rsize=1048576 \\
        filer:/export/data /data
    (or in fstab; the first mount of a server decides)
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterprof.advice import Advice
from clusterprof.renderers.text_safety import columns, fit, safe_text, wrap

_LONG = 1000  # characters of a piece
_INDENT = "  "
_MORE = " \\"
_BLANK = "\0"  # within a command: no line is broken there
BELOW = "in full under CAUSES IN FULL, below"


@dataclass(frozen=True, slots=True)
class Line:
    """One line, and which command it is a part of; None for prose, or a command within it."""

    text: str
    command: int | None = None


def pieces(one: Advice) -> list[tuple[bool, str]]:
    """Return the change in pieces: (is a command, text), each safe to print."""
    found: list[tuple[bool, str]] = []
    rest = one.change
    for command in one.commands:
        if not command or command not in rest:
            continue
        before, _, after = rest.partition(command)
        found += [(False, before), (True, command)]
        rest = after
    found.append((False, rest))
    return [(is_command, safe_text(text, _LONG)) for is_command, text in found if text]


def laid_out(one: Advice, width: int, begin: str = "") -> list[Line]:
    """Return the change behind `begin` in lines of at most `width` columns."""
    lines: list[Line] = []
    now, glued = begin, False
    for number, (is_command, text) in enumerate(pieces(one)):
        if not is_command:
            glued = glued and text[:1] != " "
            *full, now = wrap(_joined(now, text, glued), width) or [""]
            lines += [Line(_whole(part)) for part in full]
            glued = text[-1:] != " "
            continue
        inline = _joined(now, text.replace(" ", _BLANK), glued)
        if columns(inline) <= width:
            now, glued = inline, True
            continue
        lines += [Line(_whole(now))] if now else []
        lines += [Line(part, number) for part in command_lines(text, width)]
        now, glued = "", True
    return [*lines, Line(_whole(now))] if now else lines


def _joined(before: str, text: str, glued: bool) -> str:
    return before + text if glued or not before else f"{before} {text.lstrip()}"


def _whole(line: str) -> str:
    return line.replace(_BLANK, " ")


def command_lines(command: str, width: int) -> list[str]:
    """Return a command in lines to paste together; only a word longer than a line is cut."""
    if columns(command) + len(_INDENT) <= width:
        return [_INDENT + command]
    lines, now, indent = [], "", _INDENT
    room = width - len(2 * _INDENT) - len(_MORE)
    for word in (part for whole in words_of(command) for part in _cut(whole, room)):
        longer = f"{now} {word}" if now else indent + word
        if now and columns(longer) + len(_MORE) > width:
            lines.append(now + _MORE)
            indent = 2 * _INDENT
            longer = indent + word
        now = longer
    return [*lines, now]


def _cut(word: str, room: int) -> list[str]:
    return [word] if columns(word) <= room or " " in word else wrap(word, room)


def words_of(command: str) -> list[str]:
    """Split a command at blanks outside quotes: within them a broken line would be another text."""
    words, now, quote, escaped = [], "", "", False
    for character in command:
        if character == " " and not quote and not escaped:
            words += [now] if now else []
            now = ""
            continue
        if escaped:
            escaped = False
        elif character == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        now += character
    return [*words, now] if now else words


def shortened(lines: list[Line], most: int, width: int) -> list[Line]:
    """Return at most `most` lines; no command is cut: one that has no room is left for below."""
    if len(lines) <= most:
        return lines
    kept = lines[:most]
    cut = kept[-1].command
    if cut is not None and lines[most].command == cut:
        kept = [line for line in kept if line.command != cut]
        if len(kept) < 2:
            begun = f"{kept[0].text if kept else ''} {BELOW}".strip()
            return [Line(part) for part in wrap(begun, width)[:most]]
    last = kept[-1]
    cut_short = fit(f"{last.text} …", width).rstrip()
    return [*kept[:-1], Line(cut_short)] if last.command is None else kept
