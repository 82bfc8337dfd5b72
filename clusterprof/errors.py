"""Define the exceptions of every layer; each carries an exit code and a remedy.

Library code raises, the command line prints and exits: only `cli/` calls `sys.exit`.
`Unavailable` is both an exception (a source could not be opened) and a cell value (one
number could not be read): unknown is not zero, so a gap always carries its reason.
"""

from __future__ import annotations

from typing import Literal

Kind = Literal["absent", "denied", "failed"]

EXIT_OK = 0
EXIT_CRASH = 1
EXIT_USAGE = 2
EXIT_GATE_FAILED = 3
EXIT_GATE_CANNOT_TELL = 4
EXIT_NO_RECORDING = 5
EXIT_PARTIAL = 6
EXIT_CANNOT_START = 125
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127


class ClusterprofError(Exception):
    """An error that the user can act on: what happened, and what to do about it."""

    exit_code = EXIT_CRASH

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class UsageError(ClusterprofError):
    """The command line or a profile asks for something invalid."""

    exit_code = EXIT_USAGE


class NoRecording(ClusterprofError):
    """There is no readable recording where one was expected."""

    exit_code = EXIT_NO_RECORDING


class ClusterFailed(ClusterprofError):
    """The workers of a cluster could not be used, and without them nothing can be read."""

    exit_code = EXIT_NO_RECORDING


class PartialRecording(ClusterprofError):
    """Some inputs could not be read and `--strict` asked for all of them."""

    exit_code = EXIT_PARTIAL


class CannotStart(ClusterprofError):
    """The recording could not be started, and the caller required it."""

    exit_code = EXIT_CANNOT_START


class OutputFailed(ClusterprofError):
    """A result could not be written: the disk is full or failed, or the reader closed the
    pipe.
    """


class DevicesChanged(Exception):  # a signal to the recorder loop, not a fault
    """A collector's devices differ from those it opened; the recorder reopens the collector."""


class NothingNew(Exception):  # a signal to the recorder loop, not a fault
    """A collector has read nothing since the last request; the recorder writes nothing."""


class Unavailable(Exception):  # a value as much as an exception
    """A value that could not be read, the reason, and what would make it readable.

    absent: the hardware, driver or kernel feature does not exist.
    denied: it exists and permission is missing.
    failed: it should work and did not.
    """

    def __init__(self, kind: Kind, message: str, remedy: str = "", by_user: bool = False) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.message = message
        self.remedy = remedy
        self.by_user = by_user
        """True if the user of the job can do what the remedy says, not only an administrator."""

    def __repr__(self) -> str:
        return f"Unavailable({self.kind!r}, {self.message!r}, {self.remedy!r}, {self.by_user!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Unavailable):
            return NotImplemented
        return self.list_fields() == other.list_fields()

    def __hash__(self) -> int:
        return hash(self.list_fields())

    def list_fields(self) -> tuple[Kind, str, str, bool]:
        """List the arguments that build it again, to send it to another process."""
        return self.kind, self.message, self.remedy, self.by_user


DEVICES_RELEASED = Unavailable(
    "failed", "released on SIGUSR2", "send SIGUSR2 to the recorder again", by_user=True
)
"""Values of devices that a user asked the recorder to let go of."""
NEEDS_SECOND_SAMPLE = Unavailable("absent", "available from the second sample on")
"""A value that two samples give: `doctor`, which takes one, does not report it as missing."""


def convert_os_error(
    error: OSError, path: str, absent_remedy: str = "", by_user: bool = False
) -> Unavailable:
    """Convert the error of reading a kernel file to `Unavailable`.

    ENOENT, ENOTDIR, ENODEV, ENXIO and EOPNOTSUPP are absent; EACCES and EPERM are denied;
    all others are failed. by_user: True if the user can do what `absent_remedy` says.
    """
    import errno

    absent = {errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO, errno.EOPNOTSUPP}
    if error.errno in absent:
        return Unavailable("absent", f"{path}: {_format_reason(error)}", absent_remedy, by_user)
    if error.errno in (errno.EACCES, errno.EPERM):
        remedy = "run as the job's user or as root, or mount /proc without hidepid"
        return Unavailable("denied", f"{path}: permission denied", remedy)
    return Unavailable("failed", f"{path}: {_format_reason(error)}", "")


def _format_reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()
