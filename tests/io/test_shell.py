"""Commands that messages suggest: a shell reads the words as they were meant, and no parser takes one for an option."""

import argparse
import shutil
import subprocess

import pytest

from lightning_llm.io.shell import shell_command, shell_option, shell_path, shell_word
from lightning_llm.io.untrusted import printable

TEXTS = [
    "a",
    "",
    "a b",
    "it's",
    '"',
    "$HOME",
    "%{}",
    "a\nb",
    "a\\'\n",
    "\x1b[1m\x07",
    "\tnаme\r9",
    "春眠",
    "*",
    "\u202e!",
]


def as_bash_reads(words):
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    run = subprocess.run(["bash", "-c", f"printf '%s\\0' {words}"], capture_output=True, check=True)
    return run.stdout.decode().split("\0")[:-1]


def test_a_shell_reads_each_word_as_it_is():
    assert as_bash_reads(shell_command(*TEXTS)) == TEXTS
    assert [printable(shell_word(text)) for text in TEXTS] == [shell_word(text) for text in TEXTS]


@pytest.mark.parametrize("name", ["-dash", "--dash/version_0", "-", "~/a", "~", "-a b"])
def test_a_path_is_no_option_and_no_home_folder(name):
    assert as_bash_reads(shell_path(name)) == [f"./{name}"]
    assert shell_path("runs/a b") == "'runs/a b'"


@pytest.mark.parametrize("value", ["-word", "--temperature", "-1", "word", "a b", "-a b\n"])
def test_a_value_is_no_option(value):
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompt")
    parser.add_argument("--temperature")
    assert parser.parse_args(as_bash_reads(shell_option("--prompt", value))).prompt == value
