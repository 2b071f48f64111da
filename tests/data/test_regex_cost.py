"""Patterns in use cost little, and a repeat costs what its ways of matching do."""

import pytest

from lightning_llm.data.regex_cost import RUN, cost_of
from lightning_llm.data.tokenizer_json import MOST_WAYS

# of GPT-2, GPT-4, GPT-4o, Llama 4, DeepSeek 3, Bloom, DeepSeek 3, the newest of GPT-4 in tiktoken, SuperBPE, Kimi K2
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
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
    r"\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    r"(?=(\d{3})+(?!\d))",
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[\s\S]",
    r"\x{1F600}|a{2}b{,3}|(?<!x)y(?<name>z)",
    r'"[^"]*"|<[^>]+>|\w+(?:\'\w+)?|[\u4e00-\u9fff]+|',
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=range(len(PATTERNS)))
def test_a_pattern_in_use_is_taken(pattern):
    assert cost_of(pattern).alone < MOST_WAYS / 4  # in a pipeline that doubles the text


def test_only_a_repeat_before_what_may_not_match_is_tried_in_all_ways():
    costs = {"a+": 1, "a+b": RUN, "a+b*": 1, "a*b+c": RUN**2, "a*b+c?": RUN + 1, "(a+)b": RUN, "(?:a+|bc)d": RUN + 1}
    assert {pattern: cost_of(pattern).alone for pattern in costs} == costs
