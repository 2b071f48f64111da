"""``lightning-llm evaluate``: the strided recipe of transformers' documentation, on the exported model itself."""

import gzip
import json
import math

import pytest
import torch

from lightning_llm import ModelConfig, Transformer
from lightning_llm.__main__ import main
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.generation import Score, score, scoring
from lightning_llm.generation.scoring import windows
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


@pytest.mark.parametrize("stride", [1, 3, 7])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 30])
def test_every_token_but_the_first_is_scored_once_with_enough_before_it(length, stride):
    scored = []
    for window, new in windows(range(length), 8, stride):
        assert len(window) <= 8
        assert window == list(range(window[0], window[-1] + 1))
        scored += window[-new:]
        assert len(window) - new >= min(8 - stride, window[-new])
    assert scored == list(range(1, length))


def test_sums_add_up():
    both = Score(2.0, 4, 3) + Score(1.0, 2, 1)
    assert (both.loss, both.tokens, both.bytes) == (0.5, 6, 4)
    assert both.bits_per_byte == 3 / math.log(2) / 4
    assert Score(1.0, 1).bits_per_byte is None
    assert math.isnan(Score().loss)
    assert Score(1000.0, 1).perplexity == math.inf


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


def test_a_model_is_scored_in_python_from_any_iterator():
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=9, hidden_size=8, num_attention_heads=2, max_position_embeddings=4))
    found = score(model.eval(), iter([1, 2, 3]), stride=2)
    logits = model.logits(model(torch.tensor([[1, 2]])))[0]
    assert found.nats == pytest.approx(torch.nn.functional.cross_entropy(logits, torch.tensor([2, 3])).item() * 2)


def test_windows_and_logits_may_be_taken_by_any_number_at_once(monkeypatch):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=9, hidden_size=8, num_attention_heads=2, max_position_embeddings=4))
    model.double().eval()
    ids = torch.randint(9, (43,)).tolist()
    found = {}
    for at_once in ((1, 1), (9, 20), (12, 9 * 5), (4096, 2**23)):
        monkeypatch.setattr(scoring, "TOKENS_AT_ONCE", {"cpu": at_once[0]})
        monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", at_once[1])
        found[at_once] = score(model, ids, stride=3)
    expected = found.pop((1, 1))
    assert expected.tokens == 42
    assert all(other.tokens == 42 for other in found.values())
    assert [other.nats for other in found.values()] == pytest.approx([expected.nats] * 3, rel=1e-12)


def test_an_id_beyond_the_vocabulary_is_said_before_a_device_sees_it():
    model = Transformer(ModelConfig(vocab_size=9, hidden_size=8, num_attention_heads=2, max_position_embeddings=4))
    with pytest.raises(IndexError, match="a token id is beyond the vocabulary of 9"):
        score(model.eval(), [1, 2, 9], stride=2)
