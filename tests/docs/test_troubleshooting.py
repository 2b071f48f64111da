"""The messages on docs/troubleshooting.md are those of the code, word for word between the names and numbers."""

import ast
import re

import pytest

from tests.docs.markdown import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
MESSAGES = re.findall(r"^### `(.+)`$", PAGE.read_text(encoding="utf-8"), re.M)
GAP = "…"


@pytest.fixture(scope="module")
def texts():
    """Every string of the package, with a gap for each value in it."""
    found = []
    for path in (ROOT / "lightning_llm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else GAP for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def is_in(message, text):
    """Whether a text has the fixed words of a message, in this order."""
    words = [part.strip(" ;:") for part in message.split(GAP)]
    pattern = ".*".join(re.escape(part) for part in words if part)
    return re.search(pattern, text, re.S) is not None


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_one_of_the_code(message, texts):
    assert any(is_in(message, text) for text in texts)


def test_every_section_has_messages_and_a_message_that_was_made_up_is_found(texts):
    assert len(MESSAGES) > 20
    assert len(set(MESSAGES)) == len(MESSAGES)
    assert not any(is_in("the model … is too green", text) for text in texts)
    assert not is_in("first … second", "second, then first")
