"""Which variants may be compared: the refusals, and what the losses per byte of one text allow."""

from types import SimpleNamespace

import pytest

from lightning_llm.ablate.fit.comparability import excused_fields, kept_lines, refuse_incomparable, refuse_unsuitable
from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.statistics import pairing


class Data(TokenDataModule):
    """A module that knows its validation text only."""

    sources, bytes_per_token = [], 1.0

    def __init__(self):
        pass


def variant(name="variant", *, data=None, trainer=None, architecture=None, text=(1000, 3), bytes_per_token=1.0):
    counts = SimpleNamespace(bytes=text[0], documents=text[1])
    module = Data()
    module.sources = [SimpleNamespace(store=SimpleNamespace(splits={"val": counts}))]
    module.bytes_per_token = bytes_per_token
    return SimpleNamespace(
        name=name,
        options={"data": data or {}, "trainer": trainer or {}},
        architecture=SimpleNamespace(**{"initializer_range": 0.02, "mup": None, **(architecture or {})}),
        data=module,
        steps=10,
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architecture": {"initializer_range": 0.1}}, "changes model.architecture.initializer_range: a pair starts"),
        ({"data": {"seed": 2}}, "changes data.seed: a pair needs the same batches and validation text"),
        ({"data": {"tokenizer": "char"}}, "changes data.tokenizer: losses per token cannot be compared"),
        ({"data": {"tokenizer": "char"}, "text": (999, 3)}, "changes data.tokenizer: a pair needs the same batches"),
        ({"trainer": {"max_steps": 20}}, "changes trainer.max_steps: match says how many steps"),
        ({"data": {"seed": 2}, "trainer": {"max_steps": 20}}, "changes data.seed: a pair needs the same batches"),
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
    for each in (base, other):
        each.data.sources[0].store.tokenizer_sha256 = "1"
    assert excused_fields(base, other, {}) == (pairing.BATCHES,)
    assert excused_fields(base, base, {}) == ()
    other.options["model"] = base.options["model"] = {}
    assert kept_lines(base, other) == ["variant: its pairs share the validation windows, and no training batches"]
    for mixture in ({"a": 0.7, "c": 0.3}, {"b": 0.4, "a": 0.6}, {"a": 1.0}):  # other windows, or in another order
        with pytest.raises(ValueError, match=r"changes data\.mixture: a pair needs the same batches"):
            refuse_incomparable(base, variant(data={"mixture": mixture}), ["val_loss"])


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


def test_pairs_need_the_data_module_of_this_project():
    base = variant("baseline")
    base.data = SimpleNamespace()
    with pytest.raises(ValueError, match=r"data\.class_path types\.SimpleNamespace: pairs need the data\.seed"):
        refuse_unsuitable(base, ["val_loss"])
