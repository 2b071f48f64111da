"""``lightning-llm fit --help``: what stands first, and in which words."""

import pytest

from lightning_llm.__main__ import TRAINER_WORDS, main
from lightning_llm.cli.help_text import plain


@pytest.mark.parametrize("command", TRAINER_WORDS)
def test_options_of_this_project_come_before_the_trainers(command, capsys):
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    own = said.index("\n  --keep_freed_memory")
    places = [own, *(said.index(f"\n  --{name} ") for name in ("ckpt_path", "model", "data", "trainer"))]
    assert places == sorted(places)
    assert "`" not in said
    assert "lightning_llm.training.callbacks.SampleText" in " ".join(said.split())
    assert "a run directory, or last or best, of the newest run" in " ".join(said.split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("``uint16`` or ``uint32``", "uint16 or uint32"),
        ("as in :class:`~lightning_llm.optim.AdamW`", "as in AdamW"),
        ("the `notes\n <https://a.b/c>`_ say", "the notes (https://a.b/c) say"),
        ("`model-name`", "model-name"),
        ("==SUPPRESS==", "==SUPPRESS=="),
        (None, None),
    ],
)
def test_markup_is_left_out(text, expected):
    assert plain(text) == expected
