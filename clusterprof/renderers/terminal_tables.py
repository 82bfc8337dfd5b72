"""A table in columns of a terminal: numbers are whole, words are cut to what is left."""

from __future__ import annotations

from clusterprof.renderers.by import Table
from clusterprof.renderers.paint import Paint
from clusterprof.renderers.text_safety import columns, fit, wrap

_FIRST = 16  # columns of the name of a row, at most
_LEAST = 8  # columns of a cell of words


def table_lines(table: Table, width: int, paint: Paint) -> list[str]:
    """Return heading, heads, rows and rest; columns that do not fit are left out, from the right
    of the numbers."""
    rule = "─" * (width - 3 - len(table.title))
    lines = [f" {paint('heading', table.title)} {paint('dim', rule)}"]
    if table.rows:
        lines += _grid(table, width)
    lines += wrap(f"{'… ' if table.rows else ''}{table.rest}", width - 2, " ") if table.rest else []
    return lines


def _grid(table: Table, width: int) -> list[str]:
    every = [table.heads, *table.rows]
    count = len(table.heads)
    words = set(range(count - table.texts, count))
    sizes = [max(columns(row[i]) for row in every) for i in range(count)]
    sizes[0] = min(sizes[0], max(_FIRST, width // 4))
    shown = list(range(count))
    while len(shown) > 2:
        need = sum(sizes[i] + 2 for i in shown if i not in words) + sum(
            min(sizes[i], _LEAST) + 2 for i in shown if i in words
        )
        if need <= width:
            break
        numbers = [i for i in shown[1:] if i not in words]
        shown.remove(numbers[-1] if len(numbers) > 1 else shown[-1])
    left = width - 1 - sum(sizes[i] + 2 for i in shown if i not in words)
    texts = [i for i in shown if i in words]
    for at, i in enumerate(texts):
        sizes[i] = max(min(sizes[i], left // (len(texts) - at) - 2), 1)
        left -= sizes[i] + 2
    lines = []
    for row in every:
        cells = [
            fit(row[i], sizes[i]) if i == 0 or i in words else row[i].rjust(sizes[i]) for i in shown
        ]
        lines.append((" " + "  ".join(cells)).rstrip())
    return lines
