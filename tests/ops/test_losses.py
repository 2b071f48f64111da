"""The two losses: exact to the plain form's rounding, and the chunked one without the logits of all tokens."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_llm.measure.meter import MemoryMeter
from lightning_llm.ops import sizes
from lightning_llm.ops.losses import cross_entropy, linear_cross_entropy

HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]
REDUCTIONS = ["mean", "sum", "none"]
SHAPES = [(5, 123, 77), (2, 9, 64, 200), (24, 16, 65)]  # (…, tokens, hidden, vocab)


def make_inputs(shape, dtype=torch.float64, *, ignored=True):
    """Hidden states, weight, bias, and targets of which some do not count."""
    torch.manual_seed(0)
    *leading, hidden, vocab = shape
    inputs = [torch.randn(s, dtype=torch.float64) for s in ((*leading, hidden), (vocab, hidden), (vocab,))]
    inputs[1] /= math.sqrt(hidden)
    targets = torch.randint(0, vocab, leading)
    if ignored and targets.numel() > 1:
        targets.view(-1)[1::3] = -100
    return [t.to(dtype).requires_grad_() for t in inputs], targets


def plain(hidden, weight, bias, targets, *, reduction="mean", z_loss=0.0, label_smoothing=0.0, token_weights=None):
    """In the logits' dtype, the loss in float32 at least, as Lightning and Hugging Face models do it."""
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counts = (targets.flatten() != -100) * (1.0 if token_weights is None else token_weights.flatten())
    losses = F.cross_entropy(logits, targets.flatten(), reduction="none", label_smoothing=label_smoothing)
    losses = (losses + z_loss * logits.logsumexp(-1).square()) * counts
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() / (counts.sum() if reduction == "mean" else 1)


def all_options(shape):
    """z-loss, label smoothing, and weights; of several, the first is 0."""
    token_weights = torch.rand(shape[:-2], generator=torch.Generator().manual_seed(2))
    if token_weights.numel() > 1:
        token_weights.view(-1)[0] = 0
    return {"z_loss": 0.1, "label_smoothing": 0.2, "token_weights": token_weights}


def ours(hidden, weight, bias, targets, **options):
    return linear_cross_entropy(hidden, weight, targets, bias=bias, **options)


def with_gradients(function, inputs, targets, dtype, autocast=None, factor=1.0, **options):
    inputs = [t.detach().to(dtype, copy=True).requires_grad_() for t in inputs]
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        loss = function(*inputs, targets, **options)
    torch.manual_seed(1)
    loss.backward(torch.rand(loss.shape, dtype=torch.float64).to(loss.dtype) * factor)
    return [loss.detach(), *(t.grad for t in inputs)]


def assert_as_good_as_plain(inputs, targets, dtype, autocast=None, num_chunks=None, factor=1.0, **options):
    is_sum = options.get("reduction") == "sum"
    rounded = [t.detach().to(dtype).double() for t in inputs]  # the truth starts from the same numbers
    truth = with_gradients(plain, rounded, targets, torch.float64, factor=factor, **options)
    got = with_gradients(ours, inputs, targets, dtype, autocast, factor, num_chunks=num_chunks, **options)
    reference = with_gradients(plain, inputs, targets, dtype, autocast, factor, **options)
    for mine, other, true in zip(got, reference, truth, strict=True):
        assert mine.dtype == other.dtype
        # twice the plain form's error, which may be small by luck, and one rounding of the result
        bound = 2 * (other.double() - true).norm() + torch.finfo(other.dtype).eps / 2 * true.norm()
        if true.dim() == 0:  # one number may be exact by luck: what its tokens' errors and one rounding allow
            options["reduction"] = "none"
            tokens = with_gradients(plain, inputs, targets, dtype, autocast, **options)[0].double()
            spread = tokens - with_gradients(plain, rounded, targets, torch.float64, **options)[0]
            counts = (targets != -100) * options.get("token_weights", torch.ones(()))
            bound = 2 * spread.norm() * counts.count_nonzero().sqrt() / (1 if is_sum else counts.sum())
            bound += torch.finfo(other.dtype).eps * true.abs()
        assert (mine.double() - true).norm() <= bound


