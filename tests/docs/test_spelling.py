"""Spelling of the notebooks' cells; of everything else ``codespell`` alone is asked, which reads no notebook."""

import json
import subprocess
import sys

import pytest

from tests.docs.markdown import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def misspelt(text, tmp_path):
    file = tmp_path / "cells.md"
    file.write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "codespell_lib", str(file)], cwd=ROOT, capture_output=True, text=True)
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_are_spelt_right(notebook, tmp_path):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert not misspelt("\n\n".join("".join(cell["source"]) for cell in cells), tmp_path)


def test_a_wrong_word_is_found(tmp_path):
    assert "teh ==> the" in misspelt("This is teh end.", tmp_path)  # codespell:ignore
