"""An error in a hook of the user's callback: one line that names the class and the hook."""

from pathlib import Path

import pytest
import yaml

from lightning_llm.__main__ import main

CODE = """
from lightning.pytorch.callbacks import Callback

class Broken(Callback):
    def on_train_start(self, trainer, module):
        raise KeyError("theirs")

def of_others(a, b, c, d):
    pass
"""
LAMBDA = "lightning.pytorch.callbacks.LambdaCallback"


@pytest.mark.parametrize(
    ("callback", "says"),
    [
        ({"class_path": "MODULE.Broken"}, "callback MODULE.Broken: its on_train_start failed: KeyError: 'theirs'"),
        (
            {"class_path": LAMBDA, "init_args": {"on_train_start": "MODULE.of_others"}},
            "LambdaCallback: its on_train_start failed: TypeError: of_others() missing 2 required positional arguments",
        ),
        (
            {"class_path": LAMBDA, "init_args": {"setup": "MODULE.of_others"}},
            "LambdaCallback: its setup failed: TypeError: of_others() got an unexpected keyword argument 'stage'",
        ),
    ],
    ids=["raises", "other arguments", "setup"],
)
def test_a_hook_that_raises_is_named(callback, says, tmp_path, monkeypatch, flags, capsys, request):
    module = f"callbacks_{abs(hash(request.node.name))}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path(f"{module}.py").write_text(CODE)
    written = yaml.safe_dump({"trainer": {"callbacks": [callback]}}).replace("MODULE", module)
    Path("theirs.yaml").write_text(written)
    words = ["fit", "--config", "theirs.yaml", *flags(**{"trainer.max_steps": 1})]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert says.replace("MODULE", module) in err
    assert "--debug shows the traceback" in err
    assert "Traceback" not in err