@pytest.fixture(params=["one row at a time", "as it comes"])
def rows(request, monkeypatch):
    """Small shapes are one chunk, one group of rows, one block of the vocabulary. Or several of each."""
    if request.param == "one row at a time":
        monkeypatch.setattr(sizes, "CHUNK_BYTES", {"cpu": 1})
        monkeypatch.setattr(sizes, "SMALLEST_CHUNK", 2)
        monkeypatch.setattr(sizes, "VOCAB_BLOCK", {"cpu": 64})
        monkeypatch.setattr(sizes, "GROUP_BYTES", 1)
    return request.param


# The plain form -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7,), (4, 7), (2, 3, 4, 7)])
def test_plain_form_is_the_mean_over_all_leading_dimensions(shape):
    torch.manual_seed(0)
    logits, targets = torch.randn(shape, dtype=torch.float64, requires_grad=True), torch.randint(0, 7, shape[:-1])
    expected = F.cross_entropy(logits.view(-1, 7), targets.view(-1))
    torch.testing.assert_close(cross_entropy(logits, targets), expected)
    assert torch.autograd.gradcheck(lambda z: cross_entropy(z, targets), logits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_plain_form_is_stable(dtype, shift):
    torch.manual_seed(0)
    logits = (torch.randn(6, 9) * 1e4 + shift).to(dtype).requires_grad_()
    targets = torch.randint(0, 9, (6,))
    loss = cross_entropy(logits, targets)
    loss.backward()
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert logits.grad.isfinite().all()
    wide = logits.detach().double()
    torch.testing.assert_close(
        loss.double(), F.cross_entropy(wide, targets), rtol=torch.finfo(loss.dtype).eps * 4, atol=0
    )


# The chunked form -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_at_most_twice_the_plain_ones(reduction, shape, dtype, rows):
    assert_as_good_as_plain(*make_inputs(shape), dtype, reduction=reduction)
    assert_as_good_as_plain(*make_inputs(shape), dtype, reduction=reduction, **all_options(shape))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("autocast", HALVES)
def test_error_under_autocast(reduction, autocast, rows):
    assert_as_good_as_plain(*make_inputs((5, 123, 77)), torch.float32, autocast, reduction=reduction)


@pytest.mark.parametrize("num_chunks", [1, 2, 7, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_of_any_number_of_chunks(num_chunks, dtype):
    assert_as_good_as_plain(*make_inputs((40, 123, 77)), dtype, num_chunks=num_chunks)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_for_no_token_change_nothing(reduction, dtype, rows):
    """The loss and the other gradients bit for bit in float32; theirs are zero."""
    inputs, targets = make_inputs((5, 123, 77), dtype)
    padded = [inputs[0], *(F.pad(x.detach(), (0, 0) * (x.dim() - 1) + (0, 19), value=3.0) for x in inputs[1:])]
    options = {"reduction": reduction, **all_options((5, 123, 77))}
    expected = with_gradients(ours, inputs, targets, dtype, **options)
    loss, *gradients = with_gradients(ours, padded, targets, dtype, vocab_size=77, **options)
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if dtype == torch.float32 else {}
    torch.testing.assert_close(loss, expected[0], **tolerance)
    for got, true in zip(gradients, expected[1:], strict=True):
        torch.testing.assert_close(got[: len(true)], true, **tolerance)
        assert not got[len(true) :].any()
    with pytest.raises(ValueError, match="targets must be below the vocabulary 77"):
        ours(*padded, targets.clamp(min=77), vocab_size=77)


@pytest.mark.parametrize("wrong", [0, -1, 78])
def test_a_vocabulary_that_is_no_part_of_the_rows_is_rejected(wrong):
    inputs, targets = make_inputs((5, 123, 77))
    with pytest.raises(ValueError, match=f"vocab_size must be from 1 to the 77 rows of weight or None, got {wrong}"):
        ours(*inputs, targets, vocab_size=wrong)


def test_many_chunks_lose_no_bits_in_bf16():
    # the gradient of the weight is a sum of 512 terms: in bf16 it would have several times the plain one's error
    assert_as_good_as_plain(*make_inputs((512, 16, 8)), torch.bfloat16, num_chunks=512)


def test_small_gradients_survive_float16():
    # 4,096 tokens: each logit's gradient is below what float16 can hold until a loss scaler multiplies it
    inputs, targets = make_inputs((4096, 8, 500), ignored=False)
    inputs[1] = (inputs[1] * 1e-2).detach()
    assert_as_good_as_plain(inputs, targets, torch.float16, factor=2.0**14)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 4, 5)])
