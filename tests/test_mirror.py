"""``tests/`` mirrors the package by room: the tests of ``lightning_llm/optim/`` are in ``tests/optim/``."""

from pathlib import Path

PACKAGE, TESTS = Path(__file__).parents[1] / "lightning_llm", Path(__file__).parent


def rooms_without_tests(package: Path, tests: Path) -> list[str]:
    rooms = sorted({path.parent.relative_to(package).as_posix() for path in package.rglob("*.py")} - {"."})
    return [room for room in rooms if not any((tests / room).glob("test_*.py"))]


def test_each_room_has_tests():
    assert len(list(PACKAGE.rglob("*.py"))) > 100  # the path is right
    assert rooms_without_tests(PACKAGE, TESTS) == []


def test_a_room_without_tests_is_found(tmp_path):
    for name in ("house/optim/adamw.py", "house/data/order.py", "tests/optim/test_all.py", "tests/data/conftest.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert rooms_without_tests(tmp_path / "house", tmp_path / "tests") == ["data"]
