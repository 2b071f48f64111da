"""Phrases that no colleague would say, and names that were replaced: neither the package nor the pages hold them."""

import re

import pytest

from tests.docs.markdown import PAGES, ROOT

WORDS = [
    r"\bgo(?:es)? on\b",
    r"\banew\b",
    r"\bby turns\b",
    r"\bmain memory\b",
    r"\bat hand\b",
    r"\bwhat there is\b",
    r"\blikeliest\b",
    r"\bmend(?:ed|s)?\b",
    r"HonestResume",
    r"SameEverywhere",
    r"(?-i:[Ss]hadow[A-Z_])",
    r"home_of",
]
# A phrase may be split between two lines: of prose, of a comment, or of a string.
UNWANTED = re.compile("|".join(word.replace(" ", r"[\s#\"']+") for word in WORDS), re.IGNORECASE)
CALLBACKS = "lightning_llm/training/callbacks"
ALLOWED = {  # the callbacks' names in 0.1: their aliases, and the keys of their states in earlier checkpoints
    (
        f"{CALLBACKS}/rank_consistency.py",
        "SameEverywhere = RankConsistencyCheck  # its name in 0.1, for one more version",
    ),
    (f"{CALLBACKS}/resume_diff.py", "HonestResume = ResumeDiff  # its name in 0.1, for one more version"),
    (
        f"{CALLBACKS}/__init__.py",
        f"from {CALLBACKS.replace('/', '.')}.rank_consistency import SameEverywhere as SameEverywhere",
    ),
    (
        f"{CALLBACKS}/__init__.py",
        f"from {CALLBACKS.replace('/', '.')}.resume_diff import HonestResume as HonestResume",
    ),
    (
        "lightning_llm/checkpoints/reading.py",
        'RENAMED_CALLBACKS = {"HonestResume": "ResumeDiff"}  # keys of their states in checkpoints of earlier versions',
    ),
}
FILES = [
    *(path for folder in ("lightning_llm", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))),
    *PAGES,
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
    *sorted((ROOT / "configs").iterdir()),
]


def unwanted(text):
    """The number, the words and the content of each line in which an unwanted phrase begins."""
    lines = text.splitlines()
    for match in UNWANTED.finditer(text):
        number = text.count("\n", 0, match.start()) + 1
        yield number, " ".join(match[0].split()), lines[number - 1].strip()


def test_the_package_and_the_pages_use_plain_words():
    found, allowed = [], set()
    for path in FILES:
        name = str(path.relative_to(ROOT))
        for number, words, line in unwanted(path.read_text(encoding="utf-8")):
            if (name, line) in ALLOWED:
                allowed.add((name, line))
            else:
                found.append(f"{name}:{number}: {words!r} in: {line}")
    assert not found, "\n".join(found)
    assert allowed == ALLOWED, "the list names a line that is gone"


BRITISH = re.compile(
    r"\b\w*(?:optimis|initialis|normalis|parametris|quantis|synchronis|utilis|recognis|summaris|serialis)(?:e|i|a)\w*"
    r"|\b\w*(?:behaviour|colour|neighbour|favour|labelled|modelled|learnt)\w*",
    re.IGNORECASE,
)


def british(text):
    """Words in British spelling; not in code, of which some names stay, nor in addresses."""
    return BRITISH.findall(re.sub(r"```.*?```|`[^`\n]+`|\]\([^)]*\)|fused optimizer", "", text, flags=re.S))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_are_in_american_spelling(page):
    assert british(page.read_text(encoding="utf-8")) == []


def test_british_spelling_is_found_outside_of_code():
    text = (
        "`optimiser` [x](memory-optimised.md) The optimisers behave; their Behaviour is analysed, otherwise promised."
    )
    assert british(text) == ["optimisers", "Behaviour"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("first\nIt goes on.", "goes on"),
        ("first\nin main\nmemory", "main memory"),
        ("first\n# what\n# there is", "what # there is"),
        ('first\n"by "\n"turns"', 'by " "turns'),
        ("first\nLikeliest", "Likeliest"),
        ("first\nclass ShadowTensor:", "ShadowT"),
    ],
)
def test_an_unwanted_phrase_is_found_with_its_line(text, words):
    assert [(number, found) for number, found, _ in unwanted(text)] == [(2, words)]


@pytest.mark.parametrize(
    "text", ["The list was amended.", "on hand", "the time goes into matmuls", "recommended", "it shadows a name"]
)
def test_similar_words_are_left_alone(text):
    assert not list(unwanted(text))
