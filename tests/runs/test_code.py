"""What a run executes: this package, and the modules of the user's own classes."""

import sys
from types import SimpleNamespace

import pytest

from lightning_llm.runs.code import code_of, package_digest

OTHERS = {"d": {"norm": "plain.part.Norm", "text": "stores.txt", "precision": "auto"}}


def test_the_snapshot_has_the_package_and_the_modules_of_the_users_classes(tmp_path, monkeypatch):
    (tmp_path / "my_part.py").write_text("raise AssertionError('it is not imported')\n")
    (tmp_path / "my_parts").mkdir()
    (tmp_path / "my_parts" / "__init__.py").write_text("")
    (tmp_path / "my_parts" / "deep.py").write_text("x = 1\n")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "part.py").write_text("x = 1\n")
    (tmp_path / "stores").mkdir()
    (tmp_path / "stores" / "x.py").write_text("")
    (tmp_path / "auto.py").write_text("")
    (tmp_path / "needed.py").write_text("x = 1\n")  # by a class of the user
    (tmp_path / "site-packages").mkdir()  # of another interpreter, whose packages are on the path
    (tmp_path / "site-packages" / "installed.py").write_text("x = 1\n")
    for folder in (tmp_path / "site-packages", tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "needed", SimpleNamespace(__file__=str(tmp_path / "needed.py")))
    configs = {"a": {"model": {"mlp": "my_part.MLP", "optimizer": {"class_path": "my_parts.deep.SGD"}}, "b": ["x.y"]}}
    code = code_of(
        configs
        | {"c": {"optimizer": "torch.optim.SGD", "loader": "json.loads", "b": "installed.B", "path": "../a.b"}}
        | OTHERS
    )
    own = {name for name in code if not name.startswith("lightning_llm/")}
    assert own == {"my_part.py", "my_parts/__init__.py", "my_parts/deep.py", "plain/part.py", "needed.py"}
    assert "needed.py" not in code_of({})
    assert {"lightning_llm/__main__.py", "lightning_llm/training/module.py"} <= code.keys()
    assert "my_part" not in sys.modules


@pytest.mark.parametrize("change", ["text", "name"])
def test_the_digest_knows_every_file(monkeypatch, tmp_path, change):
    (tmp_path / "a.py").write_text("1")
    monkeypatch.setattr("lightning_llm.runs.code.PACKAGE", tmp_path)
    before = package_digest()
    if change == "text":
        (tmp_path / "a.py").write_text("2")
    else:
        (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert package_digest() != before
