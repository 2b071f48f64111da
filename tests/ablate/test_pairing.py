"""Whether two runs are a pair."""

import pytest

from lightning_llm.ablate.pairing import mismatch

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
