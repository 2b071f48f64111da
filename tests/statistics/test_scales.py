"""Scales of initial weights: when two are different, and what is said of it."""

import pytest

from lightning_llm.statistics.scales import Scale, differing_scales


@pytest.mark.parametrize(
    ("rms", "elements", "ratio"),
    [
        (0.02, 10**6, None),
        (0.0209, 10**6, None),  # 4.5%
        (0.0212, 10**6, pytest.approx(1.06)),
        (0.0212, 5000, None),  # the sampling error of 5,000 values adds 4%
        (0.0188, 10**6, pytest.approx(0.94)),
        (0.0, 10**6, 0.0),
    ],
)
def test_scales_differ_by_more_than_five_percent_and_sampling_error(rms, elements, ratio):
    assert Scale(rms, elements).ratio(Scale(0.02, 10**6)) == ratio
    assert Scale(rms, 10**6).ratio(Scale(0.02, elements)) == ratio


def test_a_clause_names_role_and_both_scales():
    base = {"MLP": Scale(0.02, 10**6), "MLP output": Scale(0.01, 10**6), "head": Scale(0.02, 10**6)}
    own = {"MLP": Scale(0.02, 10**6), "MLP output": Scale(0.02, 10**6), "block": Scale(1.0, 10**6)}
    assert differing_scales(own, base) == [
        "MLP output weights start at 2 times the baseline's scale (root mean square 0.02 versus 0.01)"
    ]
    assert differing_scales({"MLP": Scale(0.02, 9)}, {"MLP": Scale(0.0, 9)}, "the table's") == [
        "MLP weights start at a scale above 0, unlike the table's (root mean square 0.02 versus 0)"
    ]
    assert differing_scales(own, own) == []
