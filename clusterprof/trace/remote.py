"""Read recordings in an object store: `s3://bucket/run`, `gs://`, `abfs://`, through fsspec.

    path = resolve_path(Path("s3://bucket/run"))
    for segment in path.iterdir():
        segment.open("rb")

A RemotePath is used like the path of a folder or file, for reading only. Segments are
streamed in blocks of 8 MiB and never stored. fsspec and the package of the store are
imported when the first address is read (extra `[remote]`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from clusterprof.errors import UsageError

PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
}
"""Scheme of an address -> the package that reads such a store through fsspec."""
_BLOCK_BYTES = 8 << 20


def resolve_path(path: Path) -> Path:
    """Return the path of an object store for an address, and any other path unchanged.

    `Path` has made one slash of the two after the scheme.
    """
    if isinstance(path, RemotePath) or not path.parts or not path.parts[0].endswith(":"):
        return path
    is_remote = path.parts[0][:-1] in PACKAGES and not os.path.lexists(path)
    return RemotePath(*path.parts) if is_remote else path


@contextmanager
def _convert_errors(path: object) -> Iterator[None]:
    """Convert the errors of a store's package to OSError: not all of them are."""
    try:
        yield
    except (OSError, UsageError):
        raise
    except ImportError as error:
        raise UsageError(str(error), "pip install 'clusterprof[remote]' s3fs") from None
    except Exception as error:
        raise OSError(f"{path}: {type(error).__name__}: {error}") from error


@cache
def _open_store(scheme: str) -> Any:
    """Open the file system of a scheme; addresses, keys and regions come from its own settings.

    Raises: UsageError when a package is missing.
    """
    package = PACKAGES[scheme]
    try:
        import fsspec

        # a recording grows: listings are not kept
        return fsspec.filesystem(scheme, use_listings_cache=False)
    except ImportError:
        raise UsageError(
            f"reading {scheme}:// needs fsspec and {package}, which are not installed",
            f"pip install 'clusterprof[remote]' {package}",
        ) from None


class RemotePath(type(Path())):  # type: ignore[misc]
    """Path of a folder or file in an object store, for reading only."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{self.parts[0]}//{'/'.join(self.parts[1:])}"

    def __fspath__(self) -> str:
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemotePath, tuple(self.parts)

    def _info(self) -> dict[str, Any]:
        """Return what the store knows of the object or folder.

        Raises: OSError when there is none, or the store does not answer.
        """
        with _convert_errors(self):
            info: dict[str, Any] = _open_store(self.parts[0][:-1]).info(str(self))
        return info

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield what the folder contains, by name.

        Raises: OSError when it cannot be listed.
        """
        with _convert_errors(self):
            listed = _open_store(self.parts[0][:-1]).ls(str(self), detail=False)
        own_key = "/".join(self.parts[1:])  # some stores list an empty object for the folder itself
        paths = {path.rstrip("/") for path in listed} - {own_key}
        for name in sorted(path.rsplit("/", 1)[-1] for path in paths):
            yield self / name

    def glob(self, pattern: str, **_: Any) -> Iterator[RemotePath]:  # type: ignore[override]
        """Yield what the folder contains; nothing when it cannot be listed."""
        assert pattern == "*", "an object store is listed as a whole"
        try:
            yield from self.iterdir()
        except OSError:
            return

    def open(self, *_: Any, **__: Any) -> BinaryIO:  # type: ignore[override]
        """Open an object for reading as bytes.

        Raises: OSError when it cannot be opened.
        """
        with _convert_errors(self):
            file = _open_store(self.parts[0][:-1]).open(
                str(self), "rb", block_size=_BLOCK_BYTES, cache_type="readahead"
            )
        return _RemoteFile(file, self)  # type: ignore[return-value]

    def read_bytes(self) -> bytes:
        """Read an object as a whole.

        Raises: OSError when it cannot be read.
        """
        with self.open() as file:
            return file.read()

    def stat(self, **_: Any) -> os.stat_result:  # type: ignore[override]
        """Return kind, size and time of the last change, as of a file.

        Raises: OSError when there is no such object.
        """
        info = self._info()
        mode = stat.S_IFDIR if info["type"] == "directory" else stat.S_IFREG
        changed: Any = info.get("LastModified") or info.get("last_modified")
        at_s = changed.timestamp() if hasattr(changed, "timestamp") else 0.0
        values = (mode, 0, 0, 1, 0, 0, int(info.get("size") or 0), 0, int(at_s), 0)
        return os.stat_result(values, {"st_mtime": at_s, "st_mtime_ns": round(at_s * 1e9)})

    def exists(self, **_: Any) -> bool:
        """Return whether there is an object or folder.

        Raises: OSError when the store does not answer.
        """
        try:
            self._info()
        except FileNotFoundError:
            return False
        return True

    def is_file(self, **_: Any) -> bool:
        """Return whether this is an object."""
        return self._has_type("file")

    def is_dir(self, **_: Any) -> bool:
        """Return whether this is a folder."""
        return self._has_type("directory")

    def _has_type(self, kind: str) -> bool:
        try:
            return bool(self._info()["type"] == kind)
        except OSError:
            return False


class _RemoteFile:
    """An open object; its errors are OSErrors."""

    def __init__(self, file: Any, path: RemotePath) -> None:
        self._file, self._path = file, path

    def __enter__(self) -> _RemoteFile:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        """Return whether the object is no longer open."""
        return bool(self._file.closed)

    def read(self, length: int = -1) -> bytes:
        """Read up to `length` bytes.

        Raises: OSError when the store does not answer.
        """
        with _convert_errors(self._path):
            data: bytes = self._file.read(length)
        return data

    def tell(self) -> int:
        """Return the position, bytes."""
        return int(self._file.tell())
