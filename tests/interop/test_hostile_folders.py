"""A folder from somebody else: whatever its files say, the model is read with that meaning, or refused in one line."""

import json
import os
import shutil
import struct

import pytest
import torch

from lightning_llm import ModelConfig, Transformer
from lightning_llm.__main__ import main
from lightning_llm.interop import export_model, load_model, read_folder

from .conftest import MODELS

FAMILIES = ("llama", "qwen3", "gpt2")
NAMES = {"n_positions": "max_position_embeddings", "layer_norm_epsilon": "rms_norm_eps"}
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def originals(tmp_path_factory, tokenizer):
    """A folder of each family, in several files."""
    made = {}
    for name in FAMILIES:
        torch.manual_seed(0)
        made[name] = tmp_path_factory.mktemp("original") / name
        export_model(Transformer(ModelConfig(**MODELS[name])), tokenizer.to_str(), made[name], max_shard_bytes=60_000)
    return made


@pytest.fixture
def folder(originals, tmp_path):
    return shutil.copytree(originals["llama"], tmp_path / "model")


def refusal(folder):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - each caller looks at the message
        read_folder(folder)
    line = str(caught.value)
    assert line.isprintable()
    assert len(line) < 2000
    assert str(folder) in line
    return line


def change(file, **changes):
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **changes}))


DEEP = json.loads("[" * 90 + "]" * 90)
FIELDS = [
    ({"num_hidden_layers": 10**12}, "num_hidden_layers must be at most 2000, got 1000000000000"),
    ({"num_hidden_layers": 2000}, "missing tensors: model.layers.10.input_layernorm.weight, "),
    ({"hidden_size": 10**9, "num_attention_heads": 10**9}, "parameters, more than 1e+13"),
    ({"hidden_size": 6 * 10**8}, "lm_head.weight is (300, 48), config.json says (300, 600000000)"),
    ({"intermediate_size": 10**15}, "intermediate_size must be at most"),
    ({"vocab_size": 10**12}, "more than 1e+13"),
    ({"vocab_size": True}, "vocab_size must be a whole number above 0, got True"),
    ({"vocab_size": "300"}, "vocab_size must be a whole number above 0, got '300'"),
    ({"vocab_size": 301}, "model.embed_tokens.weight is (300, 48), config.json says (301, 48)"),
    ({"vocab_size": [300]}, "vocab_size must be a whole number above 0, got [300]"),
    ({"max_position_embeddings": 10**30}, "max_position_embeddings must be at most"),
    ({"head_dim": -8}, "head_dim must be a whole number above 0"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a number, got 1000"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps must be above 0"),
    ({"rms_norm_eps": None, "initializer_range": {}}, "initializer_range must be a number, got {}"),
    ({"tie_word_embeddings": 0}, "tie_word_embeddings must be true or false, got 0"),
    ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
    ({"attention_bias": "yes"}, "attention_bias must be true or false"),
    ({"hidden_act": ["silu"]}, "hidden_act ['silu'] is not supported"),
    ({"layer_types": 5}, "layer_types is 5, expected a list"),
    ({"layer_types": [["full_attention"]]}, "layer_types[0] is ['full_attention'], expected"),
    ({"rope_theta": 10**400}, "rope_theta must be a number"),
    ({"rope_parameters": []}, "rope_parameters is [], expected plain values"),
    ({"rope_parameters": {"rope_type": DEEP}}, "expected plain values"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 10**40}}, "rope_scaling.factor must be a number above 0"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2, "a\x1b": 1}}, "rope_scaling.a\\x1b is unknown"),
    ({"rope_scaling": {"rope_type": True, "factor": 2}}, "contradicts"),
    ({"model_type": {"a": 1}}, "model_type {'a': 1} with"),
    ({"model_type": "\x1b[31m" * 1000}, "model_type '\\x1b"),
    ({"architectures": "LlamaForCausalLM\n"}, "architectures 'LlamaForCausalLM\\n' is not supported"),
    ({"a\nb\x1b[2J": DEEP}, "a\\nb\\x1b[2J [[[...]]] is unknown"),
    ({"x" * 10**5: 1}, "is unknown and may change"),
    ({"mlp": "os.system"}, "mlp 'os.system' is unknown"),
    ({"auto_map": {"AutoModel": "evil.Model"}}, "auto_map: the model brings code of its own, which is not run"),
]


@pytest.mark.parametrize(("changes", "says"), FIELDS, ids=range(len(FIELDS)))
def test_an_edited_field_is_named(folder, changes, says):
    change(folder / "config.json", **changes)
    assert says in refusal(folder)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"hidden_size": NaN}', "NaN is not a finite number"),
        (b'{"rope_theta": 1e999}', "1e999 is not a finite number"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' is given twice"),
        (b"\xff\xfe{}", "config.json is not UTF-8 text"),
        (b" " * (9 << 20), "expected at most 8388608"),
        (b"{}", "it has neither model_type nor architectures"),
    ],
    ids=range(8),
)
def test_a_config_that_is_no_sound_json_is_refused(folder, content, says):
    (folder / "config.json").write_bytes(content)
    assert says in refusal(folder)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "..", ".", "", "a/../b", "a\\b", "a\0b", "model.safetensors/x", 5]
)
def test_a_name_in_the_index_stays_in_the_folder(folder, name):
    shutil.copy(folder / "model-00001-of-00005.safetensors", folder.parent / "outside.safetensors")
    weights = json.loads((folder / INDEX).read_text())["weight_map"]
    change(folder / INDEX, weight_map={**weights, "lm_head.weight": name})
    assert "expected the plain name of a file in this folder" in refusal(folder) or name == 5


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({}, "weight_map is missing"),
        ({"weight_map": []}, "weight_map is [], expected at least one by name"),
        ({"weight_map": {"a": None}}, "weight_map.a is None, expected text"),
        ({"weight_map": {"a": "x" * 300}}, "File name too long"),
        ({"weight_map": {"a": "none.safetensors"}}, "none.safetensors is missing"),
        ({"weight_map": {"a": "config.json"}}, "config.json is truncated or damaged, or not safetensors"),
    ],
    ids=range(6),
)
def test_an_index_that_is_none_is_refused(folder, content, says):
    (folder / INDEX).write_text(json.dumps(content))
    if "too long" in says:
        with pytest.raises(OSError, match=says):
            read_folder(folder)
    else:
        assert says in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", INDEX, "model-00002-of-00005.safetensors"])
