"""Pages of the manual and the commands in their code blocks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.md")]
    if path.name != "CHANGELOG.md"
)
SHELL_WORDS = {"|", ";", "&&", "||", ">", ">>", ">&", "&"}
_BLOCK = re.compile(r"^```(?:console|bash|sh|shell|yaml)?\n(.*?)^```|((?:^    .*\n)+)", re.M | re.S)


def list_commands(page: Path, at_start: bool = False) -> list[str]:
    """List every `clusterprof …` in a page's code blocks, continuation lines joined.

    `at_start`: only where it is what a reader types first.
    """
    collected = []
    for fenced, indented in _BLOCK.findall(page.read_text(encoding="utf-8")):
        text = (fenced or indented).replace("\\\n", " ")
        for line in text.splitlines():
            before = r"^ *(?:\$ )?" if at_start else r"(?:^|[ $;(])"
            match = re.search(before + r"(clusterprof [a-z].*)$", line)
            if match and not re.search(r"[…=]", match[1].split()[1]):
                collected.append(match[1].partition("`")[0])
    return collected


def split_command(line: str) -> list[str]:
    """Split a line as a shell does, without the first word; `;` and the like are words."""
    line = re.sub(r"<(\w+)>", r"\1", line)  # a place for the reader's own word
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    return list(lexer)[1:]
