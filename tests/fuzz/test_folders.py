"""Token stores and folders of transformers with one to three edits: the same tokens and weights, or one line."""

import hashlib
import json
import struct

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.data.token_store import META, TokenStore, meta_checksum
from tests.fuzz import watch
from tests.fuzz.conftest import Subject, amount
from tests.fuzz.mutations import RAW_KINDS, edited, edited_bytes, edits, raw_edits

STORE, PARTS = "stores/s", "shards/u"
OF_STORE = {
    "verify": ["data", "verify", STORE],
    "inspect": ["data", "inspect", STORE],
    "estimate": ["estimate", "--config", "tiny.yaml"],
    "check": ["check", "--config", "tiny.yaml"],
}
OF_FOLDER = {
    "import": ["import", "hf", "--out", "out.ckpt"],
    "generate": ["generate", "hf", "--prompt", "a", "--max-new-tokens", "3"],
    "evaluate": ["evaluate", "hf", "--data", "text.txt"],
    "check": ["check", "--config", "tiny.yaml", "--model.init_from", "hf"],
}


def is_json(content):
    try:
        return isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        return False


def with_checksums(folder, name, tree):
    """The description of a store with the checksums that fit it: a stranger writes them too."""
    if name == "tokenizer.json":
        tree = {**tree, "tokenizer_sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest()}
    return {**tree, "checksum": meta_checksum(tree)} if isinstance(tree, dict) else tree


def change(folder, name, drawn, raw, is_consistent):
    """Edit one JSON file of a store; returns what it holds then and the keys that were touched."""
    file = folder / name
    tree, touched = edited(json.loads(file.read_text()), drawn)
    if is_consistent and name == META:
        tree = with_checksums(folder, name, tree)
    content = edited_bytes(json.dumps(tree).encode(), raw)
    file.write_bytes(content)
    if is_consistent and name == "tokenizer.json":
        meta = folder / META
        meta.write_text(json.dumps(with_checksums(folder, name, json.loads(meta.read_text()))))
    return content, touched


def test_a_store_has_the_tokens_that_were_written_or_is_refused(world):
    subject = Subject("stores")
    original = TokenStore.open(world.template / STORE)
    tokens = {name: np.array(original.tokens(name)) for name in original.splits}

    def same_tokens(folder, is_changed):
        store = TokenStore.open(folder)
        for name in store.splits:
            assert is_changed or np.array_equal(store.tokens(name), tokens[name]), name

    @amount(10)
    @given(
        st.sampled_from(["verify", *OF_STORE]),
        st.sampled_from([META, META, "tokenizer.json", "train.bin"]),
        edits(),
        raw_edits(),
        st.booleans(),
    )
    def draw(command, name, drawn, raw, is_consistent):
        with world.copy(STORE, "tiny.yaml") as (root, work):
            folder, touched = work / STORE, []
            if name == "train.bin":
                kinds = [edit for edit in raw if edit.kind in RAW_KINDS]
                content = edited_bytes((folder / name).read_bytes(), kinds)
                (folder / name).write_bytes(content)
                subject.count(True)
            else:
                content, touched = change(folder, name, drawn, raw, is_consistent)
                subject.count(is_json(content))

            def act():
                story = f"{name} with {drawn} {raw} at {touched}, checksums fit: {is_consistent}\n{content[:1500]!r}"
                result = watch.run(OF_STORE[command], root, work, story)
                if result.status == 0 and command != "estimate":
                    subject.succeeded += 1
                    is_changed = name == "train.bin" and bool(raw)
                    watch.correct(lambda: same_tokens(folder, is_changed and command != "verify"), command, story)

            act()

    draw()
    subject.check()


def test_shards_are_merged_to_the_tokens_that_were_written_or_refused(world):
    subject = Subject("shards")
    text = (world.template / "text.txt").read_bytes()

    def same_tokens(folder):
        store = TokenStore.open(folder)
        assert sum(len(store.tokens(name)) for name in store.splits) >= len(text) - 1

    @amount(10)
    @given(st.integers(0, 20), edits(), raw_edits())
    def draw(number, drawn, raw):
        with world.copy("shards", "text.txt") as (root, work):
            files = sorted(path for path in (work / "shards").rglob("*.json") if path.name != "tokenizer.json")
            file = files[number % len(files)]
            content, touched = change(file.parent, file.name, drawn, raw, is_consistent=True)
            subject.count(is_json(content))

            def act():
                story = f"{file} with {drawn} {raw} at {touched}\n{content[:1500]!r}"
                result = watch.run(["prepare", "--merge", PARTS], root, work, story)
                if result.status == 0:
                    watch.correct(lambda: same_tokens(work / PARTS), "prepare", story)

            act()

    with world.copy("shards", "text.txt") as (root, work):
        watch.run(["prepare", "--merge", PARTS], root, work, "as they were written")
        same_tokens(work / PARTS)
    subject.succeeded = 1
    draw()
    subject.check()


def read_header(file):
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def change_folder(folder, name, drawn, raw):
    """Edit a file of an exported model; of the weights, their header."""
    file = folder / name
    if name.endswith(".safetensors"):
        header, body = read_header(file)
        tree, touched = edited(header, drawn)
        content = json.dumps(tree).encode()
        length = struct.pack("<Q", len(content))
        file.write_bytes(edited_bytes(length + content + body, raw))
        return content, [("weights",)]
    tree, touched = edited(json.loads(file.read_text()), drawn)
    content = edited_bytes(json.dumps(tree).encode(), raw)
    file.write_bytes(content)
    return content, touched


def test_a_folder_of_transformers_gives_its_weights_or_is_refused(world):
    subject = Subject("folders")
    folder = world.template / "hf"
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    weights = [name for name in names if name.endswith(".safetensors")]
    assert len(weights) > 1
    assert "model.safetensors.index.json" in names
    names = [*(name for name in names if name not in weights), weights[0], "config.json", "config.json"]
    with world.copy("hf") as (root, work):
        watch.run(OF_FOLDER["import"], root, work, "as it was exported")
        original = read_checkpoint(work / "out.ckpt")["state_dict"]

    def same_weights(work, touched):
        found = read_checkpoint(work / "out.ckpt")["state_dict"]
        assert all(
            touched[:1] == [("weights",)] or torch.equal(found[name], tensor)
            for name, tensor in original.items()
            if name in found
        )

    @amount(10)
    @given(st.sampled_from(["import", *OF_FOLDER]), st.sampled_from(names), edits(), raw_edits())
    def draw(command, name, drawn, raw):
        with world.copy("hf", "text.txt", "tiny.yaml", STORE) as (root, work):
            content, touched = change_folder(work / "hf", name, drawn, raw)
            subject.count(is_json(content))

            def act():
                story = f"{name} with {drawn} {raw} at {touched}\n{content[:1500]!r}"
                result = watch.run(OF_FOLDER[command], root, work, story)
                if result.status == 0:
                    subject.succeeded += 1
                    if command == "import":
                        watch.correct(lambda: same_weights(work, touched), command, story)

            act()

    draw()
    subject.check()
