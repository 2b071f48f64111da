"""A tokenizer from somebody else answers at once, or is refused in one line."""

import copy
import functools
import json

import pytest

from lightning_llm.__main__ import main
from lightning_llm.data.tokenizer_json import check_pattern
from lightning_llm.data.tokenizers import Tokenizer

BPE = json.loads(Tokenizer.train_bpe(["to be or not to be " * 50], 280).to_str())
WORDS = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"}}
TOKEN = {"id": 0, "content": "x", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
# of GPT-2, GPT-4, GPT-4o, Llama 4, DeepSeek 3, Bloom
PATTERNS = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+(?:'[sS]|'[tT])?|\p{N}{1,3}|\s+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s+",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[\s\S]",
    r"\x{1F600}|a{2}b{,3}|(?<!x)y(?<name>z)",
]
HOSTILE_PATTERNS = [
    r"(a+)+$",
    r"(a|a)*b",
    r"(?:a?){30}a{30}",
    r"a?" * 30 + r"a" * 30,
    r"(a|b|c|d)" * 20,
    r"\s*\s*\s*x",
    r"(x*)\1",
    r"(?<n>a|b\g<n>c)",
    r"(?~abc)",
    r"(?(1)a|b)",
    r"(?x) a # (",
    r"(?#(a+)+)",
    r"[]a(]+)+",
    r"a{1,1000}{1,1000}",
    r"a{1,2}+b*",
    r"x{100000}",
    r"((((",
    r"a)",
    r"[a",
    "\\",
    "(" * 500 + ")" * 500,
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=range(len(PATTERNS)))
def test_a_pattern_in_use_is_taken(pattern):
    check_pattern(pattern, "pre_tokenizer")


@pytest.mark.parametrize("pattern", HOSTILE_PATTERNS, ids=range(len(HOSTILE_PATTERNS)))
def test_a_pattern_that_may_take_hours_is_refused(pattern):
    with pytest.raises(ValueError, match="which may take hours on some texts") as caught:
        Tokenizer(json.dumps({**WORDS, "pre_tokenizer": split(pattern)}))
    assert len(str(caught.value)) < 500


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def model(base, **changes):
    return {**base, "model": {**base["model"], **changes}}


def replace(content):
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


def nested(levels):
    return functools.reduce(lambda inner, _: {"type": "Sequence", "normalizers": [inner]}, range(levels), replace("a"))


CONTENTS = {
    "no model": ({"version": "1.0"}, "model is missing"),
    "model null": ({**WORDS, "model": None}, "model is None, expected an object"),
    "model unknown": (model(WORDS, type="Magic"), "model.type is 'Magic', expected a kind of model"),
    "no vocabulary": ({"model": {"type": "WordLevel"}}, "model.vocab is missing"),
    "an id of 2^31": (model(BPE, vocab={"a": 2**31}), "expected at most 524288 tokens with whole numbers below that"),
    "an id below 0": (model(WORDS, vocab={"a": -1}), "tokens with whole numbers"),
    "an id that is text": (model(WORDS, vocab={"a": "0"}), "tokens with whole numbers"),
    "an id that is true": (model(WORDS, vocab={"a": True}), "tokens with whole numbers"),
    "an empty vocabulary": (model(WORDS, vocab={}), "its vocabulary is empty"),
    "an empty unigram": (
        {"model": {"type": "Unigram", "vocab": [], "unk_id": None}},
        "expected pairs of token and score",
    ),
    "a large unigram": ({"model": {"type": "Unigram", "vocab": [["a" * 2**20, 0.0]] * 2}}, "at most 1048576"),
    "many added tokens": ({**BPE, "added_tokens": [TOKEN] * 20_000}, "expected a list of at most 16384"),
    "a prefix that pairs lack": (model(BPE, continuing_subword_prefix="##"), "does not begin with '##'"),
    "a merge of unknown tokens": (model(BPE, merges=[["qq", "zz"]]), "out of vocabulary"),
    "words of any length": (model(WORDS, max_input_chars_per_word=10**9), "max_input_chars_per_word is 1000000000"),
    "an added id of 2^31": ({**BPE, "added_tokens": [{**TOKEN, "id": 2**31}]}, "added_tokens[0].id is 2147483648"),
    "an added token of nothing": ({**BPE, "added_tokens": [{**TOKEN, "content": ""}]}, "added_tokens[0].content is ''"),
    "a flag that is text": ({**BPE, "added_tokens": [{**TOKEN, "lstrip": "no"}]}, "lstrip is 'no', expected true"),
    "replacements that double": (
        {**WORDS, "normalizer": {"type": "Sequence", "normalizers": [replace("aa")] * 28}},
        "normalizer makes a text 268435456 times as long",
    ),
    "a long replacement": ({**WORDS, "normalizer": replace("x" * 10**6)}, "normalizer of type Replace has an absurd"),
    "sequences in sequences": ({**WORDS, "normalizer": nested(100)}, "expected at most 64 of"),
    "many parts": ({**WORDS, "normalizer": {"type": "Sequence", "normalizers": [replace("b")] * 100}}, "at most 64 of"),
    "a table of unknown form": (
        {**WORDS, "normalizer": {"type": "Precompiled"}},
        "'Precompiled'}, expected",
    ),
    "an unknown part": (
        {**WORDS, "decoder": {"type": "Exec", "command": "x"}},
        "'type': 'Exec'}, expected",
    ),
    "a part that is text": ({**WORDS, "pre_tokenizer": "Whitespace"}, "pre_tokenizer is 'Whitespace', expected"),
    "an empty pattern": ({**WORDS, "normalizer": {**replace("b"), "pattern": {"String": ""}}}, "has an empty pattern"),
    "strips a lot": (
        {**WORDS, "decoder": {"type": "Strip", "content": "a", "start": 10**9, "stop": 0}},
        "decoder of type Strip has an absurd 'start'",
    ),
}


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
        ('{"a": [' + "{}," * (1 << 22) + "{}]}", "more than 4194304 values"),
    ],
    ids=range(5),
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


def test_prepare_prints_one_line_and_leaves_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a " * 1000)
    (tmp_path / "t.json").write_text(json.dumps({**WORDS, "pre_tokenizer": split(r"(a+)+$")}))
    words = ["prepare", "text.txt", "--out", "store", "--tokenizer", "t.json"]
    assert main(words) == 2
    assert capfd.readouterr().err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.json", "text.txt"]