def test_gradients_by_finite_differences(reduction, shape, rows):
    inputs, targets = make_inputs(shape)

    def function(hidden, weight, bias):
        return ours(hidden, weight, bias, targets, reduction=reduction, **all_options(shape))

    torch.testing.assert_close(
        function(*inputs), plain(*inputs, targets, reduction=reduction, **all_options(shape)), rtol=1e-13, atol=0
    )
    assert torch.autograd.gradcheck(function, inputs)


def test_stable_at_large_logits(rows):
    torch.manual_seed(0)
    hidden = torch.randn(6, 8).mul(1e3).requires_grad_()
    weight, targets = torch.randn(9, 8, requires_grad=True), torch.randint(0, 9, (6,))
    assert F.linear(hidden, weight).abs().max() > 5e3
    loss = linear_cross_entropy(hidden, weight, targets, bias=torch.full((9,), 1e4))
    loss.backward()
    torch.testing.assert_close(loss, cross_entropy(F.linear(hidden, weight), targets))
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()


def test_ignored_targets_do_not_count(rows):
    (hidden, weight, bias), targets = make_inputs((3, 5, 7))
    targets = torch.tensor([2, 6, 2])
    loss = ours(hidden, weight, bias, targets, ignore_index=2)
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(hidden, weight, bias), targets, ignore_index=2))
    assert (torch.autograd.grad(loss, hidden)[0].abs().sum(-1) > 0).tolist() == [False, True, False]
    hidden.data[0] = math.nan  # padding may hold anything
    assert ours(hidden, weight, bias, targets, ignore_index=2, reduction="none")[[0, 2]].tolist() == [0, 0]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("by", ["target", "weight"])
def test_no_target_counts(reduction, by):
    (hidden, weight, bias), targets = make_inputs((3, 5, 7))
    options = {"token_weights": torch.zeros(3)} if by == "weight" else {}
    targets = targets if by == "weight" else torch.full_like(targets, -100)
    loss = ours(hidden, weight, bias, targets, reduction=reduction, **options)
    loss.backward()
    assert loss.item() == 0
    assert all(t.grad.abs().max() == 0 for t in (hidden, weight, bias))


@pytest.mark.parametrize("shape", [(0, 5, 7), (3, 0, 7), (2, 0, 5, 7)])
def test_empty_shapes(shape):
    inputs, targets = make_inputs(shape)
    for reduction in REDUCTIONS:
        loss = ours(*inputs, targets, reduction=reduction)
        torch.testing.assert_close(loss, plain(*inputs, targets, reduction=reduction).nan_to_num())
        loss.sum().backward()
        assert all(t.grad.shape == t.shape and t.grad.isfinite().all() for t in inputs)


# What is saved, how it may be used ------------------------------------------------------------------------------------

VOCAB, HIDDEN = 1000, 32


