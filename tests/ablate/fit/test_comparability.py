"""Which variants may be compared: the refusals, and what the losses per byte of one text allow."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from lightning.pytorch import LightningModule

from lightning_llm import ModelConfig
from lightning_llm.ablate.fit.comparability import (
    aligned_options,
    excused_fields,
    kept_lines,
    refuse_incomparable,
    refuse_unsuitable,
    shape_from_size,
    unshared,
)
from lightning_llm.ablate.fit.variant import Variant
from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.data.validated import Validated
from lightning_llm.statistics import pairing

CONFIG = ModelConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)


class Data(TokenDataModule):
    """A module that knows its validation text only."""

    sources, bytes_per_token = [], 1.0
    context_length, global_batch_size, eval_context_length = 16, 4, None

    def __init__(self):
        pass

    def validated(self, trainer):
        windows = 1600 // self.eval_length
        return Validated([np.arange(windows)], windows)


def variant(name="variant", *, data=None, trainer=None, architecture=None, text=(1000, 3), bytes_per_token=1.0):
    counts = SimpleNamespace(bytes=text[0], documents=text[1])
    module = Data()
    vars(module).update({key: value for key, value in (data or {}).items() if hasattr(Data, key)})
    module.sources = [SimpleNamespace(store=SimpleNamespace(splits={"val": counts}, tokenizer_sha256="1"))]
    module.bytes_per_token = bytes_per_token
    options = {"data": data or {}, "trainer": trainer or {}, "model": {}}
    config = dataclasses.replace(CONFIG, **(architecture or {}))
    model = SimpleNamespace(architecture=config)
    return Variant(name, options, model, module, SimpleNamespace(max_steps=10, sizing=None))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architecture": {"initializer_range": 0.1}}, "changes model.architecture.initializer_range: a pair starts"),
        ({"data": {"seed": 2}}, "changes data.seed: a pair needs the same batches and validation text"),
        ({"data": {"path": "b.txt"}}, "changes data.path: a pair validates the same text: prepare both texts, and let"),
        ({"data": {"tokenizer": "char"}}, "changes data.tokenizer: losses per token cannot be compared"),
        ({"data": {"tokenizer": "char"}, "text": (999, 3)}, "changes data.tokenizer: a pair needs the same batches"),
        ({"trainer": {"max_epochs": 2}}, "changes trainer.max_epochs: a pair needs the same batches"),
        ({"data": {"eval_context_length": 8}}, "changes data.eval_context_length: a pair needs the same batches"),
        ({"data": {"context_length": 24}}, "changes data.context_length to 24, and the baseline has 16: one must be a"),
        ({"trainer": {"capture": True}}, "changes trainer.capture: times of a captured and of another step"),
        ({"trainer": {"limit_val_batches": 2}}, "changes trainer.limit_val_batches: a pair needs the same batches"),
    ],
)
def test_what_makes_losses_incomparable_is_refused(changes, says):
    with pytest.raises(ValueError, match=f"^variant {says}"):
        refuse_incomparable(variant("baseline"), variant(**changes), ["val_loss"])


def test_what_changes_no_batch_is_allowed_and_other_tokenizers_where_bytes_count():
    free = variant(data={"num_workers": 2, "micro_batch_size": 4, "predict_prompts": ["a"]}, trainer={"precision": 16})
    refuse_incomparable(variant("baseline"), free, ["val_loss"])
    refuse_incomparable(variant("baseline"), variant(data={"tokenizer": "char"}), ["bits_per_byte"])
    with pytest.raises(ValueError, match="losses per token cannot be compared"):  # of two metrics, one is per token
        refuse_incomparable(variant("baseline"), variant(data={"tokenizer": "char"}), ["bits_per_byte", "val_loss"])
    shorter = variant(data={"tokenizer": "char"}, trainer={"limit_val_batches": 2})
    with pytest.raises(ValueError, match=r"changes trainer\.limit_val_batches: a pair needs the same batches"):
        refuse_incomparable(variant("baseline"), shorter, ["bits_per_byte"])
    raw = variant(data={"tokenizer": "char"}, bytes_per_token=None)
    with pytest.raises(ValueError, match="a pair needs the same batches"):
        refuse_incomparable(variant("baseline"), raw, ["bits_per_byte"])


def test_the_shares_of_a_mixture_may_change_but_not_its_stores():
    base = variant("baseline", data={"mixture": {"a": 0.7, "b": 0.3}})
    other = variant(data={"mixture": {"a": 0.0, "b": 1.0}})
    refuse_incomparable(base, other, ["val_loss"])
    assert excused_fields(base, other, {}) == (pairing.BATCHES,)
    assert excused_fields(base, base, {}) == ()
    other.options["model"] = base.options["model"] = {}
    assert kept_lines(base, other) == ["variant: its pairs share the validation windows, and no training batches"]
    assert kept_lines(base, base) == []
    for mixture in ({"a": 0.7, "c": 0.3}, {"b": 0.4, "a": 0.6}, {"a": 1.0}):  # other windows, or in another order
        with pytest.raises(ValueError, match=r"changes data\.mixture: a pair needs the same batches"):
            refuse_incomparable(base, variant(data={"mixture": mixture}), ["val_loss"])


def test_all_variants_validate_windows_of_the_shortest_context():
    variants = {"baseline": variant("baseline"), "long": variant(data={"context_length": 64}), "same": variant()}
    assert aligned_options(variants) == {"long": {"data.eval_context_length": 16}}
    variants["short"] = variant(data={"context_length": 8})
    refuse_incomparable(variants["baseline"], variants["short"], ["val_loss"])
    assert aligned_options(variants) == {name: {"data.eval_context_length": 8} for name in ("baseline", "long", "same")}
    given = {"eval_context_length": 4}  # what the user chose stays
    chosen = {"baseline": variant("baseline", data=given), "long": variant(data={"context_length": 64, **given})}
    assert aligned_options(chosen) == {}
    assert excused_fields(variants["baseline"], variants["long"], {}) == (pairing.BATCHES,)
    variants["long"].data.eval_context_length = 16
    assert unshared(variants["baseline"], variants["long"]) == (
        "its pairs share the validation windows, of 16 tokens, and no training batches: "
        "contexts of 64 tokens in place of 16"
    )


@pytest.mark.parametrize(
    ("batch", "context", "limit"),
    [
        (8, 16, 3),  # 6 × 4 windows
        (5, 16, 0.24),  # 24 of 100 windows: no whole number of batches
        (8, 8, 3),
        (5, 8, 0.12),  # 24 of 200 windows
    ],
)
def test_a_limit_in_batches_counts_as_many_windows_with_a_batch_of_another_size(batch, context, limit):
    base = variant("baseline", trainer={"limit_val_batches": 6})
    other = variant(data={"global_batch_size": batch, "context_length": context}, trainer={"limit_val_batches": 6})
    refuse_incomparable(base, other, ["val_loss"])
    assert aligned_options({"baseline": base, "other": other})["other"]["trainer.limit_val_batches"] == limit
    assert excused_fields(base, other, {}) == (pairing.BATCHES,)


def test_another_shape_that_size_chose_is_named():
    base, other = variant("baseline"), variant(architecture={"num_hidden_layers": 2, "intermediate_size": 4})
    assert shape_from_size(base, other) == ""  # the user's own choice
    base.trainer.sizing = other.trainer.sizing = SimpleNamespace()
    line = shape_from_size(base, other)
    assert line.startswith(
        "size chose num_hidden_layers 2, hidden_size 8, num_attention_heads 2 for it, and num_hidden_"
    )
    assert kept_lines(base, other) == [f"variant: {line}"]
    other.model.architecture = base.model.architecture
    assert shape_from_size(base, other) == ""


def test_a_batch_of_another_size_keeps_the_order_of_the_windows():
    base, other = variant("baseline"), variant(data={"global_batch_size": 8})
    assert aligned_options({"baseline": base, "other": other}) == {}
    assert unshared(base, other) == (
        "its pairs share the validation windows and the order of the training windows, in batches of 8 windows in "
        "place of 4"
    )
    assert unshared(base, variant()) == ""


@pytest.mark.parametrize(
    ("changes", "metric", "says"),
    [
        ({"trainer": {"limit_val_batches": 0}}, "val_loss", "limit_val_batches 0: there is no loss to compare"),
        ({"trainer": {"barebones": True}}, "val_loss", "trainer.barebones, which writes no run"),
        ({"trainer": {"fast_dev_run": 1}}, "val_loss", "trainer.fast_dev_run, which writes no run"),
        ({"bytes_per_token": None}, "bits_per_byte", "metric bits_per_byte: the token files are raw"),
    ],
)
def test_a_baseline_without_a_result_is_refused(changes, metric, says):
    with pytest.raises(ValueError, match=says):
        refuse_unsuitable(variant("baseline", **changes), [metric])
    refuse_unsuitable(variant("baseline"), [metric])


class Own:
    """Data of another class: without a seed, or with one of another name."""

    def __init__(self, order=0):
        self.order = order


class Plain(LightningModule):
    """A module that is no LanguageModel."""


class Scored(Plain):
    def validation_step(self, batch, index):
        pass


def own(name="variant", module=None, **options):
    sections = {"data": {}, "model": {}, "trainer": {}, **options}
    model = module or SimpleNamespace(architecture=CONFIG)
    return Variant(name, sections, model, Own(), SimpleNamespace(max_steps=10, sizing=None))


def test_data_of_another_class_need_an_argument_that_seeds_them():
    with pytest.raises(ValueError, match=r"^data\.class_path .*Own has no argument seed, which makes pairs: add"):
        refuse_unsuitable(own("baseline"), ["val_loss"])
    refuse_unsuitable(own("baseline"), ["val_loss"], "data.order")
    refuse_unsuitable(variant("baseline"), ["val_loss"])
    with pytest.raises(ValueError, match="has no argument number"):
        refuse_unsuitable(variant("baseline"), ["val_loss"], "data.number")


def test_hashes_decide_about_data_of_another_class():
    base, other = own("baseline"), own()
    other.options["data"] = {"rows": 2}
    refuse_incomparable(base, other, ["val_loss"])
    assert excused_fields(base, other, {}) == (pairing.BATCHES,)
    assert excused_fields(base, own(), {}) == ()
    assert kept_lines(base, other) == [
        "variant: its data do not say tokens_per_step, so it gets as many steps, of any size"
    ]
    assert aligned_options({"baseline": base, "other": other}) == {}


def test_a_plain_module_is_compared_by_its_validation_loss():
    with pytest.raises(ValueError, match="Plain has no validation_step, which logs val_loss: add it"):
        refuse_unsuitable(own("baseline", Plain()), ["val_loss"], "data.order")
    with pytest.raises(ValueError, match="metric bits_per_byte is one of LanguageModel"):
        refuse_unsuitable(own("baseline", Scored()), ["bits_per_byte"], "data.order")
    base, wide = own("baseline", Scored()), own("wide", Scored(), model={"width": 2})
    refuse_unsuitable(base, ["val_loss"], "data.order")
    assert excused_fields(base, wide, {}) == (pairing.INITIAL_VALUES,)
