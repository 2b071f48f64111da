"""Which store a run reads is what the user named: none is made of something else, and none a second time."""

import shutil
from pathlib import Path

import pytest

from lightning_llm.cli.train import cli_main
from lightning_llm.data import find_store
from lightning_llm.data.prepare import prepare_store
from lightning_llm.training.callbacks import StopOnSignal

MISSING = "data.store 'typo' does not exist: give an existing store, or the text to prepare it from"


@pytest.fixture
def config(tmp_path, text_file, monkeypatch):
    """A config that names a corpus, which is a short text here."""
    path = tmp_path / "small.yaml"
    path.write_text("data: {corpus: stdlib}\n")
    real = find_store.open_corpus
    monkeypatch.setattr(
        find_store, "open_corpus", lambda inputs: real([str(text_file) if one == "stdlib" else one for one in inputs])
    )
    return f"--config={path}"


def at_step(number, action):
    """A hook of every run's last callback, which does something once, after this step."""

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == number:
            action()

    return on_train_batch_end


@pytest.mark.parametrize("command", ["fit", "check"])
@pytest.mark.parametrize("words", [[], ["--data.vocab_size=300"], ["--data.corpus=null"]])
def test_a_misspelled_store_is_one_line(tiny, config, command, words, error_line):
    for first in ([], [config]):
        with pytest.raises(SystemExit, match="2"):
            tiny(command, *first, *words, **{"data.path": None, "data.store": "typo"})
        assert MISSING in error_line()
        assert not Path("typo").exists()
        assert not Path("runs").exists()


@pytest.mark.parametrize(
    "words", [["--data.corpus", "stdlib"], ["--data.corpus=stdlib"], ["--data", '{"corpus": "stdlib"}']]
)
def test_a_corpus_on_the_command_line_is_what_a_missing_store_is_made_of(tiny, config, words, capsys):
    tiny("fit", config, *words, **{"data.path": None, "data.store": "new"})
    out = capsys.readouterr().out
    assert out.count("Preparing new from stdlib (0.0 MB), tokenizer char.") == 1
    assert out.index("Preparing") < out.index("parameters")
    tiny("fit", config, **{"data.path": None, "data.store": "new"})
    assert "Preparing" not in capsys.readouterr().out


def test_a_store_is_prepared_in_sight_and_an_evaluation_prints_results_alone(tiny, capsys):
    tiny("fit")
    assert capsys.readouterr().out.count("Preparing stores/text-char-") == 1
    shutil.rmtree("stores")
    tiny("validate", ckpt_path="last")
    out, error = capsys.readouterr()
    assert "Preparing stores/text-char-" in error
    assert {line.split()[0] for line in out.splitlines()} >= {"val_loss"}
    assert "Preparing" not in out


@pytest.mark.parametrize("named", [True, False])
def test_a_store_that_is_deleted_during_a_run_is_not_prepared_again(tiny, text_file, monkeypatch, error_line, named):
    store = prepare_store(str(text_file), "mine", tokenizer="char").path if named else None
    monkeypatch.setattr(
        StopOnSignal, "on_train_batch_end", at_step(5, lambda: shutil.rmtree("mine" if named else "stores"))
    )
    with pytest.raises(SystemExit, match="2"):  # the last step is validated from files that are gone
        tiny("fit", **{"data.store": store and str(store), "trainer.val_check_interval": 4})
    assert "cannot be read: No such file" in error_line()
    assert not Path("mine" if named else "stores").exists()
    assert list(Path("runs").glob("**/step-*.ckpt"))


def test_a_vanished_store_ends_the_next_attempt_of_its_run(tiny, text_file, error_line):
    prepare_store(str(text_file), "mine", tokenizer="char")
    options = {"data.path": None, "data.store": "mine"}
    tiny("fit", **options, **{"trainer.max_steps": 3})
    shutil.rmtree("mine")
    with pytest.raises(SystemExit, match="2"):
        tiny("fit", "--ckpt_path=last", **options)
    assert "data.store 'mine' does not exist" in error_line()


def test_a_vanished_store_without_a_name_is_prepared_in_sight_and_compared(tiny, tmp_path, text_file, capsys):
    text = tmp_path / "text.txt"
    text.write_text(text_file.read_text())
    options = {"data.path": "text.txt", "model.schedule.class_path": "lightning_llm.optim.Constant"}
    tiny("fit", **options, **{"trainer.max_steps": 3})
    shutil.rmtree("stores")
    capsys.readouterr()
    assert tiny("fit", "--ckpt_path=last", **options, **{"trainer.max_steps": 4}).trainer.global_step == 4
    assert "Preparing stores/text-char-" in capsys.readouterr().out
    text.write_text(text_file.read_text()[::-1])
    with pytest.raises(SystemExit, match="2"):
        tiny("fit", "--ckpt_path=last", **options)
    out, error = capsys.readouterr()
    assert "has changed since it was prepared" in out
    assert "the checkpoint was trained on token store" in error


def test_a_store_that_shrinks_during_a_run_is_one_line(tiny, text_file, monkeypatch, error_line):
    prepare_store(str(text_file), "mine", tokenizer="char")
    cut = at_step(2, lambda: Path("mine/train.bin").write_bytes(b""))
    monkeypatch.setattr(StopOnSignal, "on_train_batch_end", cut)
    with pytest.raises(SystemExit, match="2"):
        tiny("fit", **{"data.path": None, "data.store": "mine"})
    assert "mine/train.bin was truncated while it was read: 0 bytes instead of" in error_line()


def test_a_text_of_another_vocabulary_is_for_evaluate(tiny, tmp_path, capsys):
    run = tiny("fit").trainer.log_dir
    Path("other.txt").write_text("0123456789\n" * 400)
    with pytest.raises(SystemExit):
        cli_main(["validate", "--ckpt_path", run, "--data.path", "other.txt", "--data.store=null"])
    assert "measure with lightning-llm evaluate RUN --data TEXT" in capsys.readouterr().err
