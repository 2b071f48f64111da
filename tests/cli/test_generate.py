"""``lightning-llm generate``."""

import pytest
import torch

from lightning_llm.__main__ import main
from lightning_llm.cli.train import cli_main

MODEL = [
    "--model.architecture.hidden_size=32",
    "--model.architecture.num_hidden_layers=1",
    "--model.architecture.max_position_embeddings=32",
    "--data.tokenizer=char",
    "--data.context_length=16",
    "--trainer.max_steps=2",
    "--trainer.log_every_n_steps=1",
    "--trainer.accelerator=cpu",
]


@pytest.fixture(scope="module")
def run(text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        cli = cli_main(["fit", f"--data.path={text_file}", f"--trainer.default_root_dir={folder}", *MODEL])
    return cli.trainer.log_dir


def generated(capsys, *words):
    assert main(["generate", *words]) == 0
    return capsys.readouterr().out


def test_a_run_directory_and_its_checkpoint_give_the_same_text(run, capsys):
    options = ["--prompt", "Abc", "--max-new-tokens", "20", "--seed", "3"]
    first = generated(capsys, run, *options)
    assert first.startswith("Abc")
    assert len(first) == 3 + 20 + 1
    assert generated(capsys, f"{run}/checkpoints/step-00000002.ckpt", *options) == first
    assert generated(capsys, run, *options[:-1], "4") != first


def test_greedy_needs_no_seed(run, capsys):
    options = ["--prompt", "Abc", "--max-new-tokens", "20", "--temperature", "0", "--seed"]
    assert generated(capsys, run, *options, "1") == generated(capsys, run, *options, "2")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--prompt", "é"], "'é'"),
        (["--prompt", ""], "prompt is empty"),
        (["--temperature", "-1"], "temperature must be at least 0"),
        (["--top-k", "0"], "top_k must be at least 1"),
        (["--max-new-tokens", "-5"], "max_new_tokens must be at least 0"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_a_users_mistake_is_one_line(run, capsys, options, says):
    assert main(["generate", run, *options]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("name", ["nowhere.ckpt", "empty"])
def test_what_is_no_checkpoint_is_named(name, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["generate", str(tmp_path / name)]) == 2
    assert name in capsys.readouterr().err


def test_a_malicious_checkpoint_is_refused(tmp_path, capsys):
    class Code:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save(Code(), tmp_path / "bad.ckpt")
    assert main(["generate", str(tmp_path / "bad.ckpt")]) == 2
    assert "refused" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_an_unknown_command_is_named(capsys):
    assert main(["trian"]) == 2
    assert "unknown command 'trian'" in capsys.readouterr().err
