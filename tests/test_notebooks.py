"""The notebooks: those committed were executed from top to bottom, and two run again with small parameters."""

import ast
import base64
import os
import re
import sys
from pathlib import Path

import matplotlib
import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

from lightning_llm.model.parts import BUILT_IN
from tests.patience import HANGS_S

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ABSOLUTE_PATH = re.compile(
    r"(?<![\w.~/-])(?:/(?:home|root|tmp|usr|opt|var|work|mnt|Users|private)\b|[A-Z]:\\\w|~/\w)\S*"
)

# What the cell of parameters says in a run that must end within two minutes on two busy cores.
SMALL = {
    "01_shakespeare_fast": {
        "seeds": [1, 2],
        "first_steps": 20,
        "first_eval_batches": 2,
        "technique_shape": "2x2x64x192x64x4x256",
        "technique_names": ["per-head loops", "all heads at once", "memory-optimized MLP"],
        "technique_rounds": 1,
        "fit_steps": 10,
        "modern_steps": 8,
        "validation_batches": 2,
        "ddp_steps": 4,
        "sample_characters": 40,
    },
    "02_memory_optimized_swiglu": {
        "shapes": ["2x16x32x64x1", "2x8x16x48x2"],
        "timed_layers": {"2x8x16x48x2": 1},
        "seconds_per_shape": 1,
        "one_shape": "2x16x32x64x1",
        "chunk_counts": [1, 4],
        "chunk_rounds": 1,
        "layers": 2,
        "context_length": 32,
        "rows": 2,
    },
    "03_training_from_scratch": {
        "raw_tokens": 500_000,
        "train_steps": 24,
        "batch_size": 2,
        "context_length": 32,
        "hidden_size": 48,
        "num_layers": 1,
        "max_new_tokens": 10,
        "tokenizer_options": "byte",
    },
    "04_plug_in_your_own_mlp": {
        "steps": 8,
        "sample_step": 4,
        "seeds": [1, 2],
        "validation_batches": 1,
        "new_tokens": 8,
        "sum_steps": 10,
    },
    "05_which_mlp": {"steps": 6, "looks": [2], "validation_batches": 1},
    "06_does_my_change_help": {"pairs": 2, "iterations": 2},
}

# .ci/notebooks runs all of them, as they are
IN_CI = [path for path in NOTEBOOKS if path.stem.startswith(("02", "03"))]
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def pictures(notebook):
    """PNG files among the outputs, as bytes."""
    encoded = [output.data["image/png"] for output in outputs(notebook) if "image/png" in output.get("data", {})]
    return [base64.b64decode(picture) for picture in encoded]


def texts(notebook):
    """Everything that can be read: sources, printed text, the texts of results."""
    yield from (cell.source for cell in notebook.cells)
    for output in outputs(notebook):
        yield output.get("text", "")
        yield from (text for kind, text in output.get("data", {}).items() if kind.startswith("text/"))


def parameters_cell(notebook):
    [found] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    return found


def parameters(notebook):
    """The assignments of the cell of parameters; it must hold nothing else."""
    values = {}
    for statement in ast.parse(parameters_cell(notebook).source).body:
        assert isinstance(statement, ast.Assign), ast.unparse(statement)
        [target] = statement.targets
        assert isinstance(target, ast.Name), ast.unparse(statement)
        values[target.id] = ast.literal_eval(statement.value)
    return values


def test_every_notebook_has_small_parameters():
    assert {path.stem for path in NOTEBOOKS} == SMALL.keys()


