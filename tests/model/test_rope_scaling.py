"""Ways to stretch RoPE: what is wrong with their options, and the attention factor of YaRN."""

import math

import pytest

from lightning_llm.model.rope_scaling import attention_factor, scaling_problems

LINEAR = {"rope_type": "linear", "factor": 2}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("scaling", [LINEAR, LLAMA3, YARN, {**YARN, "truncate": False, "mscale": 1, "beta_fast": 64}])
def test_complete_options_have_no_problem(scaling):
    assert list(scaling_problems(scaling)) == []


@pytest.mark.parametrize(
    ("scaling", "problems"),
    [
        ({**LINEAR, "rope_type": ["linear"]}, ["rope_scaling.rope_type ['linear'] is not supported: choose one of "]),
        ({"factor": 2}, ["rope_scaling.rope_type None is not supported: choose one of linear, llama3, yarn, or leave"]),
        (
            {"rope_type": "linear", "x": 1, "\x1b": 1},
            [
                "rope_scaling of type linear lacks factor",
                r"rope_scaling.\x1b is unknown to type linear",
                "rope_scaling.x is unknown to type linear",
            ],
        ),
        ({**LINEAR, "factor": True}, ["rope_scaling.factor must be a number above 0, got True"]),
        ({**LINEAR, "factor": math.inf}, ["rope_scaling.factor must be a number above 0, got inf"]),
        ({**LINEAR, "truncate": False}, ["rope_scaling.truncate is unknown to type linear"]),
        ({**YARN, "truncate": 1}, ["rope_scaling.truncate must be true or false, got 1"]),
        (
            {**YARN, "beta_slow": 32, "beta_fast": 32},
            ["rope_scaling.beta_slow 32 must be below beta_fast 32"],
        ),
        (
            {**LLAMA3, "low_freq_factor": 5, "factor": 0},  # the order of what is wrong by itself says nothing
            ["rope_scaling.factor must be a number above 0, got 0"],
        ),
        ({**LLAMA3, "low_freq_factor": 5}, ["rope_scaling.low_freq_factor 5 must be below high_freq_factor 4.0"]),
    ],
)
def test_each_problem_is_named(scaling, problems):
    found = list(scaling_problems(scaling))
    assert len(found) == len(problems)
    assert all(line.startswith(start) for line, start in zip(found, problems, strict=True)), found


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"factor": 1}, 1.0),
        ({"factor": 0.5}, 1.0),  # a shorter context needs none
        ({"attention_factor": 1.5, "mscale": 3, "mscale_all_dim": 2}, 1.5),
        ({"mscale": 0.7, "mscale_all_dim": 0.5}, (0.07 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        ({"mscale": 0.7}, 0.1 * math.log(4) + 1),  # one alone does not count
        ({"rope_type": "linear"}, 1.0),
        ({"rope_type": "llama3"}, 1.0),
    ],
)
def test_the_attention_factor_of_yarn(changes, factor):
    assert attention_factor({**YARN, **changes}) == pytest.approx(factor, rel=1e-12)
