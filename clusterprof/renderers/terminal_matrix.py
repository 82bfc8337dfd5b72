"""The table of ranks by causes in columns of a terminal: two lines for each rank."""

from __future__ import annotations

from collections.abc import Iterator

from clusterprof.findings import Report
from clusterprof.renderers.matrix import Line, amount, matrix_of
from clusterprof.renderers.text_safety import columns, fit, safe_text

_ROWS = 6
_RANK, _WORD, _ALL = 8, 7, 10
_CAUSE = 15  # columns of a cause, as long as the line is short
_WIDER = 18


def matrix(report: Report, width: int) -> Iterator[str]:
    """Yield the table; nothing when ranks were not compared."""
    widest = 16 if width >= 72 else 9
    node = min(max((columns(safe_text(one.name)) for one in report.nodes), default=0) + 1, widest)
    room = width - 1 - _RANK - node - _WORD - _ALL
    count = max(room // _CAUSE, 1)
    each = min(room // count, _WIDER)
    found = matrix_of(report, _ROWS, count)
    if found is None:
        return
    heads = "".join(_cell(safe_text(cause, 60), each) for cause in found.causes)
    yield f" {'rank':<{_RANK}}{fit('node', node)}{'':<{_WORD}}{heads}{'all':>{_ALL}}"
    for at, line in enumerate(found.lines):
        if found.rest and at == len(found.lines) - 1:
            yield f" … {found.rest}:"
            line = Line("", "", line.felt, line.caused)
        label = line.label if len(line.label) < _RANK or line.ranks == 1 else f"{line.ranks} ranks"
        first = f"{fit(label, _RANK - 1)} {fit(safe_text(line.node), node - 1)} "
        yield _row(first, "felt", line.felt, each)
        yield _row(" " * (_RANK + node), "caused", line.caused, each)


def _row(first: str, word: str, ns: tuple[int, ...], each: int) -> str:
    cells = "".join(_cell(amount(one), each) for one in ns[:-1])
    return f" {first}{word:<{_WORD}}{cells}{amount(ns[-1]):>{_ALL}}"


def _cell(text: str, each: int) -> str:
    return fit(text, each - 1).strip().rjust(each)
