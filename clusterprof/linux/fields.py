"""Numbers out of the kernel's "name value" texts, found without splitting the text.

pgmajfault 507162          number_after(data, b"\npgmajfault ")          507162
TcpExt: TWKilled TCPTimeouts
TcpExt: 0 115              column(data, b"TcpExt: ", b"TCPTimeouts")     115
"""

from __future__ import annotations


def number_after(data: bytes, key: bytes) -> int | None:
    """Return the integer between `key` and the end of its line, None where the key is missing.

    Start the key with a newline, so that "Cached:" is not found inside "SwapCached:".
    """
    start = data.find(key)
    if start < 0:
        return None
    start += len(key)
    end = data.find(b"\n", start)
    return int(data[start : None if end < 0 else end])


def column(data: bytes, row: bytes, name: bytes) -> int | None:
    """Return one value of a two-line table (a line of names, a line of values), None if not there.

    `row` is the word both lines begin with, colon and space included.
    """
    names = 0 if data.startswith(row) else data.find(b"\n" + row) + 1
    if names == 0 and not data.startswith(row):
        return None
    values = data.find(b"\n" + row, names) + 1
    if values == 0:
        return None
    at = data.find(b" " + name, names, values)
    after = at + 1 + len(name)
    while at >= 0 and data[after : after + 1] not in (b" ", b"\n"):  # a longer name begins so
        at = data.find(b" " + name, after, values)
        after = at + 1 + len(name)
    if at < 0:
        return None
    index = data.count(b" ", names, at + 1)
    end = data.find(b"\n", values)
    return int(data[values : None if end < 0 else end].split(b" ", index + 1)[index])
