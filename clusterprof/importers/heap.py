"""What the C library does with memory that is given back, while long tables come and go.

By default it keeps up to 32 MiB blocks for later, between which small things settle: a process
stays as large as it ever was, and grows by what it made on the way. Elsewhere than on glibc nothing
is done.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

_TRIM_ABOVE, _OWN_MAPPING_ABOVE = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
_KEEP_BYTES = 32 << 20  # the most that glibc chooses by itself
_RETURN_BYTES = 128 << 10


def return_at_once() -> None:
    """Give back all that is free, and from now on every table as soon as it is not needed.

    Costs a page fault for every page of every table: worth it where tables are long and few.
    """
    _set(_RETURN_BYTES)


def trim() -> None:
    """Give back all that is free, between other things too."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_again() -> None:
    """Give back all that is free, and keep for later again what comes and goes."""
    _set(_KEEP_BYTES)


def _set(own_mapping_bytes: int) -> None:
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_OWN_MAPPING_ABOVE, own_mapping_bytes)
        library.mallopt(_TRIM_ABOVE, 2 * own_mapping_bytes)
    trim()
