"""Numbers out of the kernel's "name value" texts, found without splitting the text.

A collector reads the same file again and again, and its words hardly ever move: only when a number
before them grows a digit. So each of these remembers where it found its words and looks there
first; a search of 4 KB costs six times as much.
"""

from __future__ import annotations

import msgspec

_COMMAS = bytes.maketrans(b" \n", b",,")
_numbers = msgspec.json.Decoder(list[int]).decode


def integers(data: bytes) -> list[int]:
    """Return integers that are parted by one space or newline each, the last one followed by one.

        integers(b"4731093441 92034419 812\\n")     [4731093441, 92034419, 812]

    They are read as a JSON array is, a third of what int() costs for each. Raises ValueError for
    anything else (two spaces, a leading zero, a word).
    """
    try:
        return _numbers(b"[%b]" % data.translate(_COMMAS)[:-1])
    except msgspec.DecodeError as error:
        raise ValueError(f"no integers, one space apart: {data[:80]!r}") from error


class Numbers:
    """The integers behind some words, each at the beginning of a line.

        find = Numbers(b"pswpin ", b"pgmajfault ")
        find(b"nr_free 7\\npgmajfault 507162\\n")     [None, 507162]

    A word includes what stands between it and the number, spaces apart. `end` is what ends a
    number: a newline, or " kB" in meminfo.
    """

    __slots__ = ("_end", "_places", "_words")

    def __init__(self, *words: bytes, end: bytes = b"\n") -> None:
        self._words = words
        self._end = end
        self._places = [0] * len(words)

    def __call__(self, data: bytes) -> list[int | None]:
        """Return one integer per word, None for a word that is not in the text."""
        found: list[int | None] = []
        places, end = self._places, self._end
        for index, word in enumerate(self._words):
            at = places[index]
            if not data.startswith(word, at) or (at and data[at - 1] != 10):
                at = _line_that_begins(data, word)
                if at < 0:
                    found.append(None)
                    continue
                places[index] = at
            at += len(word)
            stop = data.find(end, at)
            found.append(int(data[at:] if stop < 0 else data[at:stop]))
        return found


class Columns:
    """Values of a table that consists of a line of names and a line of values.

        find = Columns(b"TcpExt: ", b"TCPTimeouts")
        find(b"TcpExt: TWKilled TCPTimeouts\\nTcpExt: 0 115\\n")     [115]

    Both lines begin with the same word; names and values are separated by single spaces.
    """

    __slots__ = ("_at", "_header", "_indices", "_names", "_row")

    def __init__(self, row: bytes, *names: bytes) -> None:
        self._row = row
        self._names = names
        self._at = 0
        self._header = b""
        self._indices: list[int | None] = []

    def __call__(self, data: bytes) -> list[int | None]:
        """Return one integer per name, None for a name or a table that is not there."""
        if not self._header or not data.startswith(self._header, self._at):
            self._learn(data)
            if not self._header:
                return [None] * len(self._names)
        start = self._at + len(self._header)
        stop = data.find(b"\n", start)
        values = (data[start:] if stop < 0 else data[start:stop]).split(b" ")
        return [None if index is None else int(values[index]) for index in self._indices]

    def _learn(self, data: bytes) -> None:
        """Remember the line of names, newline included, and which of them are wanted."""
        self._header = b""
        self._at = _line_that_begins(data, self._row)
        if self._at < 0:
            return
        stop = data.find(b"\n", self._at) + 1
        if not stop or not data.startswith(self._row, stop):
            return
        self._header = data[self._at : stop]
        names = self._header.rstrip(b"\n").split(b" ")
        self._indices = [names.index(name) if name in names else None for name in self._names]


def _line_that_begins(data: bytes, word: bytes) -> int:
    """Return where the line that begins with `word` begins, -1 when there is none."""
    if data.startswith(word):
        return 0
    at = data.find(b"\n" + word)
    return at if at < 0 else at + 1
