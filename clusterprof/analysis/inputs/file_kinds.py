"""Say what a file of no known format probably is, and what to give in its place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

FORMATS_HINT = "`clusterprof analyze --help` lists the known formats"
_GIVE_TRACE = f"give a recording or a trace; {FORMATS_HINT}"
_PRINTABLE_SHARE = 0.95
"""Share of printable characters from which a file counts as text."""


class FileKind(NamedTuple):
    """A kind of file, and what to do with it."""

    title: str
    remedy: str


_BY_MAGIC = (
    (b"\x7fELF", FileKind("a program", "to record it: clusterprof record {path}")),
    (b"\x89PNG", FileKind("a picture", _GIVE_TRACE)),
    (b"\xff\xd8\xff", FileKind("a picture", _GIVE_TRACE)),
    (b"SQLite format 3", FileKind("a database of another program", _GIVE_TRACE)),
    (b"PK\x03\x04", FileKind("an archive or a model file", f"unpack it; {_GIVE_TRACE}")),
    (b"PAR1", FileKind("a table of data (Parquet)", _GIVE_TRACE)),
    (b"ARROW1", FileKind("a table of data (Arrow)", _GIVE_TRACE)),
    (b"%PDF", FileKind("a PDF document", _GIVE_TRACE)),
    (b"\x80\x02", FileKind("a Python pickle or a model file", _GIVE_TRACE)),
    (b"\x80\x04", FileKind("a Python pickle or a model file", _GIVE_TRACE)),
)
_SCRIPT = FileKind("a Python script", "to record it: clusterprof record python {path}")
_PROFILE = FileKind("settings", "to use it as a profile: --profile {path}")
_NO_HEADER = FileKind(
    "a table without a header",
    "export it with the names of its columns: nvidia-smi --format=csv, without noheader;"
    f" {FORMATS_HINT}",
)
_SUMS = FileKind(
    "the sums of nsys stats, which have no times",
    "give the profile itself: nsys export --type sqlite REPORT.nsys-rep",
)
_NSYS_SUMS = re.compile(r"Time ?\(%\)[ ,]+Total Time \(ns(?:ec)?\)")
_BY_SUFFIX = {
    ".py": _SCRIPT,
    ".sh": FileKind("a shell script", "to record it: clusterprof record sh {path}"),
    ".yaml": _PROFILE,
    ".yml": _PROFILE,
    ".md": FileKind("a text for people", _GIVE_TRACE),
    ".html": FileKind("a page for a browser", "open it in a browser, or give the recording"),
}


def guess_file_kind(path: Path, head: bytes) -> FileKind:
    """Guess the kind of a file from its first bytes and its name.

    The remedy names the file.
    """
    kind = next((kind for magic, kind in _BY_MAGIC if head.startswith(magic)), None)
    kind = kind or _BY_SUFFIX.get(path.suffix.lower()) or _guess_text_kind(head)
    return kind._replace(remedy=kind.remedy.format(path=path))


def _guess_text_kind(head: bytes) -> FileKind:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start[:9].lower() == b"<!doctype" or start[:5].lower() == b"<html":
        return _BY_SUFFIX[".html"]
    if start.startswith((b"{", b"[")):
        return FileKind("JSON of another program", f"export it again; {FORMATS_HINT}")
    if start.startswith(b"#!") and b"python" in start[:64]:
        return _SCRIPT
    text = head.decode("utf-8", "replace")
    printable = sum(letter.isprintable() or letter in "\t\r\n" for letter in text)
    if "\0" in text or printable < _PRINTABLE_SHARE * len(text):
        return FileKind("binary data of another program", _GIVE_TRACE)
    lines = text.splitlines()
    if len(lines) > 1 and all(line.count(",") == lines[0].count(",") > 0 for line in lines[:-1]):
        if all(cell.strip()[:1].isdigit() for cell in lines[0].split(",")):
            return _NO_HEADER
        return FileKind("a table of another program", _GIVE_TRACE)
    if _NSYS_SUMS.search(text):
        return _SUMS
    return FileKind("plain text", _GIVE_TRACE)
