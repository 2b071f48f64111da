"""Whether two runs are a pair."""

import pytest

from lightning_llm.statistics.pairing import NULL_VALUES, mismatch, redrawn_part

RUN = {
    "batches": "a1",
    "validation_batches": "b1",
    "initial_values": {"embed": "8x4 float32 01", "mlp.up": "16x4 float32 02", "norm": "4 float32 03"},
}


def changed(**values):
    return {**RUN, "initial_values": {**RUN["initial_values"], **values}}


def test_what_only_one_run_has_is_not_shared():
    assert mismatch(RUN, RUN) == ""
    assert mismatch(RUN, changed(**{"mlp.gate": "16x4 float32 09"})) == ""
    assert mismatch(RUN, changed(**{"mlp.up": "24x4 float32 09"})) == ""  # of another shape


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({**RUN, "batches": "a2"}, "their training batches differ"),
        ({**RUN, "validation_batches": "b2"}, "their validation batches differ"),
        ({**RUN, "batches": None}, "a run has no record of its training batches"),
        ({}, "a run has no record of its training batches"),
        (changed(embed="8x4 float32 09"), "their initial values differ: embed"),
        (changed(embed="8x4 float32 09", norm="4 float32 08"), "their initial values differ: embed and 1 more"),
        ({**RUN, "initial_values": {"other": "1 float32 00"}}, "they share no parameter"),
    ],
)
def test_runs_that_are_no_pair(other, says):
    assert mismatch(RUN, other) == mismatch(other, RUN) == says


EXECUTED = {
    "precision": ("32-true", "bf16-true", "precision"),
    "device": ("CPU 1", "CPU 2", "device"),
    "threads": (1, 2, "number of threads"),
    "tf32": (False, True, "use of TF32"),
    "torch": ("2.6.0", "2.7.0", "version of torch"),
    "numpy": ("2.1.0", "2.2.0", "version of numpy"),
    "package": ("0" * 16, "1" * 16, "code of lightning_llm"),
}
HERE = {**RUN, **{field: here for field, (here, _, _) in EXECUTED.items()}}


@pytest.mark.parametrize("field", EXECUTED)
def test_runs_that_were_executed_in_other_ways_are_no_pair(field):
    here, there, words = EXECUTED[field]
    assert mismatch(HERE, HERE) == ""
    assert mismatch(HERE, {**HERE, field: there}) == f"their {words} differs: {here} and {there}"
    assert mismatch(HERE, {**HERE, field: there}, [field]) == ""
    unknown = {name: value for name, value in HERE.items() if name != field}
    says = f"a run has no record of its {words}"
    assert mismatch(HERE, unknown) == mismatch(unknown, HERE) == mismatch({**HERE, field: None}, HERE) == says
    assert mismatch(unknown, unknown) == ""  # of earlier versions
    change = f"step 3: {field}: {there} -> {here}"
    resumed = {**HERE, "changed_on_resume": ["step 2: model.optimizer.lr: 0.1 -> 0.2", change]}
    says = f"a run was resumed with another {words} ({change})"
    assert mismatch(HERE, resumed) == mismatch(resumed, HERE) == says
    assert mismatch(HERE, resumed, [field]) == ""


def test_a_resume_that_changed_an_option_is_reported_elsewhere():
    assert mismatch(RUN, {**RUN, "changed_on_resume": ["step 2: trainer.max_steps: 2 -> 3"]}) == ""
    assert mismatch(RUN, {**RUN, "changed_on_resume": []}) == ""


SHORT = {**RUN, "steps": 3, "batches_at": {"1": "01", "2": "02", "3": "a1"}}
LONG = {**RUN, "steps": 10, "batches": "a9", "batches_at": {"1": "01", "2": "02", "4": "04", "10": "a9"}}


