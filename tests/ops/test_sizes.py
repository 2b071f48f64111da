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


@pytest.mark.parametrize(
    ("device", "itemsize", "head_dim", "seq", "options", "expected"),
    [
        ("cpu", 4, 64, 512, {}, "short"),
        ("cpu", 4, 64, 513, {}, "fused"),
        ("cpu", 4, 64, 512, {"training": False}, "fused"),
        ("cpu", 4, 64, 512, {"mask": "dense"}, "fused"),
        ("cpu", 4, 64, 512, {"dropout": 0.1}, "math"),
        ("cpu", 2, 64, 512, {"mask": "spans"}, "spans"),
        ("cuda", 2, 64, 512, {}, "fused"),
        ("cuda", 2, 10, 512, {"dropout": 0.1}, "fused"),  # torch pads a head of 10 to 16
        ("cuda", 2, 64, 512, {"mask": "dense"}, "efficient"),
        ("cuda", 2, 264, 512, {}, "efficient"),
        ("cuda", 4, 64, 512, {}, "efficient"),
        ("cuda", 4, 10, 512, {}, "math"),
        ("cuda", 8, 64, 512, {}, "math"),
        ("cuda", 4, 64, 512, {"mask": "spans"}, "flex"),
        ("cuda", 4, 8, 512, {"mask": "spans"}, "spans"),
        ("cuda", 8, 64, 512, {"mask": "spans"}, "spans"),
        ("mps", 4, 64, 512, {}, "math"),
        ("mps", 4, 64, 512, {"mask": "spans"}, "spans"),
    ],
)
def test_which_attention_runs(device, itemsize, head_dim, seq, options, expected):
    options = {"mask": "causal", "dropout": 0.0, **options}
    assert sizes.attention_form(device, itemsize, head_dim, seq, **options) == expected


@pytest.mark.parametrize(
    ("tokens", "width", "itemsize", "device", "rows"),
    [
        (32768, 2048, 2, "cuda", 32768),  # 128 MiB hold all of it
        (32768, 2048, 4, "cuda", 16384),
        (32768, 16384, 2, "cuda", 8192),  # a wide layer has no larger tiles than others
        (32768, 2048, 2, "cpu", 2048),
    ],
)
def test_a_tile_of_backward_has_more_tokens_where_the_whole_width_fits(tokens, width, itemsize, device, rows):
    assert sizes.backward_rows(tokens, width, itemsize, device, 4) == rows
