"""``lightning-llm generate``."""

import io
import json
import os
import sys

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


def test_an_exported_folder_gives_the_same_text(run, capsys, tmp_path):
    options = ["--prompt", "Abc", "--max-new-tokens", "20"]
    assert main(["export", run, str(tmp_path / "folder")]) == 0
    capsys.readouterr()
    assert generated(capsys, str(tmp_path / "folder"), *options) == generated(capsys, run, *options)


def test_the_prompt_from_a_file_or_the_standard_input_is_taken_as_it_is(run, capsys, tmp_path, monkeypatch):
    options = ["--max-new-tokens", "8"]
    expected = generated(capsys, run, "--prompt", "Abc\n", *options)
    (tmp_path / "prompt.txt").write_text("Abc\n")
    assert generated(capsys, run, "--prompt-file", str(tmp_path / "prompt.txt"), *options) == expected
    (tmp_path / "other.txt").write_bytes(b"Abc\r\n")  # which this model's characters lack: not turned into a newline
    assert main(["generate", run, "--prompt-file", str(tmp_path / "other.txt")]) == 2
    assert repr("\r") in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("Abc\n"))
    assert generated(capsys, run, "-", *options) == expected


def test_samples_are_different_and_the_first_is_what_it_is_alone(run, capsys):
    options = ["--prompt", "Abc", "--max-new-tokens", "12"]
    alone = generated(capsys, run, *options)
    out = generated(capsys, run, *options, "--num-samples", "3")
    head, *texts = out.replace("--- 2 ---", "--- 1 ---").replace("--- 3 ---", "--- 1 ---").split("--- 1 ---\n")
    assert head == ""
    assert texts[0] == alone
    assert len(set(texts)) == 3
    assert all(text.startswith("Abc") for text in texts)


def test_a_stop_string_ends_the_text_before_it(run, capsys):
    options = ["--prompt", "Abc", "--max-new-tokens", "30"]
    whole = generated(capsys, run, *options)
    stop = whole[10:12]
    end = whole.index(stop, 3)
    assert generated(capsys, run, *options, "--stop", "zzz", "--stop", stop) == whole[:end] + "\n"


def test_filters_reach_the_decoder(run, capsys):
    greedy = ["--prompt", "Abc", "--max-new-tokens", "20", "--temperature", "0"]
    most_likely = generated(capsys, run, *greedy)
    for narrow in (["--min-p", "1"], ["--top-k", "1"], ["--top-p", "1e-9"]):
        assert generated(capsys, run, *greedy[:-2], *narrow) == most_likely
    assert generated(capsys, run, *greedy, "--repetition-penalty", "50") != most_likely


def test_interactive_continues_each_line_and_goes_on_after_a_mistake(run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Abc\né\n\nDef"))
    assert main(["generate", run, "--interactive", "--max-new-tokens", "0"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Abc\nDef\n"
    assert "'é'" in captured.err
    assert "prompt is empty" in captured.err


def test_text_is_written_as_it_comes(run, monkeypatch):
    """Interrupted after some characters: what was to follow has not been made yet."""

    class Impatient(io.StringIO):
        def write(self, text):
            if len(self.getvalue()) > 50 and text != "\n":
                raise KeyboardInterrupt
            return super().write(text)

    monkeypatch.setattr("sys.stdout", Impatient())
    assert main(["generate", run, "--prompt", "Abc", "--max-new-tokens", "3000"]) == 130
    assert 50 < len(sys.stdout.getvalue()) < 60


def test_predict_writes_what_each_prompt_gives_alone(run, capsys, text_file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    prompts = ["A", "Abc def", "Ab"]
    words = ["predict", f"--data.path={text_file}", *MODEL, f"--ckpt_path={run}", "--trainer.logger=false"]
    words.append("--trainer.precision=32-true")
    cli_main([*words, f"--data.predict_prompts={json.dumps(prompts)}"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["prompt"] for line in lines] == prompts
    for line in lines:
        text = generated(capsys, run, "--prompt", line["prompt"], "--temperature", "0", "--max-new-tokens", "64")
        assert line["text"][: len(text) - 1] == text[:-1][: len(line["text"])]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--prompt", "é"], "'é'"),
        (["--prompt", ""], "prompt is empty"),
        (["--temperature", "-1"], "temperature must be 0 (greedy decoding), or at least 1e-06"),
        (["--temperature", "1e-300"], "temperature must be 0 (greedy decoding), or at least 1e-06"),
        (["--top-k", "0"], "top_k must be at least 1"),
        (["--max-new-tokens", "-5"], "max_new_tokens must be at least 0"),
        (["--device", "abacus"], "device 'abacus' is unknown: choose cpu, cuda or mps"),
        (["--device", "meta"], "device 'meta' is not supported: choose cpu, cuda or mps"),
        (["--device", "cuda:99"], "device cuda:99: this torch finds"),
        (["--prompt", "a" * 33], "prompt has 33 tokens, more than the model's context (max_position_embeddings) of 32"),
        (["--prompt", "a", "--interactive"], "one prompt at a time: prompt and interactive"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (["--num-samples", "0"], "--num-samples must be at least 1"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--min-p", "2"], "min_p must be at least 0 and at most 1"),
        (["--repetition-penalty", "0"], "repetition_penalty must be from 1e-06"),
        (["--repetition-penalty", "1e-300"], "repetition_penalty must be from 1e-06"),
        (["--stop", ""], "a stop string must have at least one character"),
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
    assert "rejected" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_an_unknown_command_is_named(capsys):
    assert main(["trian"]) == 2
    assert "unknown command 'trian'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe", "prompt.txt is not UTF-8 text: byte 0"),
        ("a FIFO", "prompt.txt is a FIFO, expected a file"),
        ("a folder", "prompt.txt is a folder, expected a file"),
        ("a device", "prompt.txt is a device, expected a file"),
        ("large", "prompt.txt has 4194305 bytes, expected at most 4194304"),
        ("missing", "No such file or directory"),
        ("closed", "Permission denied"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_one_line(tmp_path, error_line, obeying_permissions, content, says):
    file = tmp_path / "prompt.txt"
    if content == "a FIFO":
        os.mkfifo(file)
    elif content == "a folder":
        file.mkdir()
    elif content == "a device":
        file.symlink_to("/dev/zero")
    elif content != "missing":
        file.write_bytes(content if isinstance(content, bytes) else b"x" * (4194305 if content == "large" else 1))
        file.chmod(0 if content == "closed" else 0o600)
    assert main(["generate", "nowhere", "--prompt-file", str(file)]) == 2
    assert says in error_line()


def test_a_prompt_without_end_is_one_line(monkeypatch, error_line):
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 4194305))
    assert main(["generate", "nowhere", "-"]) == 2
    assert "prompt on standard input has more than 4194304 characters" in error_line()
