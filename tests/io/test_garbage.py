"""The garbage collector does not run while a checkpoint is read or a step is traced."""

import gc
from contextlib import suppress

import pytest

from lightning_llm.accounting import memory, tracing
from lightning_llm.checkpoints import archives
from lightning_llm.io.garbage import no_garbage_collection
from lightning_llm.model.config import ModelConfig


def trace(path):
    config = ModelConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    memory.step_memory(config, rows=1, context_length=8)


@pytest.mark.parametrize(
    ("work", "place", "inner"),
    [
        (archives.read_archive, archives, "_check_archive"),
        (archives.is_intact_file, archives, "_check_archive"),
        (trace, tracing, "trace_step"),
    ],
    ids=["read", "compare the checksums", "trace"],
)
def test_nothing_is_collected_and_then_it_is_as_before(work, place, inner, tmp_path, monkeypatch):
    archives.write_atomically({"a": 1}, tmp_path / "x.ckpt")
    function, enabled = getattr(place, inner), []
    monkeypatch.setattr(
        place, inner, lambda *args, **kwargs: enabled.append(gc.isenabled()) or function(*args, **kwargs)
    )
    work(tmp_path / "x.ckpt")
    assert enabled == [False]
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off():
    gc.disable()
    try:
        with suppress(KeyError), no_garbage_collection():
            raise KeyError
        assert not gc.isenabled()
    finally:
        gc.enable()
