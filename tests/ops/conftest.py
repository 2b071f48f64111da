import pytest

from lightning_llm.ops import sizes


@pytest.fixture(params=["blocks", "at once"])
def blocks(request, monkeypatch):
    """Several blocks of queries, heads and rows; or all at once, as such small shapes are."""
    if request.param == "blocks":
        monkeypatch.setattr(sizes, "ATTENTION_ROWS", 30)
        monkeypatch.setattr(sizes, "ATTENTION_BYTES", 30 * 77 * 8)
        monkeypatch.setattr(sizes, "NORM_BYTES", {"cpu": 2000})
