"""The notebook runs from top to bottom, here on a tiny model."""

import nbclient
import nbformat

from tests.conftest import ROOT
from tests.search.conftest import *  # noqa: F403 a tiny model with a calibration


def test_tour(workdir, monkeypatch):
  monkeypatch.setenv("XE_MODEL", str(workdir))
  notebook = nbformat.read(ROOT / "notebooks" / "tour.ipynb", as_version=4)
  assert not any(cell.get("outputs") for cell in notebook.cells)  # outputs are not committed
  resources = {"metadata": {"path": str(ROOT / "notebooks")}}
  nbclient.NotebookClient(
    notebook, timeout=600, kernel_name="python3", resources=resources
  ).execute()
  outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
  printed = "".join(output.get("text", "") for output in outputs)
  assert "results a query; expected: " in printed
  assert printed.count("': ") == 5  # captions with their results, or nothing relevant
  assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
