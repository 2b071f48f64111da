"""Text that a terminal or a folder would obey, made harmless; and the one console that rich draws on."""

import json
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_llm.io.untrusted import ESCAPE, LONGEST_NAME, file_name, number_in, printable

# not the module's own expression
OBEYED = {*range(32), *range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)}
OBEYED |= set(range(0xE0000, 0xE0080))
# bidi marks and what has no width
OBEYED |= {0xAD, 0x61C, 0x180E, *range(0x200B, 0x2010), *range(0x2060, 0x2070), 0xFEFF, *range(0xFFF9, 0xFFFC)}
OBEYED |= {*range(0x1BCA0, 0x1BCA4), *range(0x1D173, 0x1D17B)}
JOINERS = {0x200C, 0x200D}
OBEYED -= {ord("\t"), ord("\n")}
TEXTS = st.text(st.characters() | st.sampled_from([chr(number) for number in sorted(OBEYED)]))


@settings(deadline=None)
@given(TEXTS)
def test_nothing_that_is_obeyed_is_left(text):
    shown = printable(text)
    assert not (OBEYED - JOINERS) & set(map(ord, shown))
    assert not re.search("(?:^|[\x00-\u036f\u200b-\u200f])[\u200c\u200d]", shown, re.DOTALL)
    assert printable(shown) == shown
    assert shown == text or OBEYED & set(map(ord, text))


@settings(deadline=None)
@given(TEXTS)
def test_json_has_the_same_content(text):
    assert json.loads(printable(json.dumps({text: text}, ensure_ascii=False))) == {text: text}
    assert json.loads(json.dumps(text, ensure_ascii=False).encode("ascii", errors=ESCAPE)) == text


def test_escapes_are_readable():
    assert (
        printable("\x1b[31mred\r\n\t\x9b\u202e\U000e0041é")
        == r"\x1b[31mred\x0d" + "\n\t" + r"\u009b\u202e\udb40\udc41é"
    )


def test_joiners_are_left_where_they_shape_letters_and_emoji():
    persian, hindi = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "\u0915\u094d\u200d\u0937"
    for word in (persian, hindi, "\U0001f468\u200d\U0001f469"):
        assert printable(word) == word
    assert printable("mo\u200cdel\u200d") == r"mo\u200cdel\u200d"
    assert printable("\u0645\u200d\u200d") == "\u0645\u200d" + r"\u200d"


def test_only_digits_from_0_to_9_are_a_number():
    assert [number_in(text) for text in ("0", "017", "9" * 18)] == [0, 17, 10**18 - 1]
    for text in ("", "²", "1²", "٣", "-1", "+1", "1_0", " 1", "1\n", "9" * 19, "1e3"):
        assert number_in(text) is None


@settings(deadline=None)
@given(TEXTS | st.sampled_from(["..", ".", "", "/", "../../escape", "/etc/passwd", "a\0b", "x" * 300, "漢" * 200]))
def test_a_label_is_the_name_of_one_file(tmp_path_factory, label):
    name = file_name(label)
    folder = tmp_path_factory.getbasetemp()
    assert (folder / name).resolve().parent == folder.resolve()
    assert len(name.encode()) <= LONGEST_NAME
    assert printable(name) == name
    assert "\n" not in name
    assert file_name(name) == name


def test_names_are_readable_and_long_ones_differ():
    assert file_name("mlp=swiglu, seed_everything=1") == "mlp=swiglu, seed_everything=1"
    assert file_name("../../escape") == "..∕..∕escape"
    assert file_name("x" * 300) != file_name("x" * 301)


def test_what_an_encoding_lacks_is_escaped():
    assert "é\ud800\U0001f600".encode("ascii", ESCAPE) == rb"\u00e9\ud800\ud83d\ude00"
