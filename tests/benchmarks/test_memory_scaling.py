"""Peak memory of the MLP against tokens, on toy shapes."""

import json

import pytest

from benchmarks.__main__ import main
from lightning_llm.ops import sizes


@pytest.mark.slow
def test_peak_of_the_tiled_op_grows_by_what_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "TILE_BYTES", {"cpu": 256 * 64 * 4})
    monkeypatch.setattr(sizes, "LONGEST_BLOCK", 256)
    path = tmp_path / "rows.json"
    shapes = ["1x512x32x512x1", "1x1024x32x512x1"]
    assert main(["memory-scaling", "--shapes", *shapes, "--json", str(path)]) == 0
    assert path.with_suffix(".png").stat().st_size > 5000
    peaks = {(row["variant"], row["shape"]): row["peak_bytes"] for row in json.loads(path.read_text())["rows"]}
    growth = {name: peaks[name, shapes[1]] - peaks[name, shapes[0]] for name, _ in peaks}
    assert growth["ours 1"] == 512 * 2 * 32 * 4  # the output, and the gradient of the input
    assert growth["standard"] >= 512 * 4 * 512 * 4
