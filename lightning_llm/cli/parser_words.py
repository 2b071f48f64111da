"""The messages of the parser (jsonargparse) in one line and in our words: ``expected a whole number, got all``."""

import re
from collections.abc import Callable

from lightning_llm.io.trust import is_import_path, not_found

TYPES = {
    **{"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "NoneType": "null"},
    **{"dict": "options by name", "list": "a list", "tuple": "a list"},
}
OUTSIDE = "{} is not imported: it is outside lightning_llm, and no option or config names it by this path"
_REWORDED: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"\b(got|Got|value:|string:|format:) None\b", r"\1 null"),
    (r'Parser key "([^"]*)"', r"\1"),
    (
        r"Importing '(.*?)' is not allowed, .*? in set_parsing_settings to allow it\.",
        lambda match: OUTSIDE.format(match[1]) if is_import_path(match[1]) else str(not_found("the path", match[1])),
    ),
    (r"Problem with given class_path '(.*?)'", r"\1"),
    (r"- Expected a path but .*? either not accessible or invalid - ", ""),
    (
        r"Type typing\.Callable\[.*?\] expects a function or a callable class: "
        r"Expected '(\S+)' to be a subclass of (.*?)\.?(?= - |$)",
        r"expected a subclass of \2, got \1",
    ),
    (r"Type typing\.Callable\[.*?\] expects a function or a callable class: ", ""),
    (r"\. Got value: Namespace\(.*?\)(?=$| - | Given value)", ""),
    (r"\. Got value: ", ", got "),
    (
        r"Not a valid subclass of \S+ Subclass types expect one of: .*?\(implicit class_path\)",
        "expected an import path",
    ),
    (r"(Expected a dot import path string:|Unexpected import path format:)", "expected an import path, got"),
    (r"Expected an import path or a subclass spec, but got", "expected an import path, got"),
    (r"Unable to load config '(.*?)' - .*", r"expected options by name, got \1"),
    (r"Subcommand \S+ does not accept option '(\w+)\.init_args", r"write each argument of \1.class_path as \1.NAME: '"),
    (r"'(\w+)' object has no attribute 'keys'", r"init_args: Expected a <class 'dict'>, got <class '\1'>"),
    (r"Expected a typing\.Literal\[(.*?)\]", r"expected one of \1"),
]
NO_ALTERNATIVE_FITS = "Does not validate against any of the Union subtypes"
LONGEST = 4000  # characters of a message, which has the value several times
_ALTERNATIVES = re.compile(
    rf"{NO_ALTERNATIVE_FITS} Subtypes: (?:(?!Does not validate).)*? Errors: - "
    r"((?:(?!Does not validate).)*) Given value type: .*? Given value: (.*)"
)


def in_plain_words(message: str) -> str:
    """A message of the parser in one line, with our words for types: ``expected a whole number, got all``."""
    text = " ".join(message.split())[:LONGEST]
    for pattern, replacement in _REWORDED:
        text = re.sub(pattern, replacement, text)
    text = re.sub(r"(Expected an? )?<class '(?:\w+\.)*(\w+)'>", _type_in_words, text)
    text = re.sub(r"(, got [^,]+)\1$", r"\1", text)  # by its class, and by the type of the option
    while (shorter := _ALTERNATIVES.sub(_alternatives_in_words, text)) != text:
        text = shorter
    return text


def _type_in_words(match: re.Match[str]) -> str:
    return ("expected " if match[1] else "") + TYPES.get(match[2], match[2])


def _alternatives_in_words(match: re.Match[str]) -> str:
    """Alternatives for a value; if one of them has another problem than the type, that one alone."""
    alternatives = list(dict.fromkeys(match[1].split(" - ")))
    if problems := [text for text in alternatives if not text.startswith("expected ")]:
        return " or ".join(problems)
    types = dict.fromkeys(text.removeprefix("expected ").partition(", got ")[0] for text in alternatives)
    return f"expected {' or '.join(types)}, got {match[2]}"
