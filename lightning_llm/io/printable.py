"""Untrusted text on a terminal and in file names: control characters become visible escapes. Needs no torch."""

import codecs
import hashlib
import re

# C0 but for tab and newline, DEL and C1, line and paragraph separators, bidi embeddings and isolates, surrogates, tags
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]")
ESCAPE = "lightning-llm-escape"  # for ``errors=`` of a stream: escapes characters that its encoding lacks
SLASH = "∕"  # looks like a slash, but separates no folders
LONGEST_NAME = 120  # bytes of UTF-8; file systems allow 255, and a suffix or a number may be added


def printable(text: str) -> str:
    r"""Replace every character that controls a terminal by an escape: ``\x1b``, ``\u202e``.

    Tabs and newlines are unchanged. JSON stays JSON with the same content.
    """
    return _OBEYED.sub(lambda found: _escaped(found[0]), text)


def file_name(label: str) -> str:
    """Turn any label into the name of one file or folder.

    A label that is a valid name is unchanged. Otherwise the result is printable, in one line, has no separator and is
    not ``.`` or ``..``; a long one is cut and ends with a part of its hash.
    """
    name = printable(label).replace("\n", r"\n").replace("\t", r"\t").replace("/", SLASH)
    if len(name.encode()) > LONGEST_NAME:
        digest = hashlib.sha256(label.encode(errors="surrogatepass")).hexdigest()[:8]
        name = f"{name.encode()[: LONGEST_NAME - 12].decode(errors='ignore')}…{digest}"
    return name if name.strip(".") else f"_{name}"


def _escaped(text: str) -> str:
    if text < " ":
        return f"\\x{ord(text):02x}"
    units = text.encode("utf-16-be", errors="surrogatepass").hex()  # as JSON has it
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))


def _escape_unencodable(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(_escaped, error.object[error.start : error.end])), error.end


codecs.register_error(ESCAPE, _escape_unencodable)
