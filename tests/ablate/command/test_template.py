"""A command with placeholders becomes the words of a run."""

import pytest

from lightning_llm.ablate.command.template import expanded, has, option_words, words_of

VALUES = {"seed": "3", "run": "/r/a b", "options": ["--lr=0.1", "--name=a b"], "port": "1"}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python t.py --seed={seed} {options}", ["python", "t.py", "--seed=3", "--lr=0.1", "--name=a b"]),
        ("t '{run}/x'", ["t", "/r/a b/x"]),
        ('sh -c "cd src && t {options}"', ["sh", "-c", "cd src && t --lr=0.1 '--name=a b'"]),
        ("t {{seed}} --json='{{}}' }}", ["t", "{seed}", "--json={}", "}"]),
        ("t --seed {seed}{seed}", ["t", "--seed", "33"]),
    ],
)
def test_placeholders_become_words_or_parts_of_them(command, words):
    assert expanded(words_of(command, "--command"), VALUES) == words


def test_no_options_are_no_words():
    assert expanded(words_of("t {options} x", "--command"), {"options": []}) == ["t", "x"]


def test_a_brace_is_no_placeholder():
    assert has(["--seed={seed}"], "seed")
    assert not has(["--seed={{seed}}"], "seed")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "--command is empty: give what trains, such as"),
        ("t 'a", "cannot be split into words: No closing quotation"),
        ("t {sed}", r"--command has \{sed\}, which is no placeholder: there are \{seed\} \(the seed of the run\), "),
        ("t {}", r"--command has \{\}, which is no placeholder"),
        ("A=1 t", "--command has 'A=1', which needs a shell: it is started without one; give sh -c \"A=1 t\""),
        ("t | tee x", "--command has '|', which needs a shell".replace("|", r"\|")),
        ("cd x", "--command has 'cd', which needs a shell"),
        ("t && u", "--command has '&&', which needs a shell"),
    ],
)
def test_a_mistake_is_one_line(command, message):
    with pytest.raises(ValueError, match=message):
        words_of(command, "--command")


def test_options_are_written_as_the_user_says():
    options = {"lr": 0.1, "compile": False, "name": "a b", "init": None}
    assert option_words(options, "--{name}={value}") == ["--lr=0.1", "--compile=False", "--name=a b", "--init=None"]
    assert option_words({"lr": "0.1"}, "--{name} {value}") == ["--lr", "0.1"]
    assert option_words({"lr": "0.1"}, "{name}={value}") == ["lr=0.1"]
