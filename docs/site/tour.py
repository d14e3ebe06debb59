"""Run examples/tour.ipynb in a folder of its own and store its outputs in it; `make tour` runs it, about two minutes.

The notebook keeps a fingerprint of the cells that gave the outputs, so that a test sees when they are out of date.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "tour.ipynb"
KEY = "fingerprint"  # in the notebook's metadata


def fingerprint(notebook: nbformat.NotebookNode) -> str:
    """Return a hash of the sources of a notebook's code cells."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()[:16]


def execute(notebook: nbformat.NotebookNode, folder: str | os.PathLike[str]) -> None:
    """Run all cells in a folder, in place, with a kernel of this interpreter; an error in a cell is raised."""
    # The default limits, of a minute for the kernel and seconds for its output, are too short for a busy machine.
    limits = {"timeout": None, "startup_timeout": 600, "iopub_timeout": 600}
    where = {"metadata": {"path": str(folder)}}
    options: dict[str, Any] = {"record_timing": False, "coalesce_streams": True, **limits}
    NotebookClient(notebook, kernel_name="python3", resources=where, **options).execute()


def main() -> None:
    """Execute the notebook and write it back, without progress bars."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, folder)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata[KEY] = fingerprint(notebook)
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
