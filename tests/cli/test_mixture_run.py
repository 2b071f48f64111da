"""A run on several stores, from the command line."""

import pytest

from lightning_llm.cli.data import run_prepare


def test_a_mixture_with_document_masks_trains_and_logs_the_loss_of_each_source(tiny, tmp_path, text_file, capsys):
    lines = text_file.read_text().splitlines()
    for name, part in (("a", lines[:500]), ("b", lines[500:])):
        (tmp_path / name).mkdir()
        for number in range(20):
            (tmp_path / name / f"{number}.txt").write_text("\n".join(part[number * 25 : number * 25 + 25]))
    run_prepare(["a", "--tokenizer", "bpe", "--vocab-size", "300", "--out", "stores/a"])
    run_prepare(["b", "--tokenizer", "stores/a/tokenizer.json", "--out", "stores/b"])
    changes = {"data.tokenizer": "bpe", "data.path": None, "data.document_mask": True}
    changes |= {"data.mixture": {"stores/a": 2, "stores/b": 1}, "model.architecture.recompute": "block"}
    cli = tiny("fit", **changes)
    printed = capsys.readouterr().out
    assert "67% from stores/a: " in printed
    assert "mfu" not in printed.lower()  # no peak of a CPU is known, and nobody asks for it
    metrics = cli.trainer.callback_metrics
    sizes = [source.store.splits["val"].tokens - 1 for source in cli.datamodule.sources]
    mean = (metrics["val_loss/a"] * sizes[0] + metrics["val_loss/b"] * sizes[1]) / sum(sizes)
    assert metrics["val_loss"] == pytest.approx(mean.item(), rel=1e-5)
    assert metrics["val_loss/a"] != metrics["val_loss/b"]
    assert metrics["val_loss"] < 5.7
