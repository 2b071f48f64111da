"""A schema names what is wrong with a value, and a message stays one short line."""

import pytest

from lightning_llm.io.schema import (
    NUMBER,
    POSITIVE,
    TEXT,
    by_name,
    list_of,
    maybe,
    one_of,
    open_record,
    record,
    refuse,
    validate,
    whole,
)

PERSON = {"name": TEXT, "age": whole(0, 150)}


@pytest.mark.parametrize(
    ("schema", "value", "problems"),
    [
        (whole(1, 3), 3, []),
        (whole(1, 3), True, ["x is True, expected a whole number from 1 to 3"]),
        (whole(1, 3), 2.0, ["x is 2.0, expected a whole number from 1 to 3"]),
        (one_of(1, "a"), True, ["x is True, expected 1 or 'a'"]),
        (NUMBER, float("nan"), ["x is nan, expected a finite number"]),
        (POSITIVE, 0, ["x is 0, expected a number above 0"]),
        (maybe(TEXT), None, []),
        (list_of(TEXT), ["a", 1], ["x[1] is 1, expected text"]),
        (list_of(TEXT, 1), ["a", "b"], ["x is ['a', 'b'], expected a list of at most 1"]),
        (by_name(TEXT), {}, ["x is {}, expected at least one by name"]),
        (by_name(TEXT), {"a": 1}, ["x.a is 1, expected text"]),
        (record(PERSON), {"name": "a"}, ["x.age is missing"]),
        (record(PERSON, {"note": TEXT}), {"name": "a", "age": 1, "note": "b"}, []),
        (record(PERSON), {"name": "a", "age": 1, "b": 2}, ["x.b is unknown: choose one of name, age"]),
        (open_record(PERSON), {"name": "a", "age": 1, "b": 2}, []),
        (open_record(PERSON), {"name": "a", "age": 1, 2: 2}, ["x.2 is unknown: choose one of name, age"]),
        (record(PERSON), [], ["x is [], expected an object with fields by name"]),
    ],
)
def test_a_schema_yields_what_is_wrong(schema, value, problems):
    assert list(schema(value, "x")) == problems


def test_a_message_is_one_line_with_the_first_problems():
    refuse([], "a.json")
    with pytest.raises(ValueError, match=r"^a\.json: 0; 1; 2; 3; 4; get it again$"):
        refuse(map(str, range(100)), "a.json", "get it again")
    with pytest.raises(ValueError, match=r"^a\.json: the content is 'x+\.\.\.x+', expected an object") as refusal:
        validate("x" * 100_000, record(PERSON), "a.json")
    assert len(str(refusal.value)) < 700
    assert "\n" not in str(refusal.value)
