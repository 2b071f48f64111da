import os
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_llm.data.batches import (
    IGNORED,
    Share,
    TrainBatches,
    WindowReader,
    evenly_spaced,
    every_target_once,
    prompt_batches,
)
from lightning_llm.data.mixture import MixtureReader
from lightning_llm.data.order import WindowOrder
from lightning_llm.data.token_store import Split, TokenStore
from lightning_llm.data.tokenizers import Tokenizer


def reader_of(file, context_length, vocab_size=1 << 16):
    split = Split(tokens=file.stat().st_size // 2, bytes=0, documents=0, sha256="")
    store = TokenStore(file.parent, vocab_size, "uint16", {file.stem: split}, None, {})
    return WindowReader(store, file.stem, context_length)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Token files by length: token n is n."""
    folder = tmp_path_factory.mktemp("tokens")

    def make(length, context_length):
        file = folder / f"{length}.bin"
        if not file.exists():
            np.arange(length, dtype="<u2").tofile(file)
        return reader_of(file, context_length)

    return make


def train_batches(reader, global_batch_size, micro_batch_size, rank=0, world_size=1, position=0, length=20, **options):
    order = WindowOrder(num_tokens=len(reader.tokens), context_length=reader.context_length, seed=3)
    return TrainBatches(
        reader, order.starts, global_batch_size=global_batch_size, micro_batch_size=micro_batch_size,
        share=Share(rank, world_size), length=length, position=lambda: position, **options
    )  # fmt: skip


def rows(batches):
    return torch.cat([batch["input_ids"][:, 0] for batch in batches])


def test_batch_is_of_windows_with_the_next_token_as_target(files):
    batch = files(1000, 7)(np.array([0, 500, 992]))
    assert batch["input_ids"].dtype == batch["targets"].dtype == torch.int64
    assert batch["input_ids"].tolist() == [list(range(start, start + 7)) for start in (0, 500, 992)]
    assert torch.equal(batch["targets"], batch["input_ids"] + 1)
    assert batch["input_ids"].is_contiguous()
    assert batch["targets"].is_contiguous()


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(30, 300), st.integers(1, 9), st.integers(0, 5)
)
def test_step_does_not_depend_on_how_it_is_divided(files, micro, world_size, accumulation, length, context, first):
    reader = files(length, context)
    whole = micro * world_size * accumulation
    alone = list(train_batches(reader, whole, whole, position=first, length=3))
    ranks = [
        list(train_batches(reader, whole, micro, rank, world_size, position=first, length=3 * accumulation))
        for rank in range(world_size)
    ]
    together = [batch["input_ids"] for batches in zip(*ranks, strict=True) for batch in batches]
    assert torch.equal(torch.cat(together), torch.cat([batch["input_ids"] for batch in alone]))


def test_position_is_where_it_begins(files):
    reader = files(1000, 7)
    everything = rows(train_batches(reader, 8, 4, length=20))
    assert torch.equal(rows(train_batches(reader, 8, 4, position=3, length=14)), everything[3 * 8 :])


def test_position_is_asked_when_iteration_begins(files):
    batches = train_batches(files(1000, 7), 8, 4)
    place = [0]
    batches.position = lambda: place[0]
    iterator = iter(batches)
    place[0] = 2
    assert torch.equal(next(iterator)["input_ids"], batches[4]["input_ids"])


def test_order_blocks_do_not_show(files, monkeypatch):
    reader = files(1000, 7)
    expected = rows(train_batches(reader, 8, 8, length=50))
    for at_once in (1, 8, 17, 24, 100000):
        monkeypatch.setattr("lightning_llm.data.batches._SEQUENCES_ORDERED_AT_ONCE", at_once)
        assert torch.equal(rows(train_batches(reader, 8, 8, length=50)), expected)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_give_the_same_batches(files):
    reader = files(1000, 7)
    expected = rows(train_batches(reader, 8, 4, position=2, length=11))
    assert torch.equal(rows(train_batches(reader, 8, 4, position=2, length=11, workers=2)), expected)


def test_batches_reach_workers_without_the_tokens(files):
    batches = train_batches(files(60000, 7), 8, 4)
    first = batches[0]["input_ids"]
    content = pickle.dumps(batches)
    assert len(content) < 60000  # not the 120,000 bytes of tokens
    assert torch.equal(pickle.loads(content)[0]["input_ids"], first)


def test_repeated_batches(files):
    batches = rows(train_batches(files(1000, 7), 8, 4, length=6, repeat=4, position=5)).reshape(6, 4)
    assert torch.equal(batches[:2], batches[4:])
    assert torch.equal(batches[0], train_batches(files(1000, 7), 8, 4)[0]["input_ids"][:, 0])
    assert len({tuple(batch.tolist()) for batch in batches}) == 4


def test_length_and_state(files):
    batches = train_batches(files(1000, 7), 8, 4, length=17, position=4)
    assert len(batches) == 17
    assert batches.state_dict() == {}
    batches.load_state_dict({})


def test_id_outside_the_vocabulary_is_named_not_passed_on(files, tmp_path):
    file = tmp_path / "tokens.bin"
    np.array([1, 2, 50, 3], dtype="<u2").tofile(file)
    reader = reader_of(file, 2, vocab_size=50)
    with pytest.raises(ValueError, match=f"{file} has token id 50, but vocab_size is 50"):
        reader(np.array([0]))
    with pytest.raises(ValueError, match="has token id 50"):
        reader.tail(1)


@given(st.integers(2, 200), st.integers(1, 20), st.integers(1, 8), st.integers(1, 5))
def test_every_target_is_scored_once(files, length, context, batch_size, world_size):
    length = max(length, context + 1)
    reader = files(length, context)
    shares = [every_target_once(reader, batch_size, Share(rank, world_size)) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1  # equally many forward passes
    targets = []
    for share in shares:
        batches = list(share)
        assert len(batches) == len(share)
        for batch in batches:
            assert 1 <= len(batch["input_ids"]) <= batch_size
            kept = batch["targets"] != IGNORED
            assert kept.all() or not kept.any()
            assert torch.equal(batch["targets"][kept], batch["input_ids"][kept] + 1)
            targets += batch["targets"][kept].tolist()
    assert sorted(targets) == list(range(1, length))
    ignored = sum(int((batch["targets"] == IGNORED).any()) for share in shares for batch in share)
    assert ignored < world_size


@given(st.integers(2, 200), st.integers(2, 500), st.integers(1, 20), st.integers(1, 8), st.integers(1, 5))
def test_estimate_has_as_many_batches_spread_evenly(files, length, other, context, batch_size, world_size):
    reader, like = files(max(length, context + 1), context), files(max(other, context + 1), context)
    count = every_target_once(like, batch_size, Share()).rows
    shares = [evenly_spaced(reader, count, Share(rank, world_size)) for rank in range(world_size)]
    assert [len(share) for share in shares] == [
        len(every_target_once(like, batch_size, Share(rank, world_size))) for rank in range(world_size)
    ]
    batches = [batch for share in shares for batch in share if (batch["targets"] != IGNORED).all()]
    assert sorted(len(batch["targets"]) for batch in batches) == sorted(count)
    assert all(batch["targets"].shape[1] == context for batch in batches)
    starts = sorted(rows(batches).tolist())
    assert starts[0] == 0
    if len(starts) > 1:
        assert starts[-1] == len(reader.tokens) - 1 - context
        gaps = np.diff(starts)
        assert gaps.max() - gaps.min() <= 1


def test_estimate_of_no_batches(files):
    assert list(evenly_spaced(files(100, 7), [], Share())) == []


def test_prompts_are_rows_of_their_own():
    tokenizer = Tokenizer.train_bpe(["some text"], 270)
    batches = list(prompt_batches(tokenizer, ["some", "text text", ""]))
    assert [batch["prompt"] for batch in batches] == ["some", "text text", ""]
    assert [batch["input_ids"].tolist() for batch in batches] == [
        [tokenizer.encode("some")], [tokenizer.encode("text text")], [[tokenizer.eos_token_id]]
    ]  # fmt: skip
    assert len(prompt_batches(tokenizer, ["a"])) == 1


def test_prompt_that_cannot_be_encoded():
    tokenizer = Tokenizer.train_char(["some text"])
    with pytest.raises(ValueError, match="character 'X'"):
        prompt_batches(tokenizer, ["some teXt"])
    with pytest.raises(ValueError, match="an empty prompt needs end of text, which tokenizer 'char' lacks"):
        prompt_batches(tokenizer, [""])


@pytest.mark.parametrize("use", ["rows", "tail", "mixture"])
def test_a_file_that_became_shorter_is_one_line_and_no_signal(tmp_path, use):
    file = tmp_path / "train.bin"
    np.arange(50_000, dtype="<u2").tofile(file)
    reader = reader_of(file, 8)
    mixture = MixtureReader([reader, reader], [50_000, 50_000])
    read = {
        "rows": lambda: reader(np.array([40_000])),
        "tail": lambda: reader.tail(49_990),
        "mixture": lambda: mixture(np.array([40_000, 90_000])),
    }[use]
    assert read()["input_ids"].shape[1] in (8, 9)
    os.truncate(file, 10)
    message = f"^{re.escape(str(file))} was truncated while it was read: 10 bytes instead of 100000; prepare"
    with pytest.raises(ValueError, match=message):
        read()


@pytest.mark.parametrize(("size", "says"), [(10, "has 10 bytes instead of 100000"), (None, "cannot be read: No such")])
def test_a_file_that_changed_before_it_is_mapped_is_one_line(tmp_path, size, says):
    file = tmp_path / "train.bin"
    np.arange(50_000, dtype="<u2").tofile(file)
    reader = reader_of(file, 8)
    file.unlink() if size is None else os.truncate(file, size)
    with pytest.raises(ValueError, match=says):
        reader(np.array([0]))
