"""The notebook of the documentation runs, and shows the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs nbclient")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
pytest.importorskip("ipykernel", reason="needs ipykernel")
pytest.importorskip("pandas", reason="needs pandas")

ROOT = Path(__file__).parents[2]


def run_notebook() -> list[Any]:
    notebook = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": ROOT / "docs"}}
    )
    client.execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_every_notebook_cell_runs_and_shows_its_result() -> None:
    screen, findings, lines, ledger, gate = (cell.outputs[-1].data for cell in run_notebook())
    assert '<th scope="row"' in screen["text/html"] and "Main cause" in screen["text/html"]
    assert "host-asleep" in findings["text/plain"] and "_gpu_jobs.py" in findings["text/plain"]
    assert "build_sleep" in lines["text/plain"]
    assert "h2d-sync" in ledger["text/plain"]
    assert "fail" in gate["text/plain"]
