"""What ``transformers`` saves is read with the same logits; what cannot be honoured is refused by name."""

import copy
import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

from lightning_llm.__main__ import main
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.interop import export_model, load_model, read_folder
from tests.checkpoints.conftest import Code
from tests.ops.judged import relative_error

from .conftest import LLAMA3, MODELS, SIZES

HF_SIZES = {**SIZES, "vocab_size": 99}
GPT_SIZES = {"vocab_size": 99, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64}
ROPE = {"rope_theta": 500.0}
THEIRS = {
    "llama": lambda: LlamaConfig(**HF_SIZES),
    "llama, biases, tied": lambda: LlamaConfig(
        **HF_SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rms_norm_eps=3e-4
    ),
    "llama, linear": lambda: LlamaConfig(**HF_SIZES, rope_parameters={**ROPE, "rope_type": "linear", "factor": 3.0}),
    "llama, llama3": lambda: LlamaConfig(**HF_SIZES, rope_parameters={**ROPE, **LLAMA3}),
    "qwen3": lambda: Qwen3Config(**HF_SIZES, head_dim=10, attention_bias=True, rope_parameters={**ROPE}),
    "gpt2": lambda: GPT2Config(**GPT_SIZES, layer_norm_epsilon=3e-4),
    "gpt2, exact gelu, untied": lambda: GPT2Config(
        **GPT_SIZES, activation_function="gelu", tie_word_embeddings=False, n_inner=77
    ),
}


def read(folder):
    return read_folder(folder), load_model(folder)[0]


def of_transformers(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(THEIRS[name](), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 1.0))
    return model


def edit(folder, **changes):
    file = folder / "config.json"
    content = json.loads(file.read_text())
    content |= changes
    file.write_text(json.dumps({name: value for name, value in content.items() if value != "absent"}))


@pytest.mark.parametrize("name", THEIRS)
def test_a_saved_model_is_read_with_the_same_logits(tmp_path, name):
    theirs = of_transformers(name)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found, ours = read(tmp_path)
    truth = copy.deepcopy(theirs).double()
    ids = torch.randint(0, 99, (2, 60))
    with torch.no_grad():
        expected = truth(ids).logits
        assert relative_error(ours.logits(ours(ids)), expected) <= 2 * relative_error(theirs(ids).logits, expected)
    assert found.tokenizer is None


