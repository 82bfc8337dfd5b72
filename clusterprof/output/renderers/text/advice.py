"""Recommendations for a finding, as short or as long as an output has room for.

Layout of a change in lines: prose is wrapped, commands to paste stay intact.

A command stays in the line if it fits. Otherwise it gets lines of its own, over several lines
if needed, continued with a backslash at blanks outside quotes, as a shell (and Python) does:

    Change: mount anew:
      umount /data; mount -t nfs -o nconnect=8,rsize=1048576 \\
        filer:/export/data /data
    (or in fstab; the first mount of a server decides)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from clusterprof.output.renderers.text.safety import (
    NONBREAKING_BLANK,
    count_columns,
    escape_text,
    fit_to_width,
    wrap_text,
)
from clusterprof.output.renderers.text.safety import escape_markdown as md
from clusterprof.report.model import EFFORTS, Advice, Finding, Report

_SENTENCE = re.compile(r"[A-Za-z]+(?: [A-Za-z]+[,;:]?){4,}[A-Za-z ,;:()'-]*\.?")
"""At least five words, and nothing that only code has."""
_WORD = re.compile(r"\(?(?:[A-Za-z][a-z'-]*|[0-9][0-9.]*)[,;:.)]*")
"""A word or number as in prose, with the signs around it."""
_MIN_PROSE_WORDS, _MIN_PROSE_RATIO = 6, 0.75
"""A change of fewer words, or with more names and code among them, may be a command or an edit."""
_MAX_CHANGE_CHARACTERS = 1000  # limit of a change, which may be a command


def describe_first_step(finding: Finding) -> str:
    """Describe in one sentence what to do first about a finding, or that nothing fits."""
    if finding.advice:
        return escape_text(finding.advice[0].what, 600)
    id_ = escape_text(finding.cause.id, 60)
    return f"no recommendation fits the measurements (clusterprof explain {id_})"


def get_first_change(finding: Finding) -> str:
    """Return the edit or command of the first recommendation; "" if there is none."""
    return escape_change(finding.advice[0]) if finding.advice else ""


def escape_change(advice: Advice) -> str:
    """Return the edit or command of a recommendation, safe to print."""
    return escape_text(advice.change, _MAX_CHANGE_CHARACTERS)


def is_sentence(text: str) -> bool:
    """Return whether a change without marked commands is a sentence, not code or a command."""
    if " -" in text or "\n" in text:
        return False
    words = text.split()
    if len(words) >= _MIN_PROSE_WORDS and _WORD.fullmatch(words[0]):
        in_prose = sum(_WORD.fullmatch(word) is not None for word in words)
        return in_prose >= _MIN_PROSE_RATIO * len(words)
    return _SENTENCE.fullmatch(text) is not None


def capitalize_change(advice: Advice) -> Advice:
    """Begin the change with a capital letter if it begins with a word, not with code."""
    change = advice.change
    begins_with_command = any(map(change.startswith, advice.commands))
    is_prose = is_sentence(change) or (bool(advice.commands) and not begins_with_command)
    if not is_prose or not change.partition(" ")[0].isalpha():
        return advice
    return replace(advice, change=f"{change[0].upper()}{change[1:]}")


def describe_effort(finding: Finding) -> str:
    """Describe the effort that the first recommendation takes; "" if there is none."""
    return EFFORTS.get(finding.advice[0].effort, "") if finding.advice else ""


def format_further_advice(finding: Finding) -> str:
    """List the further recommendations, separated by semicolons; "" if there are none."""
    return "; ".join(escape_text(advice.what, 300) for advice in finding.advice[1:])


def list_withheld_advice(finding: Finding) -> list[str]:
    """List advice that a reader may expect and why it is not given; no full stops."""
    return [escape_text(sentence, 300) for sentence in finding.withheld_advice]


def list_advice_details(finding: Finding) -> Iterator[tuple[str, str, str]]:
    """Yield (what, label, text) of all recommendations, in reading order."""
    for advice in finding.advice:
        instruction = escape_text(advice.what, 600)
        for label, text in _label_advice_parts(advice):
            if text:
                yield instruction, label, escape_text(text, _MAX_CHANGE_CHARACTERS)


def _label_advice_parts(advice: Advice) -> tuple[tuple[str, str], ...]:
    return (
        ("change", advice.change),
        ("effort", EFFORTS.get(advice.effort, "")),
        ("because", advice.because),
        ("gain", advice.gain),
        ("verify", advice.verify),
        ("side effect", advice.worse),
    )


def format_advice_as_markdown(report: Report) -> Iterator[str]:
    """Yield all recommendations as a collapsible Markdown list; nothing if there are none."""
    if not any(finding.advice for finding in report.findings):
        return
    yield from ("", "<details><summary>What to do, in full</summary>", "")
    for finding in report.findings:
        last = ""
        for what, label, text in list_advice_details(finding):
            if what != last:
                yield f"- **{md(finding.cause.id)}**: {md(what, 600)}"
                last = what
            yield f"  - {label}: {md(text, _MAX_CHANGE_CHARACTERS)}"
    yield from ("", "</details>")


# limit of one piece of a change
_INDENT = "  "
_CONTINUATION = " \\"
SEE_BELOW = "in full under CAUSES IN FULL, below"


@dataclass(frozen=True, slots=True)
class ChangeLine:
    """One line, and the number of its command; None for prose and inline commands."""

    text: str
    command: int | None = None


def split_change(advice: Advice) -> list[tuple[bool, str]]:
    """Split the change into pieces (is a command, text), each safe to print."""
    parts: list[tuple[bool, str]] = []
    remaining = advice.change
    for command in advice.commands:
        if not command or command not in remaining:
            continue
        before, _, after = remaining.partition(command)
        parts += [(False, before), (True, command)]
        remaining = after
    parts.append((False, remaining))
    return [
        (is_command, escape_text(text, _MAX_CHANGE_CHARACTERS))
        for is_command, text in parts
        if text
    ]


def wrap_change(advice: Advice, width: int, begin: str = "") -> list[ChangeLine]:
    """Wrap the change, preceded by `begin`, into lines of at most `width` columns."""
    lines: list[ChangeLine] = []
    line, adjoins = begin, False
    for number, (is_command, text) in enumerate(split_change(advice)):
        if not is_command:
            adjoins = adjoins and text[:1] != " "
            *lines_full, line = wrap_text(_join_text(line, text, adjoins), width) or [""]
            lines += [ChangeLine(_restore_blanks(part)) for part in lines_full]
            adjoins = text[-1:] != " "
            continue
        inline = _join_text(line, text.replace(" ", NONBREAKING_BLANK), adjoins)
        if count_columns(inline) <= width:
            line, adjoins = inline, True
            continue
        lines += [ChangeLine(_restore_blanks(line))] if line else []
        lines += [ChangeLine(part, number) for part in wrap_command(text, width)]
        line, adjoins = "", True
    return [*lines, ChangeLine(_restore_blanks(line))] if line else lines


def _join_text(before: str, text: str, adjoins: bool) -> str:
    return before + text if adjoins or not before else f"{before} {text.lstrip()}"


def _restore_blanks(line: str) -> str:
    return line.replace(NONBREAKING_BLANK, " ")


def wrap_command(command: str, width: int) -> list[str]:
    """Wrap a command into lines to paste together; only words longer than a line are cut."""
    if count_columns(command) + len(_INDENT) <= width:
        return [_INDENT + command]
    lines, line, indent = [], "", _INDENT
    room = width - len(2 * _INDENT) - len(_CONTINUATION)
    for word in (part for token in split_command(command) for part in _wrap_word(token, room)):
        longer = f"{line} {word}" if line else indent + word
        if line and count_columns(longer) + len(_CONTINUATION) > width:
            lines.append(line + _CONTINUATION)
            indent = 2 * _INDENT
            longer = indent + word
        line = longer
    return [*lines, line]


def _wrap_word(word: str, room: int) -> list[str]:
    return [word] if count_columns(word) <= room or " " in word else wrap_text(word, room)


def split_command(command: str) -> list[str]:
    """Split a command at blanks outside quotes; a break inside quotes would change the text."""
    words, word, quote, escaped = [], "", "", False
    for character in command:
        if character == " " and not quote and not escaped:
            words += [word] if word else []
            word = ""
            continue
        if escaped:
            escaped = False
        elif character == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        word += character
    return [*words, word] if word else words


def limit_lines(lines: list[ChangeLine], max_lines: int, width: int) -> list[ChangeLine]:
    """Limit the lines to `max_lines`; a command that does not fit becomes a pointer to the text."""
    if len(lines) <= max_lines:
        return lines
    limited = lines[:max_lines]
    cut = limited[-1].command
    if cut is not None and lines[max_lines].command == cut:
        limited = [line for line in limited if line.command != cut]
        if len(limited) < 2:
            begun = f"{limited[0].text if limited else ''} {SEE_BELOW}".strip()
            return [ChangeLine(part) for part in wrap_text(begun, width)[:max_lines]]
    last = limited[-1]
    cut_short = fit_to_width(f"{last.text} …", width).rstrip()
    return [*limited[:-1], ChangeLine(cut_short)] if last.command is None else limited
