"""The messages of the parser in our words."""

import pytest

from lightning_llm.cli.command_line import with_nearest
from lightning_llm.cli.parser_words import in_plain_words


def test_a_message_of_any_length_is_shortened_in_time():
    text = "Does not validate against any of the Union subtypes Subtypes: [ Errors: - Given value type: " * 5000
    assert len(in_plain_words(text)) < 5000


UNION = """Parser key "trainer.max_steps": Does not validate against any of the Union subtypes
Subtypes: [<class 'int'>, <class 'NoneType'>]
Errors:
  - Expected a <class 'int'>. Got value: x
  - Expected a <class 'NoneType'>. Got value: x
Given value type: <class 'str'>
Given value: x"""


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("Parser key \"a.b\": Expected a <class 'int'>. Got value: all", "a.b: expected a whole number, got all"),
        (UNION, "trainer.max_steps: expected a whole number or null, got x"),
        ("Expected a typing.Literal['a', 'b']. Got value: c", "expected one of 'a', 'b', got c"),
    ],
)
def test_types_have_our_names(message, line):
    assert in_plain_words(message) == line


NOT_ALLOWED = "Importing '{}' is not allowed, use import_path_allowlist in set_parsing_settings to allow it."


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nowhere.to.be.Found", "'nowhere.to.be.Found' cannot be imported: no module was found by this path; give"),
        ("json.JSONDecoder", "json.JSONDecoder is not imported: it is outside lightning_llm, and no option or config"),
    ],
)
def test_a_package_that_is_not_installed_is_not_called_untrusted(path, says):
    assert says in in_plain_words(NOT_ALLOWED.format(path))


def test_letters_in_another_order_are_the_nearest_name():
    options = [f"model.architecture.{name}" for name in ("mup", "mlp", "norm")]
    said = with_nearest("unrecognized arguments: --model.architecture.mpl=gelu", options)
    assert said.endswith("; did you mean --model.architecture.mlp?")
    assert with_nearest("unrecognized arguments: --model.architecture.nrom", options).endswith("norm?")
    assert with_nearest("unrecognized arguments: --x", options) == "unrecognized arguments: --x"
