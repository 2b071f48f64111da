"""The tokens around a text are those that the tokenizers library puts there, and those that a user names."""

import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from lightning_llm.data.boundaries import Boundaries, end_of_text_in, read_boundaries
from lightning_llm.data.tokenizers import Tokenizer

SPECIAL = ["<s>", "</s>", "[gMASK]"]
BYTE_LEVEL = processors.ByteLevel(trim_offsets=False)


@pytest.fixture(scope="module")
def trained():
    """Its ids of the special tokens are 0 for the end of text, and 1, 2 and 3."""
    return Tokenizer.train_bpe(["some text"], 262, SPECIAL)


def template(single="$A", pair=None):
    return processors.TemplateProcessing(
        single=single, pair=pair or "$A $B", special_tokens=[(name, n) for n, name in enumerate(SPECIAL, start=1)]
    )


def with_processor(tokenizer, processor):
    backend = Backend.from_str(tokenizer.to_str())
    backend.post_processor = processor
    return Tokenizer(backend.to_str()), backend


PROCESSORS = {
    "none": BYTE_LEVEL,
    "begin": template("<s> $A"),
    "Llama 3": processors.Sequence([BYTE_LEVEL, template("<s> $A", "<s> $A <s> $B")]),
    "end": template("$A </s>", "$A </s> $B </s>"),
    "two at the beginning": template("[gMASK] <s> $A", "[gMASK] <s> $A </s> [gMASK] <s> $B"),
    "BERT": processors.BertProcessing(("</s>", 2), ("<s>", 1)),
    "RoBERTa": processors.RobertaProcessing(("</s>", 2), ("<s>", 1)),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_what_is_around_a_text_is_what_the_library_puts_there(trained, name):
    tokenizer, backend = with_processor(trained, PROCESSORS[name])
    ids = tokenizer.encode("text")
    before, after = tokenizer.boundaries.before, tokenizer.boundaries.after
    assert [*before, *ids, *after] == backend.encode("text").ids
    assert tokenizer.eos_token_id == (0 if name in ("none", "begin", "Llama 3") else 2)
    assert tokenizer.encode_prompt("text") == [*before, *ids]


def test_a_prompt_that_begins_with_the_token_itself_gets_no_second_one(trained):
    tokenizer, _ = with_processor(trained, template("<s> $A"))
    assert tokenizer.encode_prompt("<s>text") == tokenizer.encode_prompt("text") == [1, *tokenizer.encode("text")]
    assert tokenizer.encode_prompt("") == [1]
    assert tokenizer.decode(tokenizer.without_begin_of([1, *tokenizer.encode("text")])) == "text"


@pytest.mark.parametrize(
    ("begin", "end", "text", "eos"),
    [
        ("<s>", None, [1, "text"], 0),
        (None, "</s>", ["text"], 2),  # it is between two texts, not at the end of a prompt
        ("<s>", "</s>", [1, "text"], 2),
        ("none", "none", ["text"], 0),
    ],
)
@pytest.mark.parametrize("given", ["none", "Llama 3"])
def test_the_file_names_the_tokens_that_a_user_gives(trained, given, begin, end, text, eos):
    before, _ = with_processor(trained, PROCESSORS[given])
    named = before.with_boundaries(begin, end)
    backend = Backend.from_str(named.to_str())
    expected = [1, "text"] if given == "Llama 3" and begin is None else text
    ids = named.encode("text")
    assert backend.encode("text").ids == [*([1] if 1 in expected else []), *ids]
    assert Tokenizer(named.to_str()).eos_token_id == eos
    assert named.with_boundaries(begin, end) is named
    assert ids == before.encode("text")


def test_an_end_of_every_text_stays_one(trained):
    tokenizer, _ = with_processor(trained, PROCESSORS["end"])
    other = tokenizer.with_boundaries(end_of_text="<s>")
    assert Backend.from_str(other.to_str()).encode("text").ids == [*tokenizer.encode("text"), 1]
    assert other.eos_token_id == 1


def test_a_token_that_is_none_is_named_with_those_that_are(trained):
    with pytest.raises(
        ValueError, match=r"--end-of-text '\[EOS\]' is not a token of the tokenizer, which has .*'</s>'"
    ):
        trained.with_boundaries(end_of_text="[EOS]")
    with pytest.raises(ValueError, match="--begin-of-text '<s>' is not a token of the tokenizer, which has no special"):
        Tokenizer.train_byte().with_boundaries("<s>")


@pytest.mark.parametrize(
    ("special", "end"),
    [
        (["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
        (["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"], "<｜end▁of▁sentence｜>"),
        (["[BOS]", "[EOS]", "[PAD]"], "[EOS]"),
        (["<|eot_id|>", "<|EOS|>"], "<|EOS|>"),
        (["<|im_end|>", "</s>"], "</s>"),
        (["[PAD]"], None),
    ],
)
def test_an_end_of_text_is_known_by_its_name(special, end):
    vocabulary = {name: number for number, name in enumerate(["eos", "▁end", *special])}
    added = [{"content": name, "id": vocabulary[name], "special": True} for name in special]
    content = {"added_tokens": [*added, {"content": "end", "id": 99, "special": False}]}
    assert end_of_text_in(content, vocabulary) == (None if end is None else vocabulary[end])


def put(processor):
    return {"post_processor": {"type": "TemplateProcessing", "pair": [], **processor}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (put({"single": [{"SpecialToken": {"id": "<s>"}}], "special_tokens": {}}), "is damaged"),
        (put({"single": ["<s>"]}), "is damaged"),
        (put({"single": [{"SpecialToken": {"id": "a"}}], "special_tokens": {"a": {"ids": [-1]}}}), r"puts \[-1\]"),
        ({"post_processor": {"type": "BertProcessing", "cls": ["a"]}}, "is damaged"),
    ],
)
def test_a_post_processor_of_a_stranger_is_one_line(content, says):
    with pytest.raises(ValueError, match=says):
        read_boundaries(content)


def test_ids_beyond_the_vocabulary_are_refused(trained):
    content = json.loads(with_processor(trained, template("<s> $A"))[0].to_str())
    content["post_processor"]["special_tokens"]["<s>"]["ids"] = [70000]
    with pytest.raises(ValueError, match="post_processor has ids beyond its vocabulary"):
        Tokenizer(json.dumps(content))
    assert read_boundaries({}) == Boundaries()
