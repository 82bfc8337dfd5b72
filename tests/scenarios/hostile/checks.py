"""What must hold of an output whatever the names in it were, format by format."""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from typing import Any

_UNSAFE = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
_OWN_SGR = re.compile(r"\x1b\[(?:0|1|2|32|1;3[136])m")
_OWN_COMMAND = re.compile(r"::(?:error|warning|notice|group|endgroup|debug)\b[^\n]*?::")
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")
_MARKDOWN_TAGS = frozenset(("details", "/details", "summary", "/summary", "br"))
_OUR_MARKER = "<!-- clusterprof:gate -->"  # by which a bot finds its comment again


def nothing_that_controls(text: str, own_commands: int = 0) -> None:
    """No byte that moves, hides or reorders, and no line that a CI runner obeys."""
    bare = _OWN_SGR.sub("", text)
    result = {
        ascii(letter)
        for letter in set(bare) - {"\n"}
        if unicodedata.category(letter) in _UNSAFE or letter in "\u2028\u2029\u034f\u115f\u3164"
    }
    assert not result, f"{result}"
    commands = [line for line in bare.split("\n") if line.lstrip().startswith("::")]
    own = [line for line in commands if _OWN_COMMAND.match(line)]
    assert (commands, len(own)) == (own, own_commands)
    assert not re.search(r"##[a-z]*\[", bare, re.IGNORECASE)


def json_(text: str) -> Any:
    """RFC 8259: no NaN, no key twice, no half of a surrogate pair."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        assert len(made) == len(pairs), "a key twice"
        return made

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    document = json.loads(text, object_pairs_hook=once, parse_constant=refuse)
    json.dumps(document, ensure_ascii=False, allow_nan=False).encode("utf-8")  # no lone surrogate
    return document


def json_lines(text: str) -> None:
    """One JSON document a line."""
    for line in text.splitlines():
        json_(line)


def markdown(text: str) -> None:
    """Tables whose rows have as many cells as their head, and no HTML, link or mention but ours."""
    width = 0
    for line in text.split("\n"):
        cells = line.count("|") if line.startswith("|") else 0
        assert not (width and cells and cells != width), line
        width = cells
    for tag in re.findall(r"<([^<>]*)>?", text.replace(_OUR_MARKER, "", 1)):
        assert tag in _MARKDOWN_TAGS, tag
    assert "](" not in text and "@" not in text and "www." not in text
    for link in re.findall(r"\w+://[^\s)]*", text):
        raise AssertionError(link)


def csv_(text: str) -> None:
    """Rows of one length, and no cell that a spreadsheet takes for a formula."""
    rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    assert len({len(row) for row in rows}) == 1
    for cell in {cell for row in rows for cell in row}:
        if cell.startswith(_FORMULA) or cell.lstrip().startswith(_FORMULA):
            float(cell)  # a number, or ValueError


def xml(text: str) -> None:
    """Well-formed, without a document type."""
    assert "<!DOCTYPE" not in text and "<!ENTITY" not in text
    root = ElementTree.fromstring(text)
    for part in root.iter():
        for value in (part.text or "", part.tail or "", *part.attrib.values()):
            nothing_that_controls(value.replace("\t", " "))


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.scripts: list[tuple[dict[str, Any], str]] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: set[str] = set()
        self.comments = 0
        self._in = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links |= {
            value or "" for name, value in attrs if name in ("href", "src", "action", "data")
        }
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        self._in = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data

    def handle_comment(self, data: str) -> None:
        self.comments += 1


def html(text: str, like: str) -> None:
    """The same scripts, tags and attributes as a page `like` it without hostile names."""
    page, clean = _Page(), _Page()
    page.feed(text)
    page.close()
    clean.feed(like)
    clean.close()
    assert [a for a, _ in page.scripts] == [a for a, _ in clean.scripts]
    for (attributes, result), (_, ours) in zip(page.scripts, clean.scripts):
        if attributes.get("type", "").endswith("json"):
            json_(result)
            assert "</" not in result and "<!--" not in result
        else:
            assert result == ours, "a script that is not ours"
    assert page.tags <= clean.tags | {"br", "wbr"}, page.tags - clean.tags
    assert page.attributes <= clean.attributes, page.attributes - clean.attributes
    assert page.comments == clean.comments
    assert not [link for link in page.links if not link.startswith("#") and link not in clean.links]


_SAMPLE = re.compile(
    r'[a-zA-Z_:][a-zA-Z0-9_:]*(\{([a-zA-Z_][a-zA-Z0-9_]*="(\\[\\"n]|[^"\\\n])*",?)*\})? \S+( \S+)?'
)


def openmetrics(text: str) -> None:
    """Samples and comments of the exposition format, and nothing behind its end."""
    lines = text.removesuffix("\n").split("\n")
    assert "# EOF" not in lines[:-1]
    for line in lines:
        comment = re.fullmatch(r"# (HELP|TYPE|UNIT) [a-zA-Z_:][a-zA-Z0-9_:]*( .*)?|# EOF", line)
        assert comment or _SAMPLE.fullmatch(line), line
        if not comment:
            float(line.rsplit(" ", 1)[1])


BY_NAME: dict[str, Any] = {
    "json": json_,
    "gate-json": json_,
    "gitlab-json": json_,
    "markdown": markdown,
    "csv": csv_,
    "junit": xml,
    "openmetrics": openmetrics,
    "prometheus": openmetrics,
    "gitlab-metrics": openmetrics,
}
"""By the word after `--format`; of any other format what holds for all is asked."""
