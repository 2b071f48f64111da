"""``lightning-llm evaluate``: the strided recipe of transformers' documentation, on the exported model itself."""

import gzip
import json
import math
import shutil

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from lightning_llm import ModelConfig, Transformer
from lightning_llm.__main__ import main
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.interop import export_model

CONTEXT = 16
TEXTS = ["To be, or not to be, that is the question: whether 'tis nobler – ", "in the mind.", "x", "to suffer " * 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    tokenizer = Tokenizer.train_bpe(TEXTS, 290)
    model = Transformer(
        ModelConfig(
            vocab_size=300, hidden_size=32, num_hidden_layers=2, max_position_embeddings=CONTEXT, initializer_range=0.3
        )
    )
    out = tmp_path_factory.mktemp("evaluate") / "model"
    export_model(model.eval(), tokenizer.to_str(), out)
    return out


def recipe(folder, text, stride):
    """https://huggingface.co/docs/transformers/perplexity, with every scored token counted once: nats and tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt").input_ids
    seq_len, previous, nats, tokens = ids.shape[1], 0, 0.0, 0
    for begin in range(0, seq_len, stride):
        end = min(begin + CONTEXT, seq_len)
        window, labels = ids[:, begin:end], ids[:, begin:end].clone()
        labels[:, : -(end - previous)] = -100
        scored = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            nats += float(model(window, labels=labels).loss) * scored if scored else 0.0
        tokens += scored
        previous = end
        if end == seq_len:
            break
    return nats, tokens


def evaluated(capsys, tmp_path, *words):
    out = tmp_path / "numbers.json"
    assert main(["evaluate", *map(str, words), "--json", str(out)]) == 0
    return json.loads(out.read_text()), capsys.readouterr().out


@pytest.mark.parametrize("stride", [None, 1, 5, 15])
def test_numbers_are_those_of_the_recipe(folder, tmp_path, capsys, stride):
    (tmp_path / "text.txt").write_text("".join(TEXTS), encoding="utf-8")
    options = [] if stride is None else ["--stride", stride]
    numbers, printed = evaluated(capsys, tmp_path, folder, "--data", tmp_path / "text.txt", *options)
    nats, tokens = recipe(folder, "".join(TEXTS), stride or CONTEXT // 2)
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    ids = tokenizer.encode("".join(TEXTS))
    assert tokens == len(ids) - 1 == numbers["tokens"]
    assert numbers["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert numbers["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    size = len("".join(TEXTS).encode()) - len(tokenizer.decode(ids[:1]).encode())
    assert numbers["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert (numbers["context"], numbers["stride"]) == (CONTEXT, stride or CONTEXT // 2)
    assert f"loss {numbers['loss']:.4f}, perplexity" in printed
    share = numbers["recall_tokens"] / tokens
    assert 0 < share < 1
    whole = share * numbers["recall_loss"] + (1 - share) * numbers["other_loss"]
    assert whole == pytest.approx(numbers["loss"], abs=1e-6)
    assert (
        f"recall loss {numbers['recall_loss']:.4f}, other loss {numbers['other_loss']:.4f}, {tokens} tokens" in printed
    )


def test_each_document_is_scored_by_itself(folder, tmp_path, capsys):
    lines = "".join(json.dumps({"body": text}) + "\n" for text in TEXTS)
    (tmp_path / "texts.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    words = [folder, "--data", tmp_path / "texts.jsonl.gz", "--text-key", "body", "--per-document"]
    numbers, printed = evaluated(capsys, tmp_path, *words)
    expected = [recipe(folder, text, CONTEXT // 2) for text in TEXTS]
    assert [row["tokens"] for row in numbers["documents"]] == [tokens for _, tokens in expected]
    for row, (nats, tokens) in zip(numbers["documents"], expected, strict=True):
        assert row["loss"] == (pytest.approx(nats / tokens, rel=1e-5) if tokens else None)
    assert numbers["loss"] == pytest.approx(sum(n for n, _ in expected) / sum(t for _, t in expected), rel=1e-5)
    assert numbers["bytes"] == sum(row["bytes"] for row in numbers["documents"])
    assert len(printed.splitlines()) == len(TEXTS) + 1
    assert "line 3: 0 tokens, 0 bytes" in printed


# ---- what is around a text


def bounded(folder, tmp_path, single, **changes):
    """The folder with a tokenizer that puts tokens around a text, as in this template."""
    out = tmp_path / "bounded"
    shutil.copytree(folder, out)
    backend = Backend.from_file(str(out / "tokenizer.json"))
    special = [("<|endoftext|>", 0), ("t", backend.token_to_id("t"))]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    content = {**json.loads(backend.to_str()), **changes}
    (out / "tokenizer.json").write_text(json.dumps(content))
    return out


@pytest.mark.parametrize("single", ["<|endoftext|> $A", "$A <|endoftext|>", "t $A <|endoftext|>"])
@pytest.mark.parametrize("stride", [None, 5])
def test_a_text_has_the_tokens_around_it_that_transformers_puts_there(folder, tmp_path, capsys, single, stride):
    out = bounded(folder, tmp_path, single)
    text = "".join(TEXTS)
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    options = [] if stride is None else ["--stride", stride]
    numbers, _ = evaluated(capsys, tmp_path, out, "--data", tmp_path / "text.txt", *options)
    nats, tokens = recipe(out, text, stride or CONTEXT // 2)
    assert numbers["tokens"] == tokens
    assert numbers["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    first = "" if single.index("$A") else "To"  # a token that is not predicted
    assert numbers["bytes"] == len(text.encode()) - len(first)


def test_what_is_before_each_text_is_said(folder, tmp_path, capsys):
    out = bounded(folder, tmp_path, "<|endoftext|> $A")
    (tmp_path / "text.txt").write_text("some text")
    assert main(["evaluate", str(out), "--data", str(tmp_path / "text.txt")]) == 0
    assert "each text begins with '<|endoftext|>' (0), as in training" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["漢字", "To be", " to be"])
@pytest.mark.parametrize("space", [False, True])
def test_the_bytes_of_the_first_token_are_those_of_the_text(folder, tmp_path, capsys, text, space):
    """A token may be part of a character, and a tokenizer may put a space before a text."""
    splitter = {"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": True, "use_regex": True}
    out = bounded(folder, tmp_path, "$A", normalizer={"type": "NFC"}, pre_tokenizer=splitter)
    tokenizer = Tokenizer.from_file(out / "tokenizer.json")
    assert tokenizer.kind == "file"
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    numbers, _ = evaluated(capsys, tmp_path, out, "--data", tmp_path / "text.txt")
    ids = tokenizer.encode(text)
    rest = b"".join(map(tokenizer.bytes_of, ids[1:]))
    assert text.encode().endswith(rest)
    assert numbers["bytes"] == len(rest)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--stride", "16"], "stride must be at least 1 and below the model's context of 16, got 16"),
        (["--stride", "0"], "stride must be at least 1"),
        (["--device", "abacus"], "device 'abacus' is unknown: choose cpu, cuda or mps"),
        (["--device", "cuda:99"], "device cuda:99: this torch finds"),
    ],
)
def test_a_users_mistake_is_one_line(folder, tmp_path, capsys, options, says):
    (tmp_path / "text.txt").write_text("some text")
    assert main(["evaluate", str(folder), "--data", str(tmp_path / "text.txt"), *options]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    assert len(error.splitlines()) == 1


def test_what_is_missing_or_too_short_is_named(folder, tmp_path, capsys):
    assert main(["evaluate", str(folder), "--data", str(tmp_path / "none.txt")]) == 2
    assert "none.txt" in capsys.readouterr().err
    (tmp_path / "one.txt").write_text("x")
    assert main(["evaluate", str(folder), "--data", str(tmp_path / "one.txt")]) == 2
    assert "too few tokens: each token is predicted" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "no.ckpt"), "--data", str(tmp_path / "one.txt")]) == 2
    assert "no.ckpt" in capsys.readouterr().err
