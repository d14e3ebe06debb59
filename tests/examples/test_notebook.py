"""The notebook runs from its first cell to its last, and is kept without what it once put out."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"


@pytest.fixture
def notebook() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_it_is_kept_without_output(notebook: nbformat.NotebookNode) -> None:
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.language_info == {"name": "python"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)
        assert set(cell.metadata) <= {"tags"}


# Its kernel's channels are closed late.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_it_runs(notebook: nbformat.NotebookNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    assert "TINY = False" in parameters.source
    parameters.source = parameters.source.replace("TINY = False", "TINY = True")
    # A kernel of this interpreter, whatever kernels a user has, and nothing of theirs.
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    where = {"metadata": {"path": str(tmp_path)}}
    # Its own limits, of a minute for the kernel and seconds for what it says, are too short for a busy machine.
    patient = {"timeout": None, "startup_timeout": 600, "iopub_timeout": 600}
    NotebookClient(notebook, kernel_name="python3", resources=where, **patient).execute()
    said = "".join(
        output.text
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream"
    )
    assert re.search(r"(?m)^infonce +llm-jepa ", said)
    assert said.count("$ stepjepa ") == 10
    pictures = [
        output
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 2
    assert (tmp_path / "runs" / "notebook-1" / "infonce" / "test.summary.json").exists()
