"""A tokenizer from somebody else is read with its meaning, or is refused in one line."""

import copy
import functools
import json

import pytest

from lightning_llm.__main__ import main
from lightning_llm.data.tokenizers import Tokenizer

BPE = json.loads(Tokenizer.train_bpe(["to be or not to be " * 50], 280).to_str())
WORDS = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"}}
TOKEN = {"id": 0, "content": "x", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
# regular expressions of these tokenizers
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA4 = r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+(?:'[sS]|'[tT])?|\p{N}{1,3}|\s+"
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s+"
)
CHINESE = r"[一-龥぀-ゟ゠-ヿ]+"


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def model(base, **changes):
    return {**base, "model": {**base["model"], **changes}}


def replace(content):
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


def nested(levels):
    return functools.reduce(lambda inner, _: {"type": "Sequence", "normalizers": [inner]}, range(levels), replace("b"))


CONTENTS = {
    "no model": ({"version": "1.0"}, "model is missing"),
    "model null": ({**WORDS, "model": None}, "model is None, expected an object"),
    "model unknown": (model(WORDS, type="Magic"), "model.type is 'Magic', expected a kind of model"),
    "no vocabulary": ({"model": {"type": "WordLevel"}}, "model.vocab is missing"),
    "an id of 2^31": (model(BPE, vocab={"a": 2**31}), "expected tokens with whole numbers from 0 to 524287"),
    "an id below 0": (model(WORDS, vocab={"a": -1}), "tokens with whole numbers"),
    "an id that is text": (model(WORDS, vocab={"a": "0"}), "tokens with whole numbers"),
    "an id that is true": (model(WORDS, vocab={"a": True}), "tokens with whole numbers"),
    "an empty vocabulary": (model(WORDS, vocab={}), "its vocabulary is empty"),
    "an empty unigram": (
        {"model": {"type": "Unigram", "vocab": [], "unk_id": None}},
        "expected pairs of token and score",
    ),
    "a prefix that pairs lack": (model(BPE, continuing_subword_prefix="##"), "does not begin with '##'"),
    "a merge of unknown tokens": (model(BPE, merges=[["qq", "zz"]]), "out of vocabulary"),
    "an added id of 2^31": ({**BPE, "added_tokens": [{**TOKEN, "id": 2**31}]}, "added_tokens[0].id is 2147483648"),
    "an added token of nothing": ({**BPE, "added_tokens": [{**TOKEN, "content": ""}]}, "added_tokens[0].content is ''"),
    "a flag that is text": ({**BPE, "added_tokens": [{**TOKEN, "lstrip": "no"}]}, "lstrip is 'no', expected true"),
    "a decoder that reads before a token": (
        {**WORDS, "decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 1}},
        "decoder of type Strip has stop 1, expected 0",
    ),
    "a table of unknown form": (
        {**WORDS, "normalizer": {"type": "Precompiled"}},
        "'Precompiled'}, expected",
    ),
    "an unknown part": (
        {**WORDS, "decoder": {"type": "Exec", "command": "x"}},
        "'type': 'Exec'}, expected",
    ),
    "a pattern that is none": ({**WORDS, "pre_tokenizer": split("((((")}, "unmatched parenthesis"),
    "sequences in sequences": ({**WORDS, "normalizer": nested(200)}, "recursion limit exceeded"),
    "a part that is text": ({**WORDS, "pre_tokenizer": "Whitespace"}, "pre_tokenizer is 'Whitespace', expected"),
    "an empty pattern": ({**WORDS, "normalizer": {**replace("b"), "pattern": {"String": ""}}}, "has an empty pattern"),
}


def sequence(kind, *parts):
    return {"type": "Sequence", kind: [part if isinstance(part, dict) else {"type": part} for part in parts]}


def regex_replace(pattern, content):
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
UNSPACES = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
PUNCTUATION = {"type": "Punctuation", "behavior": "Contiguous"}
DIGITS = {"type": "Digits", "individual_digits": False}
PREPEND = {"type": "Prepend", "prepend": "▁"}
BERT = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
PIPELINES = {  # normalizer, pre_tokenizer, decoder
    "GPT-2": (None, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}, BYTES),
    "Llama 2, Mistral": (
        sequence("normalizers", PREPEND, SPACES), None, sequence("decoders", UNSPACES, "ByteFallback", "Fuse", STRIP),
    ),
    "Llama 3": (None, sequence("pretokenizers", split(GPT4), BYTES), BYTES),
    "GPT-4o, Mistral Nemo": (None, sequence("pretokenizers", split(GPT4O), {**BYTES, "add_prefix_space": True}), BYTES),
    "Llama 4": (None, sequence("pretokenizers", split(LLAMA4), BYTES), BYTES),
    "Qwen": ({"type": "NFC"}, sequence("pretokenizers", split(GPT4), BYTES), BYTES),
    "Gemma": (
        SPACES,
        {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        sequence("decoders", UNSPACES, "ByteFallback", "Fuse"),
    ),
    "DeepSeek": (
        sequence("normalizers"),
        sequence("pretokenizers", split(r"\p{N}{1,3}"), split(CHINESE), split(DEEPSEEK), BYTES),
        BYTES,
    ),
    "BERT": (
        {**BERT, "lowercase": True},
        {"type": "BertPreTokenizer"},
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
    ),
    "CLIP": (
        sequence("normalizers", "NFC", regex_replace(r"\s+", " "), "Lowercase"),
        sequence("pretokenizers", split(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"), BYTES),
        BYTES,
    ),
    "XLNet": (
        sequence("normalizers", {**SPACES, "pattern": {"String": "``"}, "content": '"'}, "NFKD", "StripAccents",
                 "Lowercase", regex_replace(" {2,}", " ")),
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        {"type": "Metaspace", "replacement": "▁"},
    ),
    "T5": (
        None, sequence("pretokenizers", "WhitespaceSplit", {"type": "Metaspace", "replacement": "▁"}),
        {"type": "Metaspace", "replacement": "▁"},
    ),
    "Falcon": (
        None,
        sequence("pretokenizers", PUNCTUATION, BYTES, DIGITS, split("[0-9][0-9][0-9]")),
        BYTES,
    ),
    "GPT": ({**BERT, "lowercase": True}, {"type": "BertPreTokenizer"}, {"type": "BPEDecoder", "suffix": "</w>"}),
    "Wav2Vec2": (None, None, {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_in_use_is_taken(name):
    parts = dict(zip(("normalizer", "pre_tokenizer", "decoder"), PIPELINES[name], strict=True))
    assert Tokenizer(json.dumps({**WORDS, **parts})).encode("a")


@pytest.mark.parametrize("name", CONTENTS)
def test_a_file_that_cannot_be_is_refused(name, capfd):
    content, says = CONTENTS[name]
    with pytest.raises(ValueError, match="tokenizer") as caught:
        Tokenizer(json.dumps(content))
    assert says in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert capfd.readouterr().err == ""  # the library prints stack traces of its own


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"model": NaN}', "NaN is not a finite number"),
        ('{"model": {}, "model": {}}', "'model' is given twice"),
        ('{"a": "\\ud800"}', "half of a surrogate pair"),
    ],
    ids=range(4),
)
def test_what_is_no_sound_json_is_refused(content, says):
    with pytest.raises(ValueError, match="is not JSON that can be read") as caught:
        Tokenizer(content)
    assert says in str(caught.value)


@pytest.mark.parametrize("base", [BPE, WORDS], ids=["bpe", "words"])
def test_every_leaf_has_its_meaning_or_is_refused(base, changed_leaves, capfd):
    base = {**base, "pre_tokenizer": base.get("pre_tokenizer") or split(r"\s+"), "normalizer": replace("b")}
    small = copy.deepcopy(base)
    if small["model"]["type"] == "BPE":  # 23 merges and 280 ids are alike
        small["model"]["merges"] = small["model"]["merges"][:1]
    labels = 0
    for label, changed in changed_leaves(small):
        if label.startswith("model.vocab.") and label.split()[0] not in ("model.vocab.a", "model.vocab.t"):
            continue
        labels += 1
        try:
            made = Tokenizer(json.dumps(changed))
            ids = made.encode("a to be")
        except ValueError:
            continue
        assert all(0 <= number < made.vocab_size for number in ids), label
        made.decode(ids)
    assert labels > 50
    assert capfd.readouterr().err == ""


def test_a_post_processor_does_not_repeat_a_text():
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    template = {"type": "TemplateProcessing", "single": [first] * 100, "pair": [first, second], "special_tokens": {}}
    assert Tokenizer(json.dumps({**WORDS, "post_processor": template})).encode("a") == [0]


def test_prepare_prints_one_line_and_leaves_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a " * 1000)
    (tmp_path / "t.json").write_text(json.dumps({**WORDS, "pre_tokenizer": split("((((")}))
    words = ["prepare", "text.txt", "--out", "store", "--tokenizer", "t.json"]
    assert main(words) == 2
    assert capfd.readouterr().err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.json", "text.txt"]