@pytest.mark.parametrize("instead", ["a FIFO", "a folder", "a link outside", "a link to a device"])
def test_a_file_is_a_file_of_this_folder(folder, put_instead, name, instead):
    put_instead(folder / name, instead)
    refusal(folder)


def test_a_snapshot_of_the_cache_may_link_to_its_blobs(originals, tmp_path):
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "0123", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in originals["llama"].iterdir():
        shutil.copy(file, blobs / f"{file.name}-blob")
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}-blob")
    assert read_folder(snapshot).config.hidden_size == 48
    shutil.move(blobs, tmp_path / "elsewhere")
    (tmp_path / "models--x" / "blobs").symlink_to(tmp_path / "elsewhere")
    assert "points outside the folder" in refusal(snapshot)


def header(file):
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def overlap(found):
    names = [name for name in found if name != "__metadata__"]
    found[names[1]]["data_offsets"] = found[names[0]]["data_offsets"]


HEADERS = {
    "offsets that overlap": overlap,
    "offsets beyond the file": lambda found: next(iter(found.values())).update(data_offsets=[0, 10**15]),
    "offsets that go back": lambda found: next(iter(found.values())).update(data_offsets=[100, 0]),
    "offsets negative": lambda found: next(iter(found.values())).update(data_offsets=[-1, 0]),
    "another shape": lambda found: next(iter(found.values())).update(shape=[10**15]),
    "a shape that overflows": lambda found: next(iter(found.values())).update(shape=[2**63, 2**63]),
    "an unknown dtype": lambda found: next(iter(found.values())).update(dtype="F7"),
    "a whole dtype": lambda found: next(iter(found.values())).update(dtype="I32"),
    "no offsets": lambda found: next(iter(found.values())).pop("data_offsets"),
    "an unexpected name": lambda found: found.update({"\x1b[2J": found.pop(next(iter(found)))}),
    "a name of 17 MiB": lambda found: found.update({"x" * (17 << 20): {}}),
    "deep metadata": lambda found: found.update(__metadata__=DEEP),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_cannot_be_is_refused(folder, name):
    file = folder / "model-00001-of-00005.safetensors"
    found, tensors = header(file)
    found.pop("__metadata__")
    HEADERS[name](found)
    words = json.dumps(found).encode()
    file.write_bytes(struct.pack("<Q", len(words)) + words + tensors)
    refusal(folder)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**8, 0])
def test_a_header_of_an_impossible_length_is_refused(folder, length):
    file = folder / "model-00001-of-00005.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    refusal(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_leaf_of_a_config_has_its_meaning_or_is_refused(originals, tmp_path, name, changed_leaves):
    folder = shutil.copytree(originals[name], tmp_path / "model")
    content, sound = json.loads((folder / "config.json").read_text()), read_folder(folder).config
    kept = set()
    for label, changed in changed_leaves(content):
        (folder / "config.json").write_text(json.dumps(changed))
        try:
            found = read_folder(folder).config
        except ValueError:
            continue
        kept.add(label)
        differs = {key for key, value in found.to_dict().items() if value != sound.to_dict()[key]}
        field, what = label.split()
        if what in ("dropped", "null"):  # the default of the class
            assert len(differs) <= 3, (label, differs)
        else:  # what it says, or a field that is not read
            assert not differs or NAMES.get(field, field.removeprefix("rope_parameters.")) in differs, (label, differs)
    assert len(kept) > 20
    assert not {label for label in kept if label.endswith(" nan") or "_size retyped" in label}


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: change(folder / "config.json", num_hidden_layers=10**12),
        lambda folder: (folder / "config.json").write_bytes(b"[" * 100_000),
        lambda folder: change(folder / INDEX, weight_map={"a": "../../../etc/passwd"}),
        lambda folder: (folder / "tokenizer.json").write_text("{"),
        lambda folder: (folder / "model-00003-of-00005.safetensors").write_bytes(b"\xff" * 100),
    ],
    ids=range(5),
)
def test_an_import_that_fails_prints_one_line_and_leaves_nothing(folder, tmp_path, damage, capsys):
    damage(folder)
    before = sorted(os.listdir(tmp_path))
    assert main(["import", str(folder), "--out", str(tmp_path / "out.ckpt")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == before
    assert main(["generate", str(folder), "--prompt", "x"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_unchanged_folder_is_read(originals):
    for name in FAMILIES:
        assert load_model(originals[name])[0].config == read_folder(originals[name]).config
