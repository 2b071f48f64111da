"""What begins and ends the documents of a store: once each, and what the ids have counts."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.data.find_store import find_or_prepare
from lightning_llm.data.prepare import prepare_store
from lightning_llm.data.store_tokenizer import boundary_lines, end_of_documents, open_tokenizer
from lightning_llm.data.token_store_writer import TokenStoreWriter, merge_shards
from lightning_llm.data.tokenizers import Tokenizer

TEXTS = [f"text {n} of some\nlines, " * (n + 1) for n in range(30)]
END, BOS = 0, 1


@pytest.fixture
def tokenizer(tmp_path):
    """A file whose post-processor puts <s> before a text."""
    backend = Backend.from_str(Tokenizer.train_bpe(TEXTS, 300, ["<s>", "[EOS]"]).to_str())
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    backend.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


@pytest.fixture
def prepared(tmp_path):
    """Stores of these documents."""

    def prepared(name, texts=TEXTS, **options):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return prepare_store(str(file), tmp_path / name, **options)

    return prepared


def documents(store, end):
    """All documents of a store, each up to its end."""
    ids = np.concatenate([store.tokens(split) for split in store.splits])
    return [part.tolist() for part in np.split(ids, np.flatnonzero(ids == end) + 1) if len(part)]


def test_documents_begin_and_end_with_the_tokens_of_the_tokenizer(prepared, tokenizer):
    store = prepared("store", tokenizer=tokenizer)
    plain = Tokenizer.from_file(tokenizer)
    assert sorted(documents(store, END)) == sorted([BOS, *plain.encode(text), END] for text in TEXTS)
    assert open_tokenizer(store).begin_of_text == "<s>"
    assert list(boundary_lines(store)) == [
        "documents begin with '<s>' (1); --begin-of-text chooses another token, or none",
        "documents end with '<|endoftext|>' (0); --end-of-text chooses another token, or none",
    ]


def test_a_token_that_the_text_has_is_there_once(prepared, tokenizer):
    written = prepared("written", [f"<|endoftext|><s>{text}<|endoftext|>" for text in TEXTS], tokenizer=tokenizer)
    ids = np.concatenate([written.tokens(split) for split in written.splits])
    assert not ((ids[1:] == END) & (ids[:-1] == END)).any()
    for around in ("{}<|endoftext|>", "<|endoftext|>{}", "<s>{}"):
        texts = [around.format(text) for text in TEXTS]
        store = prepared(f"store{texts[0][:3]}", texts, tokenizer=tokenizer)
        plain = Tokenizer.from_file(tokenizer)
        assert sorted(documents(store, END)) == sorted([BOS, *plain.encode(text), END] for text in TEXTS)


def test_the_end_of_one_text_begins_the_next_if_they_are_one_token(prepared, tokenizer):
    store = prepared("store", tokenizer=tokenizer, begin_of_text="<|endoftext|>")
    plain = Tokenizer.from_file(tokenizer)
    assert sorted(documents(store, END)) == sorted([*plain.encode(text), END] for text in TEXTS)
    assert open_tokenizer(store).encode_prompt("text") == [END, *plain.encode("text")]


def test_other_tokens_go_into_the_file_of_the_store(prepared, tokenizer):
    store = prepared("store", tokenizer=tokenizer, begin_of_text="none", end_of_text="[EOS]")
    plain = Tokenizer.from_file(tokenizer)
    assert sorted(documents(store, 2)) == sorted([*plain.encode(text), 2] for text in TEXTS)
    saved = Tokenizer.from_file(store.tokenizer_file)
    assert (saved.begin_of_text, saved.eos_token_id, store.eos_token_id) == (None, 2, 2)
    assert Backend.from_file(str(store.tokenizer_file)).encode("text").ids == plain.encode("text")


def test_a_run_takes_a_store_of_other_tokens_and_does_not_make_it_again(tmp_path, tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("".join(TEXTS))
    made = prepare_store("t.txt", "named", tokenizer=tokenizer, begin_of_text="none")
    found = find_or_prepare(path="t.txt", store="named", tokenizer=tokenizer)
    assert found.fingerprint == made.fingerprint


def test_documents_without_a_mark_are_named(prepared):
    said = []
    prepared("bytes", tokenizer="byte", log=said.append)
    assert said[:1] == [
        "documents follow each other without a mark, since its tokenizer has no known end-of-text token; "
        "--end-of-text names one"
    ]
    assert list(boundary_lines(prepared("none", tokenizer="bpe", vocab_size=300, end_of_text="none"))) == [
        "documents follow each other without a mark; --end-of-text names one"
    ]
    with pytest.raises(ValueError, match=r"--end-of-text '\[EOS\]' is not a token of the tokenizer"):
        prepared("unknown", tokenizer="bpe", vocab_size=300, end_of_text="[EOS]")


def test_one_file_with_the_token_between_its_documents_has_a_document_mask(tmp_path):
    (tmp_path / "t.txt").write_text("<|endoftext|>".join(TEXTS))
    store = prepare_store(str(tmp_path / "t.txt"), tmp_path / "store", tokenizer="bpe", vocab_size=300)
    count = int((store.tokens("train") == END).sum())
    assert list(boundary_lines(store)) == [
        f"the training text has '<|endoftext|>' (0) {count} times: data.document_mask can use it"
    ]
    assert store.eos_token_id is None
    data = TokenDataModule(store=str(store.path), context_length=200, global_batch_size=2, document_mask=True)
    data.setup("validate")
    inputs, starts = (
        torch.cat([batch[name] for batch in data.val_dataloader()[1]]) for name in ("input_ids", "documents")
    )
    assert (inputs == END).any()
    ends = (inputs[:, 1:] == END).nonzero()
    assert torch.equal((starts[:, 1:] != starts[:, :-1]).nonzero(), ends)


def test_a_store_of_an_earlier_version_is_not_said_to_begin_its_documents(tmp_path, tokenizer):
    content = Tokenizer.from_file(tokenizer).to_str()
    with TokenStoreWriter(tmp_path / "old", vocab_size=300, tokenizer=content, source={"eos_token_id": END}) as writer:
        for split in ("train", "val"):
            writer.write(split, np.array([7, 8, END], dtype=np.uint16), text_bytes=3, documents=1)
    data = TokenDataModule(store=str(tmp_path / "old"), context_length=2, global_batch_size=1)
    assert data.tokenizer.begin_of_text is None
    assert data.tokenizer.encode("text") == Tokenizer(content).encode("text")
    assert end_of_documents(data.store, data.tokenizer) == END


def test_shards_are_those_of_one_process(prepared, tokenizer, tmp_path):
    from lightning_llm.data.splits import Shard

    whole = prepared("whole", tokenizer=tokenizer)
    for index in (1, 2):
        prepare_store(str(tmp_path / "whole.jsonl"), tmp_path / "parts", tokenizer=tokenizer, shard=Shard(index, 2))
    merged = merge_shards(tmp_path / "parts")
    assert merged.fingerprint == whole.fingerprint
