"""Reports of Nsight Systems (`.nsys-rep`), converted with `nsys export` where it is installed.

## How to make the file

    nsys profile -t cuda,nvtx,osrt -o profile torchrun --nproc-per-node 8 train.py

## How to analyze it

    clusterprof analyze profile.nsys-rep

## What is read

The format is not public. If `nsys` is on the PATH, the importer runs
`nsys export --type sqlite` into a temporary folder, reads that file as a profile of Nsight Systems,
and deletes the folder. Without `nsys` the report is refused with the command to run where it is
installed:

    nsys export --type sqlite profile.nsys-rep

## How the numbers are computed

As for the exported profile.

## What it cannot see

What the exported profile does not have. An older `nsys` cannot export a report of a newer one; its
message is then part of the refusal.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.byte_sources import FileSource, open_sources
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.nsys.database import MAGIC
from clusterprof.analysis.importers.nsys.importer import Nsys

_SUFFIXES = (".nsys-rep", ".qdrep")
_MAX_SECONDS = 3600
_MAX_MESSAGE_CHARACTERS = 300


class NsysReport:
    """Importer of reports that `nsys` has to export first."""

    name: ClassVar[str] = "nsys-rep"
    title: ClassVar[str] = "Nsight Systems report (nsys-rep)"
    combines_files: ClassVar[bool] = True

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether the name is that of a report; its content has no public form."""
        return path.name.endswith(_SUFFIXES) and not head.startswith(MAGIC)

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield a node per report.

        Raises: CannotImportError when `nsys` is not installed, or cannot export a report.
        """
        with tempfile.TemporaryDirectory(prefix="clusterprof-nsys-") as folder:
            exported: list[FileSource] = []
            for number, source in enumerate(sources):
                node_folder = Path(folder) / str(number)
                node_folder.mkdir()
                exported += _export_report(source, node_folder)
            yield from Nsys().nodes(exported, accounts)


def _export_report(source: Source, folder: Path) -> Iterator[FileSource]:
    """Yield the SQLite file of a report.

    Raises: CannotImportError when `nsys` is not installed, or cannot export the report.
    """
    report = source.path.name
    advice = f"nsys export --type sqlite {shlex.quote(report)}"
    tool = shutil.which("nsys")
    if tool is None:
        raise CannotImportError(
            f"{report}: a report of Nsight Systems, and nsys is not installed here; run where it"
            f" is: {advice}; then analyze the .sqlite file"
        )
    if source.file != source.path or not source.file.is_file():
        raise CannotImportError(f"{report}: unpack the archive first, or run: {advice}")
    target = folder / f"{source.file.stem}.sqlite"
    command = [tool, "export", "--type", "sqlite", "--force-overwrite", "true"]
    try:
        outcome = subprocess.run(
            [*command, "--output", str(target), str(source.file.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_MAX_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotImportError(f"{report}: nsys export did not run ({error}); {advice}") from error
    if outcome.returncode or not target.is_file():
        message = " ".join(outcome.stdout.decode("utf-8", "replace").split())
        raise CannotImportError(
            f"{report}: nsys export failed with code {outcome.returncode}"
            f" ({message[-_MAX_MESSAGE_CHARACTERS:]}); use the nsys that recorded it: {advice}"
        )
    yield from open_sources(target)
