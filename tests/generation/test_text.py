"""Generated text: whole characters, stop strings, and prompts that cannot be continued."""

from unittest import mock

import pytest
import torch
from torch import nn

from lightning_llm import ModelConfig
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.generation import Sampling, generate_text, stream_text
from lightning_llm.generation.text import StopStrings


def test_a_stop_string_is_found_across_pieces_and_nothing_of_it_is_passed_on():
    stops = StopStrings(["END", "aab"])
    assert [stops.push(piece) for piece in ("xE", "NO", " a", "a", "a", "c")] == ["x", "ENO", " ", "", "a", "aac"]
    assert [stops.push(piece) for piece in ("..E", "N", "D and", "more")] == ["..", "", "", ""]
    assert stops.is_found
    assert stops.flush() == ""
    first = StopStrings(["long stop", "g s"])
    assert first.push("a long stop") == "a lon"
    pieces = StopStrings(["long stop", "g s"])
    assert "".join(map(pieces.push, "a long stop")) == "a lon"  # whatever pieces it comes in
    held = StopStrings(["END"])
    assert held.push("the EN") + held.flush() == "the EN"


class Script(nn.Module):
    """Says the bytes of a text, whatever it is asked."""

    def __init__(self, text):
        super().__init__()
        self.config = ModelConfig(vocab_size=300, hidden_size=8, num_attention_heads=2, max_position_embeddings=64)
        self.embed_tokens = nn.Embedding(300, 8)
        self.said = list(text)

    def forward(self, ids, cache):
        cache.advance(ids.shape[1])
        return torch.zeros(*ids.shape, 8)

    def logits(self, hidden):
        return torch.nn.functional.one_hot(torch.tensor([self.said.pop(0)] * len(hidden)), 300) * 100.0


def said(text, **options):
    with mock.patch("lightning_llm.generation.decoding.can_pack", return_value=False):
        steps = stream_text(
            Script(text),
            Tokenizer.train_byte(),
            ["x"],
            max_new_tokens=len(text),
            sampling=Sampling(temperature=0),
            **options,
        )
        return [piece for (piece,) in steps]


def test_text_comes_as_it_is_whole_and_ends_before_a_stop_string_of_several_bytes():
    assert said("aé€.".encode()) == ["a", "", "é", "", "", "€", ".", ""]
    assert said("aé€é€!b".encode(), stop=["€!"]) == ["a", "", "é", "", "", "", "", "€é", "", "", "", "", ""]
    assert "".join(said("ab€".encode()[:-1])) == "ab\ufffd"  # the end came within a character
    assert said(b"abc", stop_token_ids=[ord("b")]) == ["a", "", ""]
    assert said([ord("a"), 299, ord("b")]) == ["a", "", "b", ""]  # 299 stands for nothing


def test_texts_of_a_batch_are_those_of_each_alone(model):
    tokenizer = Tokenizer.train_char(["abcdefghijklmnopqrstuvwxyz .,!?"])
    prompts = ["hello", "a longer one", "?"]
    options = {"max_new_tokens": 30, "sampling": Sampling(temperature=1.5), "stop": ["e", "xy"]}

    def texts(prompts):
        return generate_text(model, tokenizer, prompts, generator=torch.Generator().manual_seed(3), **options)

    together = texts(prompts)
    assert together == [texts([prompt])[0] for prompt in prompts]
    assert not any("e" in text for text in together)
    assert len(set(map(len, together))) > 1


def test_a_prompt_begins_as_texts_did_in_training(model):
    plain = Tokenizer.train_bpe(["some text"], 270, ["<s>"])
    tokenizer = plain.with_boundaries("<s>")
    with mock.patch("lightning_llm.generation.text.Decoder") as decoder:
        for prompt in ("text", "<s>text", ""):
            stream_text(model, tokenizer, prompt, max_new_tokens=1)
    ids = [1, *plain.encode("text")]
    assert [call.args[1] for call in decoder.call_args_list] == [[ids], [ids], [[1]]]


def test_a_prompt_that_is_a_str_is_one_text(model):
    tokenizer = Tokenizer.train_char(["abcdefghijklmnopqrstuvwxyz .,!?"])

    def text(prompts, stop):
        generator = torch.Generator().manual_seed(3)
        return generate_text(model, tokenizer, prompts, max_new_tokens=30, stop=stop, generator=generator)

    found = text("hello", "xy")
    assert isinstance(found, str)
    assert [found] == text(["hello"], ["xy"])


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ("a" * 25, {}, r"prompt has 25 tokens, more than the model's context \(max_position_embeddings\) of 24"),
        ("", {}, "prompt is empty"),
        ("a", {"stop": [""]}, "stop: a stop string must have at least one character"),
        ("a", {"stop_token_ids": [99]}, "stop token 99 is not in the tokenizer's vocabulary of 3"),
    ],
)
def test_what_cannot_be_continued_is_refused(model, prompt, options, says):
    with pytest.raises(ValueError, match=says):
        generate_text(model, Tokenizer.train_char(["abc"]), [prompt], max_new_tokens=3, **options)
