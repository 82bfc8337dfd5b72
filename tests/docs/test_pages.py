"""The manual: no dead link, no command that does not exist, no option without a word on it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
from tests.tools.command_pages import asked_by  # noqa: E402
from tests.tools.links import anchors, dead_links  # noqa: E402

PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.md")]
    if path.name != "CHANGELOG.md"
)
SHELL_WORDS = {"|", ";", "&&", "||", ">", ">>", ">&", "&"}
_BLOCK = re.compile(r"^```(?:console|bash|sh|shell|yaml)?\n(.*?)^```|((?:^    .*\n)+)", re.M | re.S)


def commands_of(page: Path, at_start: bool = False) -> list[str]:
    """Every `clusterprof …` of a page's code blocks, continuation lines joined.

    `at_start`: only where it is what a reader types first.
    """
    found = []
    for fenced, indented in _BLOCK.findall(page.read_text(encoding="utf-8")):
        text = (fenced or indented).replace("\\\n", " ")
        for line in text.splitlines():
            before = r"^ *(?:\$ )?" if at_start else r"(?:^|[ $;(])"
            match = re.search(before + r"(clusterprof [a-z].*)$", line)
            if match and not re.search(r"[…=]", match[1].split()[1]):
                found.append(match[1].partition("`")[0])
    return found


def words_of(line: str) -> list[str]:
    """What a shell makes of a line, without the first word; `;` and the like are words."""
    line = re.sub(r"<(\w+)>", r"\1", line)  # a place for the reader's own word
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    return list(lexer)[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_link_is_dead(page: Path) -> None:
    assert list(dead_links(page)) == []


def test_a_dead_link_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One thing, `two`\n## One thing, `two`\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#one-thing-two-1) [c](#here) [d](gone.md) [e](other.md#two)\n"
        "`[f](code.md)` [g](https://example.org/x)\n```\n[h](code.md)\n```\n# Here\n"
    )
    assert list(dead_links(page)) == ["gone.md", "other.md#two"]
    assert anchors(tmp_path / "other.md") == {"one-thing-two", "one-thing-two-1"}


def test_every_page_is_in_the_list_of_pages() -> None:
    listed = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    own = [path for path in ROOT.glob("docs/*.md") if path.name != "README.md"]
    assert [path.name for path in own if f"({path.name})" not in listed] == []
    folders = {path.parent.name for path in ROOT.glob("docs/*/README.md")}
    assert [name for name in folders if f"({name}/README.md)" not in listed] == []


@pytest.mark.parametrize(
    "page", [p for p in PAGES if commands_of(p)], ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_commands_and_options_exist(page: Path) -> None:
    from clusterprof.cli.commands import COMMANDS

    wrong = []
    for line in commands_of(page):
        words = words_of(line)
        if words[0] not in COMMANDS:
            wrong.append(line)
            continue
        own = {name for one in asked_by(COMMANDS[words[0]]) for name in one.names}
        for word in words[1:]:
            if word == "--" or word in SHELL_WORDS:
                break
            if word.startswith("--") and word.partition("=")[0] not in own | {"--help"}:
                wrong.append(line)
    assert wrong == []


def test_every_option_says_what_it_does() -> None:
    from clusterprof.cli.commands import COMMANDS

    silent = [
        f"{name} {one.names[0]}"
        for name, command in COMMANDS.items()
        for one in asked_by(command)
        if not one.help
    ]
    assert silent == []
