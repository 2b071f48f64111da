"""Attention within spans against float64, and its memory by the meter."""

import itertools

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lightning_llm.measure import MemoryMeter
from lightning_llm.ops import sizes
from lightning_llm.ops.span_attention import (
    AttentionSpans,
    dense_mask,
    span_attention,
    spans_of_documents,
    with_flex_blocks,
)
from tests.conftest import needs_cuda
from tests.ops.judged import assert_as_good_as_plain

DOCUMENTS = {  # of two rows: lengths in order
    77: ([5, 1, 40, 31], [77]),
    300: ([130, 7, 163], [1, 1, 298]),
    5: ([2, 3], [1, 4]),
    512: ([256, 256], [100, 412]),
}
WINDOWS = [(5, None), (77, None), (300, None), (300, 40), (77, 1)]  # lengths of sequences and windows


def numbered(lengths):
    """(rows, seq): the number of each token's document; a number may come again, but not next to itself."""
    return torch.stack([torch.cat([torch.full((n,), place % 2) for place, n in enumerate(row)]) for row in lengths])


def plain_mask(documents, window):
    """(batch, 1, seq, seq), from the definition: the same document, not later, and inside the window."""
    seq = documents.shape[1]
    distance = torch.arange(seq)[:, None] - torch.arange(seq)
    seen = (distance >= 0) & (distance < (window or seq))
    # documents with equal numbers are not neighbors: no change of numbers between query and key
    changes = (documents != documents.roll(1, dims=1))[:, 1:].cumsum(1)
    changes = F.pad(changes, (1, 0)).cpu()
    seen = seen & (changes[:, :, None] == changes[:, None])
    return torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[:, None].to(documents.device)


def plain(query, key, value, mask):
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    return (query @ key.mT * query.shape[-1] ** -0.5 + mask.to(query.dtype)).softmax(-1) @ value


def inputs_of(shape, seq, device="cpu"):
    heads, kv_heads, head_dim = shape
    torch.manual_seed(0)
    parts = [torch.randn(2, seq, n, head_dim, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]
    return [x.to(device).transpose(1, 2) for x in parts]  # strided, as a model's


def spans_in(documents, window):
    """Those of a window that ends at the documents' first tokens."""
    spans = spans_of_documents(documents)
    first = torch.arange(documents.shape[1], device=documents.device) - ((window or documents.shape[1]) - 1)
    return AttentionSpans(torch.maximum(spans.start, first))


def assert_as_good(inputs, documents, dtype, window=None):
    spans, mask = spans_in(documents, window), plain_mask(documents, window)
    assert torch.equal(dense_mask(spans, torch.float32), mask)
    spans = with_flex_blocks(spans) if documents.is_cuda else spans
    ours, theirs = (lambda *x: span_attention(*x, spans)), (lambda *x: plain(*x, mask))
    assert_as_good_as_plain(ours, theirs, inputs, dtype)


@pytest.fixture(params=["blocks", "at once"])
def blocks(request, monkeypatch):
    """Several blocks of queries, heads and rows; or as few as such small shapes have."""
    if request.param == "blocks":
        monkeypatch.setattr(sizes, "ATTENTION_ROWS", 30)
        monkeypatch.setattr(sizes, "ATTENTION_BYTES", 30 * 77 * 8)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 2, 32), (3, 3, 10), (1, 1, 5)])
@pytest.mark.parametrize(("seq", "window"), WINDOWS)
def test_blocks_of_queries(dtype, shape, seq, window):
    assert_as_good(inputs_of(shape, seq), numbered(DOCUMENTS[seq]), dtype, window)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 2, 32), (2, 2, 64)])
@pytest.mark.parametrize(("seq", "window"), WINDOWS[1:4])
def test_flex_attention(device, dtype, shape, seq, window):
    assert_as_good(inputs_of(shape, seq, device), numbered(DOCUMENTS[seq]).to(device), dtype, window)


def test_gradients_by_finite_differences():
    spans = spans_of_documents(numbered(([3, 4], [1, 6])))
    inputs = [x[:, :, :7].contiguous().requires_grad_() for x in inputs_of((4, 2, 3), 7)]
    assert torch.autograd.gradcheck(lambda *x: span_attention(*x, spans), inputs)