@each_notebook
def test_was_executed_in_order(path):
    cells = code_cells(read(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    results = [output for output in outputs(read(path)) if output.output_type == "execute_result"]
    assert {output.execution_count for output in results} <= {cell.execution_count for cell in cells}


@each_notebook
def test_nothing_failed_or_complained(path):
    for output in outputs(read(path)):
        assert output.output_type != "error", output.get("evalue")
        assert output.get("name") != "stderr", output.text


@each_notebook
def test_names_no_place_of_the_machine_it_ran_on(path):
    """No absolute path, no home folder."""
    found = [place for text in texts(read(path)) for place in ABSOLUTE_PATH.findall(text)]
    assert not found


@each_notebook
def test_the_cell_after_the_installation_has_the_parameters(path):
    notebook = read(path)
    assert parameters_cell(notebook) is code_cells(notebook)[1]
    values = parameters(notebook)
    small = SMALL[path.stem]
    assert small.keys() <= values.keys()
    assert not [name for name, value in small.items() if value == values[name]], "small values that change nothing"


def test_the_first_was_run_on_shakespeare_and_reproduces_the_course():
    [first] = [path for path in NOTEBOOKS if path.stem.startswith("01")]
    printed = "".join(texts(read(first)))
    assert "text: Tiny Shakespeare, 1,115,394 characters" in printed
    assert "all figures of the course are within 0.05 nats; seeds 1337, 0, 1" in printed


def test_the_fourth_trains_a_part_of_each_kind_from_equal_initial_values():
    [fourth] = [path for path in NOTEBOOKS if path.stem.startswith("04")]
    printed = "".join(output.get("text", "") for output in outputs(read(fourth)))
    for kind in BUILT_IN:
        assert re.search(rf"^{kind} +my_parts\.\w+ .* (\d+) of \1$", printed, re.MULTILINE), kind


def install_cell(path):
    return code_cells(read(path))[0].source


def test_the_same_cell_installs_in_every_notebook():
    assert len({install_cell(path) for path in NOTEBOOKS}) == 1


def test_nothing_is_installed_where_the_package_can_be_imported(monkeypatch):
    monkeypatch.setattr("subprocess.run", lambda *words, **options: pytest.fail("a command was started"))
    before = os.getcwd()
    exec(install_cell(NOTEBOOKS[0]), {})
    assert os.getcwd() == before


@pytest.mark.parametrize(("start", "clone"), [("clone/notebooks", ".."), (".", "lightning-llm")])
def test_a_clone_is_installed_where_nothing_is(start, clone, tmp_path, monkeypatch):
    (tmp_path / start).mkdir(exist_ok=True, parents=True)
    notebooks = (tmp_path / start / clone).resolve() / "notebooks"
    notebooks.mkdir(exist_ok=True, parents=True)
    (notebooks.parent / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path / start)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    started = []
    monkeypatch.setattr("subprocess.run", lambda words, check: started.append(words))
    exec(install_cell(NOTEBOOKS[0]), {})
    assert started == [[sys.executable, "-m", "pip", "install", "--quiet", clone]]
    assert Path.cwd() == notebooks


@pytest.mark.slow
@pytest.mark.parametrize("path", IN_CI, ids=lambda path: path.stem)
def test_runs_with_small_parameters(path, tmp_path):
    notebook = read(path)
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    parameters_cell(notebook).source += "".join(f"\n{name} = {value!r}" for name, value in SMALL[path.stem].items())
    folder = tmp_path / "notebooks"
    folder.mkdir()
    for name in ("configs", "docs", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    kernel = AsyncKernelManager(
        # no folder of kernels is looked into: what is left is the interpreter that runs this test
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
        connection_file=str(tmp_path / "kernel.json"),
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",  # of several, on busy cores, each waits for the others
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),  # no text from an earlier download
        "MPLCONFIGDIR": matplotlib.get_cachedir(),  # it lies below the above, and takes seconds to make
        # nothing listens there: downloads fail at once, so that what is tested does not depend on the network
        "https_proxy": "http://127.0.0.1:9",
        "no_proxy": "127.0.0.1",
    }
    client = NotebookClient(notebook, km=kernel, timeout=HANGS_S, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment, cleanup_kc=True)  # else a kernel that was given would be left running
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any(picture.startswith(b"\x89PNG") and len(picture) > 2000 for picture in pictures(notebook))
