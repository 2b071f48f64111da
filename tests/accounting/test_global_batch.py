"""How a global batch is divided."""

import pytest

from lightning_llm.accounting.global_batch import rows_per_micro_batch


@pytest.mark.parametrize(
    ("size", "micro", "devices", "rows"), [(8, None, 1, 8), (8, None, 2, 4), (8, 2, 2, 2), (8, 8, 1, 8)]
)
def test_rows_of_a_micro_batch(size, micro, devices, rows):
    assert rows_per_micro_batch(size, micro, devices) == rows


@pytest.mark.parametrize(
    ("size", "micro", "devices", "by"),
    [
        (8, None, 3, "3 devices"),
        (2, None, 3, "3 devices"),
        (8, 3, 1, "1 device times data.micro_batch_size 3"),
        (8, 8, 2, "2 devices times data.micro_batch_size 8"),
        (8, -1, 1, "1 device times data.micro_batch_size -1"),
    ],
)
def test_a_batch_that_cannot_be_divided(size, micro, devices, by):
    with pytest.raises(ValueError, match=f"^data.global_batch_size {size} cannot be divided by {by}: change one$"):
        rows_per_micro_batch(size, micro, devices)
