"""Short names of options: what they are called in TensorBoard, in names of runs and in comparisons."""

import pytest

from lightning_llm.runs.options import short_options, shown_option


def test_names_lose_what_says_nothing():
    options = {
        "seed_everything": 1,
        "model": {
            "architecture": {"mlp": "swiglu", "vocab_size": None},
            "optimizer": {"class_path": "lightning_llm.optim.AdamW", "init_args": {"lr": 0.1, "betas": [0.9, 0.95]}},
            "schedule": None,
        },
        "data": {"seed": 2, "vocab_size": 300},
        "trainer": {"max_steps": 5},
    }
    assert short_options(options) == {
        "seed_everything": 1,
        "mlp": "swiglu",
        "vocab_size": None,
        "optimizer": "AdamW",
        "optimizer.lr": 0.1,
        "optimizer.betas": [0.9, 0.95],
        "schedule": None,
        "data.seed": 2,
        "data.vocab_size": 300,
        "trainer.max_steps": 5,
    }


def test_dotted_names_are_as_good_as_nested_ones():
    assert short_options({"model.optimizer.init_args.lr": 0.1, "model.optimizer.class_path": "a.B"}) == {
        "optimizer.lr": 0.1,
        "optimizer": "B",
    }


def test_options_of_a_callback_that_are_none_are_left_out():
    callback = {"class_path": "mine.Mine", "init_args": "text"}
    assert list(short_options({"trainer": {"callbacks": [callback]}})) == ["trainer.callbacks"]


def test_where_a_run_is_done_is_left_out():
    trainer = {"default_root_dir": "x", "logger": {"class_path": "y"}, "enable_progress_bar": False, "max_steps": 1}
    assert short_options({"ckpt_path": "z", "trainer": trainer}) == {"trainer.max_steps": 1}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (0.00050, "0.0005"),
        (1e-5, "1e-05"),
        (3, "3"),
        ([0.9, 0.95], "[0.9 0.95]"),
        ({"a": 1}, "a=1"),
        ("/books/my text.txt", "my text.txt"),
        ("stores/books/", "books"),
    ],
)
def test_values_are_text_without_slashes(value, text):
    assert shown_option(value) == text
