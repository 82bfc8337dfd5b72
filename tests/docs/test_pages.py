"""The manual: no dead link, no command that does not exist, no option without a word on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.manual_pages import PAGES, ROOT, SHELL_WORDS, list_commands, split_command
from tests.tools.command_pages import iterate_options
from tests.tools.links import list_anchors, list_dead_links


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_page_has_a_dead_link(page: Path) -> None:
    assert list(list_dead_links(page)) == []


def test_dead_links_are_detected(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One thing, `two`\n## One thing, `two`\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#one-thing-two-1) [c](#here) [d](gone.md) [e](other.md#two)\n"
        "`[f](code.md)` [g](https://example.org/x)\n```\n[h](code.md)\n```\n# Here\n"
    )
    assert list(list_dead_links(page)) == ["gone.md", "other.md#two"]
    assert list_anchors(tmp_path / "other.md") == {"one-thing-two", "one-thing-two-1"}


def test_every_page_is_in_the_list_of_pages() -> None:
    listed = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    own = [path for path in ROOT.glob("docs/*.md") if path.name != "README.md"]
    assert [path.name for path in own if f"({path.name})" not in listed] == []
    folders = {path.parent.name for path in ROOT.glob("docs/*/README.md")}
    assert [name for name in folders if f"({name}/README.md)" not in listed] == []


@pytest.mark.parametrize(
    "page", [p for p in PAGES if list_commands(p)], ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_documented_commands_and_options_exist(page: Path) -> None:
    from clusterprof.cli.commands import COMMANDS

    wrong = []
    for line in list_commands(page):
        words = split_command(line)
        if words[0] not in COMMANDS:
            wrong.append(line)
            continue
        own = {name for option in iterate_options(COMMANDS[words[0]]) for name in option.names}
        for word in words[1:]:
            if word == "--" or word in SHELL_WORDS:
                break
            if word.startswith("--") and word.partition("=")[0] not in own | {"--help"}:
                wrong.append(line)
    assert wrong == []


def test_every_option_has_a_help_text() -> None:
    from clusterprof.cli.commands import COMMANDS

    silent = [
        f"{name} {option.names[0]}"
        for name, command in COMMANDS.items()
        for option in iterate_options(command)
        if not option.help
    ]
    assert silent == []
