"""A tokenizer from somebody else answers at once, or is refused in one line."""

import copy
import functools
import itertools
import json

import pytest
from tokenizers import Tokenizer as Backend

from lightning_llm.__main__ import main
from lightning_llm.data import tokenizer_json
from lightning_llm.data.tokenizers import Tokenizer
from tests.data.test_regex_cost import PATTERNS

BPE = json.loads(Tokenizer.train_bpe(["to be or not to be " * 50], 280).to_str())
WORDS = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"}}
TOKEN = {"id": 0, "content": "x", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
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
    r"[a&&[^b]]+[a&&[^b]]+$",
    r"a{,1000}a{,1000}$",
    r"a+(?i)b|a+$",  # the flag changes what the bar divides
    r"(?:a+|b)(?:c|a+)$",
    r"(?<=a*a*)b",
    r"(?=a+a+)b",
    r"(?:a+b?)a+$",
    r"[\c]a+]a+$",  # whether the class ends there depends on the dialect
    r"(?:(?:(?:\b){1000}){1000}){1000}",
]


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
    "long added tokens": (
        {**BPE, "added_tokens": [{**TOKEN, "special": False, "content": "é" * 4000}] * 140},
        "added_tokens has tokens of more than 1048576 bytes in total",
    ),
    "spaces around Chinese characters, again and again": (
        {
            **BPE,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    *[{"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": False}]
                    * 58,
                    {"type": "Replace", "pattern": {"String": " "}, "content": "xxxxx"},
                ],
            },
        },
        "expected at most 64",
    ),
    "added tokens that a normalizer makes longer": (
        {
            **BPE,
            "normalizer": {"type": "NFKD"},
            "added_tokens": [{**TOKEN, "special": False, "normalized": True, "content": "é" * 2000}] * 100,
        },
        "may make the added tokens longer than 1048576 bytes",
    ),
    "a long added token": ({**BPE, "added_tokens": [{**TOKEN, "content": "x" * 5000}]}, "a text of 1 to 4096 char"),
    "a long token": (model(WORDS, vocab={"a" * 5000: 0}), "each up to 4096 characters"),
    "many merges": (model(BPE, merges=[["a", "b"]] * 640_001), "model.merges is [["),
    "a long prefix": (model(BPE, continuing_subword_prefix="#" * 100), "continuing_subword_prefix is '###"),
    "a long suffix": (model(BPE, end_of_word_suffix="#" * 100), "end_of_word_suffix is '###"),
    "a long unknown token": (model(WORDS, unk_token="#" * 100), "unk_token is '###"),
    "a field of a model that is long": (model(WORDS, note="#" * 10**6), "model.note is '###"),
    "a field of the file that is long": ({**WORDS, "note": ["#"] * 10**5}, "note is ['#'"),
    "a post-processor that repeats": ({**WORDS, "post_processor": {"single": [{}] * 10**5}}, "post_processor is {"),
    "a prefix that pairs lack": (model(BPE, continuing_subword_prefix="##"), "does not begin with '##'"),
    "a merge of unknown tokens": (model(BPE, merges=[["qq", "zz"]]), "out of vocabulary"),
    "words of any length": (model(WORDS, max_input_chars_per_word=10**9), "max_input_chars_per_word is 1000000000"),
    "an added id of 2^31": ({**BPE, "added_tokens": [{**TOKEN, "id": 2**31}]}, "added_tokens[0].id is 2147483648"),
    "an added token of nothing": ({**BPE, "added_tokens": [{**TOKEN, "content": ""}]}, "added_tokens[0].content is ''"),
    "a flag that is text": ({**BPE, "added_tokens": [{**TOKEN, "lstrip": "no"}]}, "lstrip is 'no', expected true"),
    "replacements that double": (
        {**WORDS, "normalizer": {"type": "Sequence", "normalizers": [replace("aa")] * 28}},
        "normalizer and pre_tokenizer may make a text 128 times as long, expected at most 64",
    ),
    "a long replacement": ({**WORDS, "normalizer": replace("x" * 10**6)}, "normalizer is {"),
    "growth in two fields": (
        {**WORDS, "normalizer": replace("x" * 30), "pre_tokenizer": {"type": "Metaspace", "replacement": "▁"}},
        "may make a text 120 times as long",
    ),
    "a repeat that a replacement prolongs": (
        {**WORDS, "normalizer": replace("a" * 8), "pre_tokenizer": split("a+b")},
        "has the pattern 'a+b', which may take hours",
    ),
    "many patterns": (
        {**WORDS, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split("a+b")] * 40}},
        "has the pattern 'a+b', which may take hours",
    ),
    "a decoder that reads before a token": (
        {**WORDS, "decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 1}},
        "decoder of type Strip has stop 1, expected 0",
    ),
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


def sequence(kind, *parts):
    return {"type": "Sequence", kind: [part if isinstance(part, dict) else {"type": part} for part in parts]}


def regex_replace(pattern, content):
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
UNSPACES = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
PREPEND = {"type": "Prepend", "prepend": "▁"}
BERT = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
GPT4O = PATTERNS[2]
PIPELINES = {  # normalizer, pre_tokenizer, decoder
    "GPT-2": (None, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}, BYTES),
    "Llama 2, Mistral": (
        sequence("normalizers", PREPEND, SPACES), None, sequence("decoders", UNSPACES, "ByteFallback", "Fuse", STRIP),
    ),
    "Llama 3": (None, sequence("pretokenizers", split(PATTERNS[1]), BYTES), BYTES),
    "GPT-4o, Mistral Nemo": (None, sequence("pretokenizers", split(GPT4O), {**BYTES, "add_prefix_space": True}), BYTES),
    "Llama 4": (None, sequence("pretokenizers", split(PATTERNS[3]), BYTES), BYTES),
    "Qwen": ({"type": "NFC"}, sequence("pretokenizers", split(PATTERNS[1]), BYTES), BYTES),
    "Gemma": (
        SPACES,
        {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        sequence("decoders", UNSPACES, "ByteFallback", "Fuse"),
    ),
    "DeepSeek": (
        sequence("normalizers"),
        sequence("pretokenizers", split(r"\p{N}{1,3}"), split(PATTERNS[6]), split(PATTERNS[4]), BYTES),
        BYTES,
    ),
    "BERT": ({**BERT, "lowercase": True}, {"type": "BertPreTokenizer"}, {"type": "WordPiece", "prefix": "##"}),
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
        sequence("pretokenizers", "Punctuation", BYTES, "Digits", split("[0-9][0-9][0-9]")),
        BYTES,
    ),
    "GPT": ({**BERT, "lowercase": True}, {"type": "BertPreTokenizer"}, {"type": "BPEDecoder", "suffix": "</w>"}),
    "Wav2Vec2": (None, None, {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_in_use_is_taken(name):
    parts = dict(zip(("normalizer", "pre_tokenizer", "decoder"), PIPELINES[name], strict=True))
    tokenizer_json.read_content(json.dumps({**WORDS, **parts}))


BERT_ALL = {**BERT, "lowercase": True, "strip_accents": True}
NOTHING = (r"(?=[\s\S])", "|y", "y*", "(?:)", "(?<!x)", r"\b|y", "$", "y{0,2}", "(?:y|)", "x|y?")
REPLACE = [regex_replace(pattern, "éx") for pattern in (*NOTHING, ".", "a+", "a|b+")]
UNICODE = ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", BERT_ALL]
STEPS = {
    "normalizer": [
        *(sequence("normalizers", *steps) for steps in itertools.product(UNICODE, repeat=3)),
        *("ByteLevel", {"type": "Prepend", "prepend": "éx"}, replace("éx"), *REPLACE),
    ],
    "pre_tokenizer": [
        *({**BYTES, "add_prefix_space": flag, "use_regex": flag} for flag in (True, False)),
        {"type": "Metaspace", "replacement": "\U00010348", "prepend_scheme": "always", "split": True},
    ],
    "decoder": [
        *(BYTES, {"type": "WordPiece", "prefix": "##", "cleanup": False}, {"type": "BPEDecoder", "suffix": ""}),
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": False},
        *(replace("éx"), *REPLACE),
    ],
}
AROUND = {
    "WordPiece": lambda text: ["", text],
    "BPEDecoder": lambda text: [text, ""],
}  # a space is between these tokens
WORST = ["a", " ", "  a b", "abab", "\ufdfa", "İȺ", "\U0001d1c0", "\u0390", "中\uf900\u337f", "\x80ÿ", "xyy", "ĀġĠ"]


@pytest.mark.parametrize("field", STEPS)
def test_no_part_makes_a_text_longer_than_is_counted(field, monkeypatch):
    for step in ({"type": step} if isinstance(step, str) else step for step in STEPS[field]):
        content = json.dumps({**WORDS, field: step})
        backend = Backend.from_str(content)
        call = {
            "normalizer": lambda text, part=backend.normalizer: part.normalize_str(text),
            "pre_tokenizer": lambda text, part=backend.pre_tokenizer: "".join(
                piece for piece, _ in part.pre_tokenize_str(text)
            ),
            "decoder": lambda text, part=backend.decoder, kind=step["type"]: part.decode(
                AROUND.get(kind, lambda text: [text])(text)
            ),
        }[field]
        longest = max(len(call(text).encode()) / len(text.encode()) for text in WORST)
        monkeypatch.setattr(tokenizer_json, "MOST_GROWTH", longest * 0.999)
        if longest > 1:
            with pytest.raises(ValueError, match="times as long"):
                Tokenizer(content)


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
    (tmp_path / "t.json").write_text(json.dumps({**WORDS, "pre_tokenizer": split(r"(a+)+$")}))
    words = ["prepare", "text.txt", "--out", "store", "--tokenizer", "t.json"]
    assert main(words) == 2
    assert capfd.readouterr().err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.json", "text.txt"]