def meter_of(tokens, dtype=torch.float32, *, grad=True, **options):
    inputs, targets = make_inputs((tokens, HIDDEN, VOCAB), dtype)
    with MemoryMeter([*inputs, targets]) as meter, torch.set_grad_enabled(grad):
        loss = ours(*inputs, targets, num_chunks=tokens // 64, **options)
        saved = meter.live_bytes
        if grad:
            loss.backward()
    return meter.peak_bytes, saved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_all_tokens_never_exist(dtype):
    short, long = meter_of(512, dtype)[0], meter_of(1024, dtype)[0]
    assert long - short < 512 * VOCAB * dtype.itemsize / 10  # the gradient of hidden, and numbers per token
    gradients = (VOCAB * HIDDEN + VOCAB) * 4 + 512 * HIDDEN * 4
    chunk = 64 * VOCAB * dtype.itemsize
    group = 0 if dtype == torch.float32 else 64 * VOCAB * 4
    assert short < 1.1 * (gradients + chunk + group) + (VOCAB * HIDDEN * dtype.itemsize if group else 0)
    options = all_options((512, HIDDEN, VOCAB))
    assert meter_of(512, dtype, **options)[0] - short < 512 * 16  # the weights, and numbers per token


def test_backward_makes_no_second_copy_of_the_gradients():
    (hidden, weight, _), targets = make_inputs((512, HIDDEN, VOCAB), torch.float32)
    for factor in (1, 3):
        hidden.grad = weight.grad = None
        loss = linear_cross_entropy(hidden, weight, targets) * factor
        with MemoryMeter() as meter:
            loss.backward()
        assert meter.peak_bytes < 100  # scalars
        truth = torch.autograd.grad(plain(hidden, weight, None, targets) * factor, (hidden, weight))
        torch.testing.assert_close([hidden.grad, weight.grad], list(truth))


def test_without_gradients_there_is_no_work_for_them():
    peak, saved = meter_of(512, grad=False)
    assert saved <= 4  # the loss
    assert peak < 64 * VOCAB * 4 + 512 * 64
    (hidden, weight, bias), targets = make_inputs((4, 5, 7))
    with torch.inference_mode():
        loss = ours(hidden, weight, bias, targets)
    torch.testing.assert_close(loss, plain(hidden, weight, bias, targets))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_frozen_inputs_get_no_gradient(reduction, wanted):
    inputs, targets = make_inputs((4, 5, 7))
    expected = torch.autograd.grad(ours(*inputs, targets, reduction=reduction).sum(), inputs)
    some = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(inputs)]
    ours(*some, targets, reduction=reduction).sum().backward()
    assert [t.grad is not None for t in some] == [i == wanted for i in range(3)]
    torch.testing.assert_close(some[wanted].grad, expected[wanted])
    without_bias = linear_cross_entropy(*inputs[:2], targets, reduction=reduction)
    torch.testing.assert_close(without_bias, plain(*inputs[:2], None, targets, reduction=reduction))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_backward_can_be_repeated(reduction):
    inputs, targets = make_inputs((40, 5, 7), torch.float32)
    loss = ours(*inputs, targets, reduction=reduction).sum() * 3
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    copies = [g.clone() for g in first]
    second = torch.autograd.grad(loss, inputs)
    assert all(torch.equal(a, b) for a, b in zip(copies, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(copies, first, strict=True))  # the first ones are the caller's now


def test_gradients_add_up_over_backwards_and_uses():
    inputs, targets = make_inputs((4, 7, 7))
    hidden, weight, _ = inputs
    tied = linear_cross_entropy(F.embedding(targets.clamp(min=0), weight) + hidden, weight, targets)
    truth = plain(F.embedding(targets.clamp(min=0), weight) + hidden, weight, None, targets)
    torch.testing.assert_close(torch.autograd.grad(tied, weight), torch.autograd.grad(truth, weight))
    for _ in range(2):
        (ours(*inputs, targets) / 2).backward()
    torch.testing.assert_close([t.grad for t in inputs], list(torch.autograd.grad(plain(*inputs, targets), inputs)))


def test_tensors_need_not_be_contiguous():
    inputs, targets = make_inputs((4, 6, 5, 7))
    hidden, weight, bias = inputs
    strided = (hidden.transpose(0, 1), weight.t().contiguous().t(), bias, targets.t())
    torch.testing.assert_close(ours(*strided), plain(*inputs, targets))
    torch.testing.assert_close(
        torch.autograd.grad(ours(*strided), inputs), torch.autograd.grad(plain(*inputs, targets), inputs)
    )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_under_activation_checkpointing(reentrant, reduction):
    inputs, targets = make_inputs((4, 5, 7))
    expected = torch.autograd.grad(ours(*inputs, targets, reduction=reduction).sum(), inputs)
    function = lambda *tensors: ours(*tensors, reduction=reduction)  # noqa: E731
    checkpoint(function, *inputs, targets, use_reentrant=reentrant).sum().backward()
    assert all(torch.equal(t.grad, e) for t, e in zip(inputs, expected, strict=True))


@pytest.mark.parametrize(("reduction", "dtype"), [("mean", torch.float32), ("none", torch.float16)])
def test_compiled_in_one_graph(reduction, dtype):
    torch.compiler.reset()
    inputs, targets = make_inputs((5, 12, 7), dtype)
    options = all_options((5, 12, 7))

    def function(*tensors):
        return ours(*tensors, targets, reduction=reduction, **options) * 2

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), function(*inputs))
    gradients = [torch.autograd.grad(f(*inputs).sum(), inputs) for f in (compiled, function)]
    torch.testing.assert_close(*gradients)
    frozen = [t.detach().requires_grad_(i == 1) for i, t in enumerate(inputs)]
    compiled(*frozen).sum().backward()
    torch.testing.assert_close(frozen[1].grad, gradients[1][1])
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), function(*inputs))


def test_what_it_cannot_do_is_said():
    inputs, targets = make_inputs((4, 5, 7))
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(ours(*inputs, targets), inputs, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"linear_cross_entropy does not work .*torch\.func"):
        torch.func.grad(lambda h: ours(h, *inputs[1:], targets))(inputs[0])


