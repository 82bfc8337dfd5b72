"""Where a command-line tool is. Apart from `linux.tool`, for whoever only asks stays light."""

from __future__ import annotations

import os
from collections.abc import Mapping


def find(name: str, environ: Mapping[str, str], usual: str = "") -> str | None:
    """Return the path of a tool: on PATH, else at its usual place; None when it is not there."""
    folders = environ.get("PATH", os.defpath).split(os.pathsep)
    for path in (*(f"{folder}/{name}" for folder in folders if folder), usual):
        if path and os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    return None
