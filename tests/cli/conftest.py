import shutil
from contextlib import contextmanager

import pytest
import yaml

CONFIG = {
    "model": {
        "architecture": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        "optimizer": {"class_path": "lightning_llm.optim.AdamW", "init_args": {"lr": 0.01}},
    },
    "data": {"path": "text.txt", "tokenizer": "char", "context_length": 16, "global_batch_size": 8},
    "trainer": {"accelerator": "cpu", "max_steps": 6, "val_check_interval": 3, "limit_val_batches": 2},
    "keep_freed_memory": False,
}


@pytest.fixture
def write_config(tmp_path):
    """``write_config(section={…}, …)`` writes a config and returns its path."""

    def write(name="config.yaml", **sections):
        path = tmp_path / name
        path.write_text(yaml.safe_dump(sections), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def folder(tmp_path, monkeypatch, text_file):
    """The current folder, with a text and ``base.yaml``, the config of a tiny baseline."""
    monkeypatch.chdir(tmp_path)
    _fill(tmp_path, text_file)
    return tmp_path


def _fill(folder, text_file):
    (folder / "text.txt").write_text(text_file.read_text())
    (folder / "base.yaml").write_text(yaml.safe_dump(CONFIG))


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory, text_file):
    """``with shared_folder() as (folder, patch)``: such a folder that tests of a module copy, and a MonkeyPatch."""

    @contextmanager
    def shared(source=None):
        folder = tmp_path_factory.mktemp("shared")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            if source is None:
                _fill(folder, text_file)
            else:
                shutil.copytree(source, folder, dirs_exist_ok=True)
            yield folder, patch

    return shared