@pytest.mark.parametrize("name", MODELS)
def test_exporting_what_was_imported_gives_the_same_bytes(exported, tokenizer, tmp_path, name):
    model, first = exported(name, max_shard_bytes=40_000)
    found, ours = read(first)
    assert found.config == dataclasses.replace(model.config, vocab_multiple_of=1)
    assert found.tokenizer == tokenizer.to_str()
    export_model(ours, found.tokenizer, tmp_path / "again", max_shard_bytes=40_000)
    assert len(list(first.glob("*.safetensors"))) > 1
    for file in first.iterdir():
        if file.name != "README.md":
            assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_of_the_folder_is_kept(build, tmp_path, dtype):
    model = build("qwen3").to(dtype)
    export_model(model, None, tmp_path / "out")
    for name, tensor in read_folder(tmp_path / "out").tensors():
        assert torch.equal(tensor, model.state_dict()[name])
        assert tensor.dtype == dtype


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_tensor_holds_on_to_no_more_than_itself(exported, name):
    _, folder = exported(name)
    for tensor_name, tensor in read_folder(folder).tensors():
        assert tensor.is_contiguous(), tensor_name
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, tensor_name


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_parameters": "absent", "rope_theta": 700.0}, 700.0, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}, "rope_theta": "absent"}, 700.0, None),
        ({"rope_parameters": "absent", "rope_theta": "absent"}, 10000.0, None),
        (
            {"rope_parameters": "absent", "rope_theta": 700.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            700.0,
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {"rope_parameters": {**LLAMA3, "rope_theta": 700.0, "partial_rotary_factor": 1.0}, "rope_theta": "absent"},
            700.0,
            LLAMA3,
        ),
        (  # the context that it began with is then that of the model
            {"rope_parameters": {n: v for n, v in LLAMA3.items() if not n.startswith("original")}},
            500.0,
            {**LLAMA3, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_the_rotation_is_read_by_its_old_and_its_new_names(exported, changes, theta, scaling):
    _, folder = exported("llama")
    edit(folder, **changes)
    config = read_folder(folder).config
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("llama", {"sliding_window": 4096}, "sliding_window 4096 is not supported"),
        ("llama", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported: there are silu, swish, gelu"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is unknown"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config: quantized weights"),
        ("llama", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map: the model brings code of its own"),
        ("llama", {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "'mamba' .* is not supported; there"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ("llama", {"model_type": "absent", "architectures": "absent"}, "neither model_type nor architectures"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads must be a whole number above 0"),
        ("llama", {"num_attention_heads": 5}, "num_attention_heads 5 is not a multiple of num_key_value_heads 2"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
            "rope_type 'longrope' is not supported",
        ),
        (
            "llama",
            {"rope_parameters": "absent", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type 'dynamic' is not supported",
        ),
        ("llama", {"rope_theta": "much", "rope_parameters": "absent"}, "rope_theta must be a number, got 'much'"),
        ("llama", {"rope_theta": 3.0}, "rope_theta 3.0 contradicts rope_parameters"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "contradicts rope_parameters"),
        ("llama", {"rope_parameters": {"full": {"rope_theta": 1.0}}}, "one rotation for all layers"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 16}, "use_sliding_window True is not supported"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "expected 'full_attention'",
        ),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights False"),
        ("gpt2", {"activation_function": "silu"}, "activation_function 'silu' is not supported"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention True"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(exported, name, changes, says):
    _, folder = exported(name)
    edit(folder, **changes)
    with pytest.raises(ValueError, match=says) as caught:
        read_folder(folder)
    assert str(folder / "config.json") in str(caught.value)


def test_all_such_fields_are_named_at_once(exported):
    _, folder = exported("llama")
    edit(folder, hidden_act="relu", sliding_window=16, logit_scale=2.0)
    with pytest.raises(ValueError, match=r"hidden_act.*sliding_window.*logit_scale"):
        read_folder(folder)


def test_harmless_fields_change_nothing_and_are_told_where_they_matter_in_training(exported):
    model, folder = exported("llama")
    edit(folder, attention_dropout=0.1, pretraining_tp=2, bos_token_id=1, some_new_switch=False, use_cache=False)
    found = read_folder(folder)
    assert found.config == model.config
    assert found.notes == ["attention_dropout 0.1 acts in training only and is not imported: architecture.dropout is 0"]
    edit(folder, eos_token_id=7)
    assert "eos_token_id 7 is not imported: here a text ends with '<|endoftext|>' (0)" in read_folder(folder).notes


@pytest.fixture
def bounded(build, tmp_path):
    """A folder whose tokenizer puts <s> before a text."""
    tokenizer = Tokenizer.train_bpe(["some text"], 270, ["<s>", "<|im_end|>"]).with_boundaries("<s>")
    export_model(build("llama"), tokenizer.to_str(), tmp_path / "bounded")
    return tmp_path / "bounded"


def test_the_tokens_around_a_text_are_kept_and_told(bounded):
    found = read_folder(bounded)
    assert found.tokenizer == (bounded / "tokenizer.json").read_text()
    assert found.notes == ["each text begins with '<s>' (1), the bos token of its tokenizer"]
    edit(bounded, eos_token_id=[2, 0, 5])
    assert read_folder(bounded).tokenizer == found.tokenizer
    edit(bounded, eos_token_id=[2, 5])
    again = read_folder(bounded)
    assert again.notes[0] == "a text ends with '<|im_end|>' (2), the eos_token_id of config.json"
    assert (Tokenizer(again.tokenizer).eos_token_id, Tokenizer(again.tokenizer).begin_of_text) == (2, "<s>")


@pytest.mark.parametrize(
    ("settings", "begin"),
    [
        ({"add_bos_token": False}, None),
        ({"add_bos_token": True, "bos_token": "<|im_end|>"}, "<s>"),  # the tokenizer.json says it already
        ({"bos_token": "<|im_end|>"}, "<s>"),
        ({"add_bos_token": "yes", "bos_token": 7}, "<s>"),
    ],
)
def test_the_tokenizers_settings_say_whether_a_text_begins_with_a_token(bounded, settings, begin):
    (bounded / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer(read_folder(bounded).tokenizer).begin_of_text == begin


def test_the_suggested_command_prepares_a_text_as_the_model_was_trained(bounded, tmp_path, capsys):
    assert main(["import", str(bounded), "--out", str(tmp_path / "x.ckpt")]) == 0
    assert f"prepare TEXT --tokenizer {bounded}/tokenizer.json --out" in capsys.readouterr().out
    edit(bounded, eos_token_id=2)
    (bounded / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    assert main(["import", str(bounded), "--out", str(tmp_path / "y.ckpt")]) == 0
    options = "--begin-of-text none --end-of-text '<|im_end|>'"
    assert f"prepare TEXT --tokenizer {bounded}/tokenizer.json {options} --out" in capsys.readouterr().out


@pytest.mark.parametrize("named", ["<s>", {"content": "<s>"}])
def test_the_tokenizers_settings_name_a_token_that_begins_a_text(bounded, named):
    plain = Tokenizer.from_file(bounded / "tokenizer.json").without_begin()
    (bounded / "tokenizer.json").write_text(plain.to_str())
    (bounded / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, "bos_token": named}))
    assert Tokenizer(read_folder(bounded).tokenizer).begin_of_text == "<s>"


def test_gpt2s_own_folder_without_prefix_and_with_masks_is_read(exported):
    model, folder = exported("gpt2")
    file = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    save_file(tensors, file, metadata={"format": "pt"})
    edit(folder, tie_word_embeddings="absent", n_ctx=64)
    _, ours = read(folder)
    for name, tensor in model.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor)
    tensors["lm_head.weight"] = tensors["wte.weight"] + 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head.weight differs from transformer.wte.weight"):
        read_folder(folder)


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, 0.999])
def test_a_safetensors_file_that_is_cut_short_is_named(exported, kept):
    _, folder = exported("llama", max_shard_bytes=60_000)
    file = sorted(folder.glob("*.safetensors"))[1]
    content = file.read_bytes()
    file.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(ValueError, match=f"{file} is truncated"):
        read_folder(folder)


def test_a_missing_shard_is_named(exported):
    _, folder = exported("llama", max_shard_bytes=60_000)
    file = sorted(folder.glob("*.safetensors"))[1]
    file.unlink()
    with pytest.raises(ValueError, match=f"{file} is missing"):
        read_folder(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(file.name, f"../{file.name}"))
    with pytest.raises(ValueError, match="expected the plain name of a file in this folder"):
        read_folder(folder)


def test_missing_unexpected_and_misshapen_tensors_are_named(exported):
    _, folder = exported("qwen3")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    tensors["model.layers.2.extra.weight"] = torch.ones(3)
    tensors["model.norm.weight"] = torch.ones(47)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError,
        match=r"missing tensors: model\.layers\.1\.self_attn\.q_norm\.weight; unexpected "
        r"tensors: model\.layers\.2\.extra\.weight; model\.norm\.weight is \(47,\), .* \(48,\)",
    ):
        read_folder(folder)


def test_tensors_of_several_dtypes_and_of_integers_are_refused(exported):
    _, folder = exported("llama")
    tensors = load_file(folder / "model.safetensors")
    for dtype, says in ((torch.bfloat16, "several dtypes \\(BF16, F32\\)"), (torch.int8, "only F32")):
        tensors["model.norm.weight"] = torch.ones(48, dtype=dtype)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=says):
            read_folder(folder)


def test_pickled_weights_are_read_without_code_or_not_at_all(exported, tmp_path):
    model, folder = exported("llama")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    torch.save(tensors, file)
    _, ours = read(folder)
    assert torch.equal(ours.lm_head.weight, model.lm_head.weight)
    torch.save({**tensors, "code": Code(tmp_path / "ran")}, file)
    with pytest.raises(ValueError, match=r"pytorch_model.bin is rejected.*nothing in it was executed"):
        read_folder(folder)
    assert not (tmp_path / "ran").exists()
    file.write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        read_folder(folder)
    file.unlink()
    with pytest.raises(ValueError, match="has no weights"):
        read_folder(folder)


def test_a_folder_is_a_str_or_a_path(exported, tmp_path):
    model, tokenizer = load_model(str(exported("llama")[1]))
    assert export_model(model, tokenizer, str(tmp_path / "again")) == "LlamaForCausalLM"
    again = load_model(tmp_path / "again")[0].state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


def test_what_is_no_model_is_said(tmp_path):
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        read_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"is not a model: it has no config\.json"):
        read_folder(tmp_path)
    for content, says in (("{", "is not JSON that can be read"), ("[1]", r"holds \[1\], expected an object")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=says):
            read_folder(tmp_path)


def test_a_tokenizer_must_fit_and_be_of_the_known_format(exported):
    _, folder = exported("llama")
    (folder / "tokenizer.json").write_text(Tokenizer.train_char([chr(n) for n in range(200, 501)]).to_str())
    with pytest.raises(ValueError, match="tokenizer has 301 ids, more than the 300 rows"):
        read_folder(folder)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(ValueError, match=r"tokenizer as tokenizer.model only; tokenizer.json is what is read"):
        read_folder(folder)


def test_transformers_is_not_needed():
    modules = "lightning_llm.interop.reader, lightning_llm.interop.writer"
    code = f"import sys, {modules}; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
