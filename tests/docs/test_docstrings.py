"""Public methods have docstrings, and none only points to another one."""

import ast
import re

import pytest

from tests.docs.markdown import ROOT

POINTS = re.compile(r"Likewise\b|As in\b|(?:As|As of|See) :?\w*:?`+[^`]*`+\.?$")  # to another docstring
NOT_MEANT = {"NamedTuple", "TypedDict", "Protocol", "object", "Enum", "ABC", "abc.ABC", "Generic"}


def definitions(node, owner=None):
    """Each public function and class with the class that it is in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            yield child, owner
            yield from definitions(child, child) if isinstance(child, ast.ClassDef) else ()


def docstring_faults(source):
    """What ruff leaves to us: methods without a docstring whose class has no base that could have it; pointers."""
    for node, owner in definitions(ast.parse(source)):
        text = ast.get_docstring(node)
        if text is None:
            if owner is not None and {ast.unparse(base) for base in owner.bases} <= NOT_MEANT:
                yield node.lineno, f"{owner.name}.{node.name} has no docstring"
        elif POINTS.match(text):
            yield node.lineno, f"{node.name}: {text!r} says nothing"


@pytest.mark.parametrize("folder", ["lightning_llm", "benchmarks"])
def test_public_docstrings_say_something(folder):
    found = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, fault in docstring_faults(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ('def f():\n    "Likewise, with four more words."', "f: 'Likewise, with four more words.' says nothing"),
        ('def f():\n    "As in the function above."', "f: 'As in the function above.' says nothing"),
        ('def f():\n    "See :meth:`B.f`."', "f: 'See :meth:`B.f`.' says nothing"),
        ("class A:\n    def f(self): ...", "A.f has no docstring"),
        ("class A(NamedTuple):\n    def f(self): ...", "A.f has no docstring"),
    ],
)
def test_a_docstring_that_says_nothing_is_found(source, fault):
    assert [text for _, text in docstring_faults(source)] == [fault]


def test_others_are_left_alone():
    source = """class A(B):
    def f(self): ...
    def g(self):
        "(n, n) -> (n,)"

def _h(): ...
def i():
    "See the notes, which say more."
def j():
    "As ``getrusage`` has it, but in bytes."
"""
    assert list(docstring_faults(source)) == []