@pytest.mark.usefixtures("blocks")
def test_each_document_has_the_numbers_it_has_alone():
    """To the last bits of float64: blocks are cut elsewhere in a packed row."""
    inputs = [x.detach().requires_grad_() for x in inputs_of((4, 2, 16), 300)]
    spans = spans_of_documents(numbered(DOCUMENTS[300]))
    packed = span_attention(*inputs, spans)
    dy = torch.randn_like(packed)
    together = torch.autograd.grad(packed, inputs, dy)
    for row, row_lengths in enumerate(DOCUMENTS[300]):
        for start, end in itertools.pairwise(itertools.accumulate(row_lengths, initial=0)):
            own = [x[row : row + 1, :, start:end].detach().requires_grad_() for x in inputs]
            alone = F.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True)
            torch.testing.assert_close(packed[row : row + 1, :, start:end], alone)
            gradients = torch.autograd.grad(alone, own, dy[row : row + 1, :, start:end])
            for got, true in zip(together, gradients, strict=True):
                torch.testing.assert_close(got[row : row + 1, :, start:end], true)


@pytest.mark.parametrize(("seq", "window"), [(5, None), (300, None), (512, None), (512, 300), (512, 60)])
def test_flex_attention_visits_the_blocks_with_visible_keys(seq, window):
    """Against all pairs of positions: a block is listed if one of its pairs is visible, as full if all of them are."""
    documents = numbered(DOCUMENTS[seq])
    spans = with_flex_blocks(spans_in(documents, window))
    visible = plain_mask(documents, window) == 0
    count = -(-seq // 128)
    padded = F.pad(visible, (0, 128 * count - seq, 0, 128 * count - seq)).view(2, 1, count, 128, count, 128)
    whole = torch.ones(seq, seq, dtype=torch.bool)
    inside = F.pad(whole, (0, 128 * count - seq, 0, 128 * count - seq)).view(count, 128, count, 128)
    some, every = padded.any(5).any(3), (padded | ~inside).all(5).all(3)
    blocks = spans.blocks
    listed = torch.zeros(2, count, count, dtype=torch.int)
    for numbers, indices, value in (
        (blocks.kv_num_blocks, blocks.kv_indices, 1),
        (blocks.full_kv_num_blocks, blocks.full_kv_indices, 2),
    ):
        for row in range(2):
            for place in range(count):
                listed[row, place, indices[row, 0, place, : numbers[row, 0, place]]] += value
    assert torch.equal(listed, some[:, 0].int() + (some & every)[:, 0].int())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_the_same(monkeypatch):
    """Forward only, in its plain form: it has no backward on a CPU."""
    monkeypatch.setattr("lightning_llm.ops.span_attention._compiled", lambda function: function)
    spans = spans_in(numbered(DOCUMENTS[300]), 150)
    inputs = inputs_of((4, 2, 16), 300)
    with torch.no_grad():
        torch.testing.assert_close(span_attention(*inputs, with_flex_blocks(spans)), span_attention(*inputs, spans))


@pytest.mark.parametrize("lengths", ["one document", "many documents"])
def test_memory_grows_with_the_sequence_and_not_with_its_square(lengths):
    peaks = []
    for seq in (2048, 4096, 8192):
        inputs = [torch.randn(1, 1, seq, 4, requires_grad=True) for _ in range(3)]
        documents = torch.arange(seq)[None] // (seq if lengths == "one document" else 500)
        with MemoryMeter(exclude=[*inputs, documents]) as meter:
            span_attention(*inputs, spans_of_documents(documents)).sum().backward()
        peaks.append(meter.peak_bytes)
    assert peaks[1] <= 2.01 * peaks[0]
    assert peaks[2] <= 2.01 * peaks[1]


@pytest.mark.parametrize("kind", ["documents", "windows"])
def test_keys_before_a_span_cost_nothing(kind):
    """The work grows with the sequence where spans do not, and not with its square."""
    work = []
    for seq in (1024, 2048):
        inputs = [torch.randn(1, 1, seq, 4, requires_grad=True) for _ in range(3)]
        documents = torch.arange(seq)[None] // (128 if kind == "documents" else seq)
        spans = spans_in(documents, 128 if kind == "windows" else None)
        with FlopCounterMode(display=False) as counter:
            span_attention(*inputs, spans).sum().backward()
        work.append(counter.get_total_flops())
    matmuls, keys = 7, 128 if kind == "documents" else 256  # in a window, the block and as many keys before it
    assert 0 < work[1] <= matmuls * 2 * 4 * 2048 * keys
    assert work[1] <= 2.1 * work[0]
