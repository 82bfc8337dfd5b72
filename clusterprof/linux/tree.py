"""Folders and small files of /proc and /sys that are read once; what is not there is empty."""

from __future__ import annotations

from pathlib import Path


def entries(folder: Path) -> list[Path]:
    """Return what is in a folder, by name; [] when it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def text(path: Path) -> str:
    """Return a file's text without white space around it; "" when it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except (OSError, ValueError):
        return ""


def number(path: Path) -> int | None:
    """Return the number in a file; None when there is none."""
    try:
        return int(text(path))
    except ValueError:
        return None
