"""``lightning-llm evaluate`` with several models: run folders, checkpoints, exported folders, and earlier files."""

import json
import re
import shutil

import pytest
import torch

from lightning_llm import ModelConfig, Transformer
from lightning_llm.__main__ import main
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.interop import export_model

TEXTS = ["To be, or not to be, that is the question.", "Whether 'tis nobler in the mind", "to suffer " * 5, "x"]
TEXTS += ["the slings and arrows of outrageous fortune", "or to take arms against a sea of troubles"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Three exported models, the third with another tokenizer and context, and a text."""
    work = tmp_path_factory.mktemp("models")
    bpe, byte = Tokenizer.train_bpe(TEXTS, 290), Tokenizer.train_byte()
    for seed, (name, tokenizer, context) in enumerate([("a", bpe, 16), ("b", bpe, 16), ("c", byte, 24)]):
        torch.manual_seed(seed)
        sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "max_position_embeddings": context}
        export_model(Transformer(ModelConfig(**sizes)).eval(), tokenizer.to_str(), work / name)
    (work / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return work


@pytest.fixture
def folder(world, tmp_path, monkeypatch):
    shutil.copytree(world, tmp_path / "world")
    monkeypatch.chdir(tmp_path / "world")
    return tmp_path / "world"


def evaluated(capsys, *words):
    """What the command prints, and the numbers that it writes."""
    assert main(["evaluate", *words, "--json", "numbers.json"]) == 0, capsys.readouterr().err
    with open("numbers.json") as file:
        return capsys.readouterr().out, json.load(file)


def refused(capsys, *words):
    assert main(["evaluate", *words]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    return error


DATA = ("--data", "texts.jsonl")


def test_several_models_have_their_own_numbers_and_differences(folder, capsys):
    alone = {name: evaluated(capsys, name, *DATA) for name in "abc"}
    printed, numbers = evaluated(capsys, "a", "b", "c", *DATA)
    assert numbers["models"] == [alone[name][1] for name in "abc"]
    lines = printed.splitlines()
    assert lines[:3] == [f"{name}: {alone[name][0].strip()}" for name in "abc"]
    assert "b minus a, 5 documents:" in lines
    of_b, of_c = numbers["comparisons"]
    assert [*of_b["differences"]] == ["loss", "bits_per_byte"]
    assert [*of_c["differences"]] == ["bits_per_byte"]
    found = of_b["differences"]["loss"]
    assert found["difference"] == pytest.approx(numbers["models"][1]["loss"] - numbers["models"][0]["loss"])
    low, high = found["interval"]
    expected = (
        f"  {found['difference']:+.4f} (97.5% interval {low:+.4f} to {high:+.4f}) nats per token: {of_b['verdict']}"
    )
    assert expected in lines
    of_bits = next(line for line in lines if line.endswith("bits per byte"))  # a verdict is of one metric
    assert f"{of_b['differences']['bits_per_byte']['difference']:+.4f}" in of_bits
    assert lines[-1].startswith("An interval holds for these models on other documents like these.")
    assert "another seed" in lines[-1]


def test_a_file_in_place_of_a_model_gives_the_same_comparison(folder, capsys):
    printed, numbers = evaluated(capsys, "a", "b", *DATA)
    for name in "ab":
        assert main(["evaluate", name, *DATA, "--json", f"{name}.json"]) == 0
    (folder / "both").write_text(json.dumps(numbers))  # found by its content
    capsys.readouterr()
    for words in (["a.json", "b.json"], ["a", "b.json", *DATA], ["a.json", "b", *DATA], ["both"]):
        said, found = evaluated(capsys, *words)
        assert found["comparisons"][0]["differences"] == numbers["comparisons"][0]["differences"], words
        assert re.findall(r"[+-]\d\.\d{4}", said) == re.findall(r"[+-]\d\.\d{4}", printed)
    said, found = evaluated(capsys, "both", "c", *DATA)
    assert [each["model"] for each in found["comparisons"]] == ["both: b", "c"]
    said, _ = evaluated(capsys, "a.json", "--per-document")
    assert len(said.splitlines()) == 7
    assert main(["evaluate", "a", *DATA, "--per-document"]) == 0
    assert capsys.readouterr().out == said


def test_runs_and_checkpoints_are_compared_with_folders(tiny, text_file, tmp_path, capsys):
    tiny("fit")
    tiny("fit", **{"seed_everything": 1})
    runs = sorted(str(path) for path in tmp_path.glob("runs/*/version_*"))
    assert len(runs) == 2
    (checkpoint,) = sorted(tmp_path.glob("runs/*/version_0/checkpoints/*best*"))[:1]
    assert main(["export", runs[0], "exported"]) == 0
    text = text_file.read_text()
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text[i : i + 200]}) + "\n" for i in range(0, 1400, 200))
    )
    capsys.readouterr()
    _, numbers = evaluated(capsys, runs[0], str(checkpoint), "exported", runs[1], *DATA)
    losses = [each["differences"]["loss"] for each in numbers["comparisons"]]  # an export has the same tokens
    assert [each["difference"] for each in losses[:2]] == [0, pytest.approx(0, abs=1e-6)]
    assert losses[2]["interval"][0] <= losses[2]["difference"] <= losses[2]["interval"][1]
    assert losses[2]["difference"] != 0


def test_one_document_has_no_interval_and_a_line_that_says_so(folder, capsys):
    (folder / "text.txt").write_text(" ".join(TEXTS))
    printed, numbers = evaluated(capsys, "a", "b", "--data", "text.txt")
    assert "There is only one document, so there is no interval" in printed
    assert "An interval holds" not in printed
    assert numbers["comparisons"][0]["differences"]["loss"]["interval"] is None
    assert numbers["comparisons"][0]["verdict"] is None


def test_empty_documents_change_nothing(folder, capsys):
    _, expected = evaluated(capsys, "a", "b", *DATA)
    lines = (folder / "texts.jsonl").read_text()
    (folder / "texts.jsonl").write_text('{"text": ""}\n' + lines + '{"text": ""}\n')
    _, numbers = evaluated(capsys, "a", "b", *DATA)
    assert numbers["comparisons"] == expected["comparisons"]


# ---- a user's mistakes


def test_another_text_is_one_line_before_a_model_is_read(folder, capsys, monkeypatch):
    assert main(["evaluate", "a", *DATA, "--json", "a.json"]) == 0
    shutil.copy("texts.jsonl", "other.jsonl")
    with open("other.jsonl", "a") as file:
        file.write('{"text": "to sleep, perchance to dream"}\n')
    assert main(["evaluate", "b", "--data", "other.jsonl", "--json", "b.json"]) == 0
    capsys.readouterr()
    assert "b.json has 7 documents, and a.json has 6" in refused(capsys, "a.json", "b.json")
    monkeypatch.setattr("lightning_llm.cli.evaluate.open_model", None)
    assert "a.json has 6 documents, and --data other.jsonl has 7" in refused(
        capsys, "a.json", "b", "--data", "other.jsonl"
    )
    (folder / "other.jsonl").write_text((folder / "texts.jsonl").read_text().replace("nobler", "better"))
    error = refused(capsys, "b", "a.json", "--data", "other.jsonl")
    assert "document 2 of a.json (texts.jsonl, line 2) is not that of --data other.jsonl (other.jsonl, line 2)" in error


def test_what_is_no_model_is_one_line_before_another_is_read(folder, capsys, monkeypatch):
    monkeypatch.setattr("lightning_llm.cli.evaluate.open_model", None)
    (folder / "empty").mkdir()
    (folder / "old.json").write_text('{"loss": 2.5, "context": 16, "stride": 8}')
    (folder / "list.json").write_text("[1, 2]")
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_text('{"model_type": "t5"}')
    assert "empty holds no checkpoint" in refused(capsys, "a", "empty", *DATA)
    assert "t5" in refused(capsys, "a", "config", *DATA)
    assert "no such file" in refused(capsys, "a", "nowhere", *DATA)
    assert "documents is missing" in refused(capsys, "a", "old.json", *DATA)
    assert "evaluate the model again with --json" in refused(capsys, "old.json")
    assert "list.json holds [1, 2], expected an object" in refused(capsys, "a", "list.json", *DATA)
    assert "device 'abacus' is unknown" in refused(capsys, "a", "b", *DATA, "--device", "abacus")


def test_a_model_without_a_text_is_one_line(folder, capsys):
    assert "--data is missing: a is a model and needs a text" in refused(capsys, "a", "b")
    assert "a is a model" in refused(capsys, "a")


def test_nothing_is_written_if_a_model_cannot_be_evaluated(folder, capsys):
    (folder / "one.txt").write_text("x")
    assert "too few tokens" in refused(capsys, "a", "b", "--data", "one.txt", "--json", "out.json")
    assert not (folder / "out.json").exists()
