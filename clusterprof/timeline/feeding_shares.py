"""The eleven things a critical thread can be doing, as columns of a table of ns or shares.

table = empty(2)                                  two intervals, nothing known
add(table, np.array([0, 0]), BLOCK_IO, ns)        rows may repeat; they add up
shares(table, lengths)                            what is missing to the length is unknown
"""

from __future__ import annotations

import numpy as np

from clusterprof.timeline.model import Float, Int

NAMES = (
    "user_cpu",
    "reading_cpu",
    "runnable",
    "block_io",
    "remote_io",
    "socket",
    "memory",
    "no_work",
    "no_worker",
    "delivery",
    "unknown",
)
(
    USER_CPU,
    READING_CPU,
    RUNNABLE,
    BLOCK_IO,
    REMOTE_IO,
    SOCKET,
    MEMORY,
    NO_WORK,
    NO_WORKER,
    DELIVERY,
    UNKNOWN,
) = range(len(NAMES))


def empty(rows: int) -> Float:
    """Return float64[rows, 11] of zeros; columns, not rows, lie together in memory."""
    return np.zeros((len(NAMES), rows)).T


def all_unknown(rows: int) -> Float:
    """Return shares of which nothing is known."""
    table = empty(rows)
    table[:, UNKNOWN] = 1.0
    return table


def add(table: Float, rows: Int, column: int, amount: Float | Int) -> None:
    """Add an amount to one column of each row; a row named twice gets both."""
    table[:, column] += np.bincount(rows, amount, minlength=len(table))[: len(table)]


def add_rows(table: Float, rows: Int, amounts: Float) -> None:
    """Add float64[m, 11] to the m named rows; a row named twice gets both."""
    if len(rows) == len(table) and (rows == np.arange(len(rows))).all():
        table += amounts
        return
    for column in range(table.shape[1]):
        if amounts[:, column].any():
            add(table, rows, column, amounts[:, column])


def shares(table_ns: Float, length_ns: Int | Float) -> Float:
    """Turn ns into shares of each length: never negative, and every row sums to 1."""
    length = np.asarray(length_ns, np.float64)
    table = np.maximum(table_ns, 0.0)
    table[:, UNKNOWN] += np.maximum(length - _sums(table), 0.0)
    total = _sums(table)
    nothing = total <= 0
    if nothing.any():
        table[nothing, UNKNOWN] = 1.0
        total = _sums(table)
    result: Float = table / total[:, None]
    return result


def _sums(table: Float) -> Float:
    """The sum of each row, pairwise, column by column."""
    c = table.T
    return ((c[0] + c[1]) + (c[2] + c[3])) + ((c[4] + c[5]) + (c[6] + c[7])) + c[8] + c[9] + c[10]