# Bad input ------------------------------------------------------------------------------------------------------------


def call(changes=(), options=()):
    tensors = {"hidden": torch.randn(5, 12), "weight": torch.randn(7, 12), "targets": torch.randint(0, 7, (5,))}
    return linear_cross_entropy(**{**tensors, **dict(changes)}, **dict(options))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {"weight": torch.randn(7, 11)},
            {},
            r"weight must have shape \(7, 12\) .*hidden of shape \(5, 12\), got \(7, 11\)",
        ),
        ({"weight": torch.randn(7)}, {}, r"weight must be \(vocab, hidden\) .*got \(7,\) for hidden \(5, 12\)"),
        ({"hidden": torch.randn(())}, {}, r"hidden \(\)"),
        ({"targets": torch.zeros(4, dtype=torch.long)}, {}, r"targets must have shape \(5,\) .*\(5, 12\), got \(4,\)"),
        ({"targets": torch.zeros(5)}, {}, r"targets must be token ids of an integer dtype, got torch.float32 \(5,\)"),
        ({"targets": torch.full((5,), 7)}, {}, "targets must be below the vocabulary 7 or ignore_index -100, got 7"),
        ({"targets": torch.full((5,), -1)}, {}, "targets must be below the vocabulary 7 or ignore_index -100, got -1"),
        ({"bias": torch.randn(8)}, {}, r"bias must have shape \(7,\) .*got \(8,\)"),
        (
            {"weight": torch.randn(7, 12).double()},
            {},
            r"weight \(7, 12\) is torch.float64, hidden \(5, 12\) torch.float32",
        ),
        ({"weight": torch.randn(7, 12, device="meta")}, {}, r"weight \(7, 12\) is on meta, hidden \(5, 12\) on cpu"),
        ({"targets": torch.zeros(5, dtype=torch.long, device="meta")}, {}, "targets are on meta, .* on cpu"),
        ({}, {"num_chunks": 0}, "num_chunks must be a whole number from 1 to 5 .*got 0"),
        ({}, {"num_chunks": 6}, "num_chunks must be a whole number from 1 to 5 .*got 6"),
        ({}, {"reduction": "max"}, "reduction must be one of mean, sum, none, got 'max'"),
        ({}, {"z_loss": -1.0}, "z_loss must be at least 0, got -1.0"),
        ({}, {"label_smoothing": 1.0}, "label_smoothing must be at least 0 and below 1, got 1.0"),
        ({}, {"token_weights": torch.ones(4)}, r"token_weights must be real .* shape \(5,\), got torch.float32 \(4,\)"),
        ({}, {"token_weights": torch.ones(5).cfloat()}, r"must be real .* got torch.complex64 \(5,\)"),
        ({}, {"token_weights": torch.ones(5, device="meta")}, "token_weights are on meta, targets on cpu"),
        ({}, {"token_weights": torch.ones(5).requires_grad_()}, "token_weights get no gradient, .* detach them"),
        ({}, {"token_weights": torch.tensor([1, 1, -2, 1, 1])}, "token_weights must be at least 0, got -2"),
        ({}, {"token_weights": torch.full((5,), math.nan)}, "token_weights must be at least 0, got nan"),
    ],
)
def test_bad_input(changes, options, message):
    call()  # good as it stands
    with pytest.raises(ValueError, match=message) as error:
        call(changes, options)
    assert "\n" not in str(error.value)


def test_bad_input_of_the_plain_form():
    with pytest.raises(ValueError, match=r"targets must have shape \(5,\) for logits of shape \(5, 7\), got \(4,\)"):
        cross_entropy(torch.randn(5, 7), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match="targets must be below the vocabulary 7, got 9"):
        cross_entropy(torch.randn(5, 7), torch.full((5,), 9))


@pytest.mark.parametrize("tokens", [0, 7])
def test_the_sum_of_the_heads_gradient_begins_with_the_first_chunk(tokens):
    """New memory is filled with NaN; without tokens the gradient is 0."""
    inputs, targets = make_inputs((7, 5, 11))
    hidden, weight = inputs[0][:tokens].detach().requires_grad_(), inputs[1]
    torch.use_deterministic_algorithms(True)
    try:
        gradients = torch.autograd.grad(
            linear_cross_entropy(hidden, weight, targets[:tokens], num_chunks=max(1, tokens // 2)), (hidden, weight)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert bool(gradients[1].any()) is bool(tokens)
