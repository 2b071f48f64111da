"""Words of the commands that messages suggest: a shell reads each as typed, and no parser takes it for an option."""

import os
import shlex


def shell_word(text: str) -> str:
    r"""One word for a shell: quoted if needed; with control characters as ``$'a\012b'``, which a terminal prints."""
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(map(_escaped, text))}'"


def shell_path(path: str | os.PathLike[str]) -> str:
    """A path as a word: one that begins like an option or a home folder gets ``./``."""
    text = os.fspath(path)
    return shell_word(f"./{text}" if text.startswith(("-", "~")) else text)


def shell_command(*words: str) -> str:
    """Several words, as they were typed."""
    return " ".join(map(shell_word, words))


def shell_option(name: str, value: str) -> str:
    """An option with its value, in one word if the value begins like an option."""
    return shell_word(f"{name}={value}") if value.startswith("-") else f"{name} {shell_word(value)}"


def _escaped(character: str) -> str:
    if character.isprintable():
        return f"\\{character}" if character in "\\'" else character
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(character))
