"""How operators cut their work."""

import pytest

from lightning_llm.ops import sizes


@pytest.mark.parametrize("width", [1, 2, 3, 5, 64, 77, 257, 1025, 4096])
def test_no_chunk_is_a_single_column_of_several(width):
    """Which torch 2.9 and 2.10 multiply wrongly in bf16 on a CPU."""
    for num_chunks in (None, *range(1, width + 1)):
        columns = sizes.chunk_columns(4096, width, 2, "cpu", num_chunks)
        assert min(2, width) <= columns <= width
        assert width == 1 or width % columns != 1
        assert num_chunks is None or -(-width // columns) <= num_chunks
