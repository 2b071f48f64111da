"""Sizes and times in words."""

import pytest

from lightning_llm.io.units import (
    byte_size,
    decimal_size,
    duration,
    four_digits,
    short_mib,
    shown_duration,
    shown_mib,
    shown_size,
)


@pytest.mark.parametrize(
    ("seconds", "words"), [(1e-5, "0.01 ms"), (0.9999, "1000 ms"), (1.0, "1.0 s"), (7201, "2.0 hours")]
)
def test_durations_have_their_unit(seconds, words):
    assert shown_duration(seconds) == words


def test_a_rounded_number_is_what_its_text_says():
    assert [four_digits(value) for value in (0.00123456, 12344.9, -2.0)] == [0.001235, 12340.0, -2.0]


def test_sizes_are_read_with_their_unit_and_shown_in_one_that_suits_them():
    assert byte_size("1.5 KB") == 1500
    assert byte_size("2GiB") == 2**31
    with pytest.raises(ValueError, match="'80Gigs' is not a size: give a number with one of B, KB"):
        byte_size("80Gigs")
    assert [shown_size(size) for size in (2**19, -(2**31))] == ["0.50 MiB", "-2.00 GiB"]
    assert shown_mib(2**31) == "2,048.00 MiB"
    assert [decimal_size(size) for size in (3e5, 2e9)] == ["0.3 MB", "2.0 GB"]
    assert [short_mib(size) for size in (0, 12.34 * 2**20, 2**10)] == ["", "12.3", "0.0010"]


def test_times_are_read_with_their_unit():
    assert [duration(text, "--budget") for text in ("90s", "30m", "1.5h", "2d")] == [90, 1800, 5400, 172_800]
    for text in ("30", "0m", "-1h", "5 weeks", "", "1e3s"):
        with pytest.raises(ValueError, match=r"--budget '.*' is no time: give a number above 0 with s, m, h, or d"):
            duration(text, "--budget")