def test_runs_of_other_lengths_share_the_batches_of_their_last_common_step():
    assert mismatch(SHORT, LONG) == mismatch(LONG, SHORT) == ""
    other = {**LONG, "batches_at": {**LONG["batches_at"], "2": "09"}}
    assert mismatch(SHORT, other) == mismatch(other, SHORT) == "their training batches up to step 2 differ"
    earlier = {**LONG, "batches_at": {**LONG["batches_at"], "1": "09"}}  # the sum at step 2 contains it
    assert mismatch(SHORT, earlier) == ""
    last = ({**RUN, "steps": end, "batches_at": {"2": "02", "10": f"{end}"}} for end in (11, 12))
    assert mismatch(*last) == "their training batches up to step 10 differ"  # by number, not as text
    assert (
        mismatch(SHORT, {**LONG, "batches_at": {"5": "05"}})
        == "their records of training batches have no step in common"
    )
    assert (
        mismatch(SHORT, {**LONG, "batches_at": None})
        == "they have 3 and 10 steps, and no record of the batches of both"
    )
    assert mismatch(SHORT, other, ["batches"]) == ""
    same_length = {**SHORT, "batches": "a2"}
    assert mismatch(SHORT, same_length) == "their training batches differ"


def test_the_initial_values_of_the_mlps_can_be_excused_alone():
    values = {"embed": "8x4 float32 01", "layers.0.mlp.up": "16x4 float32 02"}
    run = {**RUN, "initial_values": values}
    redrawn = {**RUN, "initial_values": {**values, "layers.0.mlp.up": "16x4 float32 09"}}
    assert mismatch(run, redrawn) == "their initial values differ: layers.0.mlp.up"
    assert mismatch(run, redrawn, [NULL_VALUES]) == ""
    other = {**RUN, "initial_values": {**values, "embed": "8x4 float32 09"}}
    assert mismatch(run, other, [NULL_VALUES]) == "their initial values differ: embed"


def test_a_deeper_model_may_begin_with_smaller_residual_projections():
    residual = ("layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight")
    run = {**RUN, "initial_values": {"embed.weight": "8x4 float32 01", **dict.fromkeys(residual, "4x4 float32 01")}}
    scaled = {**RUN, "initial_values": {**run["initial_values"], **dict.fromkeys(residual, "4x4 float32 02")}}
    assert mismatch(run, scaled) == "their initial values differ: layers.0.self_attn.o_proj.weight and 1 more"
    scaled["initial_values"]["layers.1.norm.weight"] = "4 float32 01"
    assert mismatch(run, scaled) == mismatch(scaled, run) == ""
    scaled["initial_values"]["embed.weight"] = "8x4 float32 03"
    assert mismatch(run, scaled) == "their initial values differ: embed.weight"


def with_rules(values, **rules):
    return {**RUN, "initial_values": {"embed": "8x4 float32 01", **values}, "initial_rules": rules}


def test_what_a_constructor_sets_need_not_be_shared():
    run, other = with_rules({"mlp.down": "4x4 float32 01"}), with_rules({"mlp.down": "4x4 float32 02"})
    assert mismatch(run, other) == "their initial values differ: mlp.down"
    other["initial_rules"] = {"mlp.down": "kept"}
    assert mismatch(run, other) == mismatch(other, run) == ""


def test_a_layer_that_writes_to_the_residual_stream_in_one_run_alone_need_not_be_shared():
    run, other = with_rules({"mlp.down": "4x4 float32 01"}), with_rules({"mlp.down": "4x4 float32 02"})
    run["initial_rules"] = {"mlp.down": "residual"}
    assert mismatch(run, other) == mismatch(other, run) == ""
    other["initial_rules"] = {"mlp.down": "residual"}
    assert mismatch(run, other) == "their initial values differ: mlp.down"
    other["initial_values"]["layers.1.norm"] = "4 float32 01"  # another depth
    assert mismatch(run, other) == ""


def test_the_null_variant_may_redraw_one_kind_of_part():
    parts = ("layers.0.mlp.up", "layers.0.self_attn.q", "embed_tokens.weight")
    run = with_rules(dict.fromkeys(parts, "4x4 float32 01"))
    for part in parts:
        null = with_rules({**dict.fromkeys(parts, "4x4 float32 01"), part: "4x4 float32 02"})
        assert mismatch(run, null, [NULL_VALUES]) == ""
        assert redrawn_part(run, null) in part
    both = with_rules({**dict.fromkeys(parts, "4x4 float32 02"), parts[2]: "4x4 float32 01"})
    assert mismatch(run, both, [NULL_VALUES]) == "their initial values differ: layers.0.self_attn.q"
    assert redrawn_part(run, run) is None
