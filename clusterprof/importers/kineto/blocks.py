"""Cut a trace into blocks of whole events, whatever stands in them, in bounded memory.

    {"schemaVersion": 1, ..., "traceEvents": [ {…}, {…}, | {…}, {…}, | {…} ], "traceName": …}
     head                                       block       block      rest

A block ends at what separates events in this file (`},` and the beginning of the next one, learned
from the first two). Whether that was such a place is proved by reading the block as JSON: cut in
the middle of an event it would be none. A block that is none is searched for its events byte by
byte, with respect to strings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.kineto.decode import Document, Event, document, fast, one

BLOCK_BYTES = 1 << 20
EVENT_BYTES_AT_MOST = 8 << 20
BESIDE_BYTES_AT_MOST = 32 << 20
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_NEXT = re.compile(rb'\}\s*,\s*\{\s*"\w')
_BETWEEN = re.compile(rb"[,\s]*")
_TRIES = 64
_LONGEST_BEGINNING = 1 << 12  # of what opens the list, white space included
_SPACE = b" \t\r\n\xef\xbb\xbf"


class Trace:
    """One file as lists of events; what stands beside them is in `document` at the end."""

    def __init__(
        self,
        source: Source,
        account: Account,
        usual: Callable[[bytes], Sequence[Event] | None] | None = None,
    ) -> None:
        """`usual` reads what is usual, and gives None of what is not (`usual.Usual`)."""
        self._source = source
        self._account = account
        self._usual = usual
        self.document = Document()

    def events(self) -> Iterator[Sequence[Event]]:
        """Yield the events, some thousands at a time, in the order of the file.

        Raises CannotImportError when there are none, or one of them is larger than any can be.
        """
        blocks = self._source.blocks(BLOCK_BYTES)
        rest = self._opened(blocks)
        between = _NEXT.search(rest, 0, 4 << 20)
        separator = between.group() if between else b""
        ended = False
        for block in blocks:
            cut = block.rfind(separator) if separator else -1
            if cut >= 0:
                whole = (b"[", rest, memoryview(block)[: cut + 1], b"]")
                events = self._read(b"".join(whole))  # copied once
                if events is not None:
                    yield events
                    rest = block[block.find(b",", cut) + 1 :]
                    continue
            events, rest, ended = self._slowly(rest + block)
            yield events
            if ended:
                break
            if len(rest) > EVENT_BYTES_AT_MOST:
                raise CannotImportError(
                    f"an event of more than {EVENT_BYTES_AT_MOST >> 20} MiB: no profiler writes one"
                )
        if not ended:
            yield from self._last(rest)
        else:
            self._beside(b'{"":0' + rest, blocks)

    def _opened(self, blocks: Iterator[bytes]) -> bytes:
        """Return what follows the bracket that opens the list of events."""
        head, at, tries = b"", 0, 0
        for block in blocks:
            head += block
            if head.lstrip(_SPACE)[:1] == b"[":
                return head.lstrip(_SPACE)[1:]
            while tries < _TRIES and (found := _EVENTS.search(head, at)):
                beside = document(head[: found.start()].strip(_SPACE).rstrip(b",") + b"}")
                if beside is not None:
                    self.document = beside
                    return head[found.end() :]
                at, tries = found.end(), tries + 1  # it stood in some text
            at = max(at, len(head) - _LONGEST_BEGINNING)
            if len(head) > BESIDE_BYTES_AT_MOST or tries == _TRIES:
                break
        found_any = _EVENTS.search(head)  # what stands before is damaged; the events need not be
        if found_any is None:
            raise CannotImportError("it has no list of events (traceEvents)")
        self._account.skipped["what stands before the events: not JSON"] += 1
        return head[found_any.end() :]

    def _last(self, rest: bytes) -> Iterator[Sequence[Event]]:
        """Read what is left when the file is at its end."""
        whole = document(b'{"traceEvents":[' + rest)
        if whole is not None:
            self._join(whole)
            yield whole.events
            return
        listed = self._read(b"[" + rest)
        if listed is not None:
            yield listed
            return
        events, left, ended = self._slowly(rest)
        yield events
        if ended:
            self._beside(b'{"":0' + left, iter(()))
        elif left.strip(_SPACE + b","):
            self._account.cut = "cut off in the middle of an event; those before it were read"
        else:
            self._account.cut = "cut off after an event; all up to there were read"

    def _beside(self, text: bytes, blocks: Iterator[bytes]) -> None:
        """Read what follows the events."""
        for block in blocks:
            text += block
            if len(text) > BESIDE_BYTES_AT_MOST:
                self._account.skipped["what follows the events: too long"] += 1
                return
        if text.strip(_SPACE) == b'{"":0':  # of a bare list nothing follows
            return
        after = document(text)
        if after is None:
            self._account.skipped["what follows the events: not JSON"] += 1
        else:
            self._join(after)

    def _join(self, after: Document) -> None:
        for name in ("device_properties", "distributed", "base_ns", "runtime"):
            value = getattr(after, name)
            if value is not None:
                setattr(self.document, name, value)

    def _read(self, text: bytes) -> Sequence[Event] | None:
        """Return the events of a JSON list, None when it is not that."""
        usual = self._usual(text) if self._usual else None
        return fast(text) if usual is None else usual

    def _slowly(self, text: bytes) -> tuple[list[Event], bytes, bool]:
        """Return the whole events of a block, what follows them, and whether the list ended."""
        spans, end, ended = elements(text)
        events = []
        for a, b in spans:
            some = fast(b"[" + text[a:b] + b"]")
            event = some[0] if some else one(text[a:b], self._account.skipped)
            if event is not None:
                events.append(event)
        return events, text[end:], ended


def elements(text: bytes) -> tuple[list[tuple[int, int]], int, bool]:
    """Find the objects of a list that has been opened, with respect to strings.

    Returns their places, where the search ended (behind the last of them, or behind the bracket
    that closes the list) and whether the list was closed.
    """
    data = np.frombuffer(text, np.uint8)
    outside = ~_in_strings(data)
    change = np.zeros(data.size, np.int8)
    change[((data == 123) | (data == 91)) & outside] = 1
    change[((data == 125) | (data == 93)) & outside] = -1
    places = np.flatnonzero(change)
    depth = np.cumsum(change[places], dtype=np.int32)
    closing = np.flatnonzero(depth < 0)
    ended = bool(closing.size)
    if ended:
        last = int(closing[0])
        end = int(places[last]) + 1
        places, depth = places[:last], depth[:last]
    opens = places[(depth == 1) & (change[places] == 1)]
    closes = places[(depth == 0) & (change[places] == -1)] + 1
    spans = list(zip(opens.tolist(), closes.tolist()))
    if not ended:
        end = int(closes[-1]) if closes.size else 0
        between = _BETWEEN.match(text, end)
        end = between.end() if between else end
    return spans, end, ended


def _in_strings(data: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """True for bytes inside strings; of the quotes, for the opening one."""
    quote = np.flatnonzero(data == 34)
    if not quote.size:
        return np.zeros(data.size, np.bool_)
    before = data[np.maximum(quote - 1, 0)]
    doubtful = np.flatnonzero((before == 92) & (quote > 0))
    if doubtful.size:
        keep = np.ones(quote.size, np.bool_)
        slash = np.flatnonzero(data == 92)
        run = np.ones(slash.size, np.int64)  # how many stand in a row, up to each
        breaks = np.concatenate([[True], np.diff(slash) > 1])
        first = np.maximum.accumulate(np.where(breaks, np.arange(slash.size), 0))
        run = np.arange(slash.size) - first + 1
        length = run[np.searchsorted(slash, quote[doubtful] - 1)]
        keep[doubtful] = length % 2 == 0
        quote = quote[keep]
    flips = np.zeros(data.size, np.int8)
    flips[quote] = 1
    return np.cumsum(flips, dtype=np.int32) % 2 == 1
