"""What is exported, ``transformers`` loads, and computes the same with it."""

import copy
import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_llm import ModelConfig
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.generation import generate
from lightning_llm.interop import export_model
from lightning_llm.interop.hf_mapping import mapping_for
from lightning_llm.interop.weights import _write_file
from lightning_llm.interop.writer import SourceRun, model_card
from tests.ops.judged import relative_error

from .conftest import GPT, MODELS, SIZES

WINDOW = {"class_path": "sliding_window", "init_args": {"window": 8}}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_it_and_computes_the_same(exported, name):
    ours, folder = exported(name, max_shard_bytes=60_000)
    theirs = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, attn_implementation="eager").eval()
    truth = copy.deepcopy(theirs).double()
    ids = torch.randint(0, 300, (2, 60))
    with torch.no_grad():
        expected = truth(ids).logits
        assert relative_error(ours.logits(ours(ids)), expected) <= 2 * relative_error(theirs(ids).logits, expected)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_greedy_text_is_the_same(exported, tokenizer, name):
    ours, folder = exported(name)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    reader = AutoTokenizer.from_pretrained(folder)
    prompt = reader("To be, or", return_tensors="pt").input_ids
    assert prompt.tolist() == [tokenizer.encode("To be, or")]
    text = reader.decode(theirs.generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=None)[0])
    assert text == tokenizer.decode(generate(ours, prompt, max_new_tokens=30, temperature=0)[0].tolist())


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_the_tokenizer_goes_along(build, tmp_path, kind):
    text = "Now is the winter of our discontent"
    made = {
        "char": lambda: Tokenizer.train_char([text]),
        "byte": Tokenizer.train_byte,
        "bpe": lambda: Tokenizer.train_bpe([text], 270),
    }[kind]()
    export_model(build("llama"), made.to_str(), tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert theirs.encode(text) == made.encode(text)
    assert theirs.decode(made.encode(text)) == text
    assert theirs.eos_token == ("<|endoftext|>" if kind == "bpe" else None)
    assert theirs.model_max_length == 64
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written["eos_token_id"] == made.eos_token_id


@pytest.mark.parametrize("begin", ["none", "<s>"])
def test_the_tokens_around_a_text_go_along(build, tmp_path, begin):
    text = "Now is the winter of our discontent"
    made = Tokenizer.train_bpe([text], 270, ["<s>", "[EOS]"]).with_boundaries(begin, "[EOS]")
    export_model(build("llama"), made.to_str(), tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    first = [] if begin == "none" else [1]
    assert theirs.encode(text) == made.encode_prompt(text) == [*first, *made.encode(text)]
    assert (theirs.bos_token, theirs.eos_token) == ("<s>" if first else None, "[EOS]")
    for name in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / "out" / name).read_text())
        assert (written["bos_token_id"], written["eos_token_id"]) == (1 if first else None, 2)
    theirs.save_pretrained(tmp_path / "again")
    again = Tokenizer.from_file(tmp_path / "again" / "tokenizer.json")
    assert (again.begin_of_text, again.eos_token_id) == (made.begin_of_text, 2)
    assert ("each text begins with `<s>` (1)" in (tmp_path / "out" / "README.md").read_text()) == bool(first)


def test_a_bias_that_gpt2_has_and_the_model_has_not_is_zero(exported):
    ours, folder = exported("gpt2", attention_bias=False, mlp_bias=False)
    tensors = load_file(folder / "model.safetensors")
    assert tensors["transformer.h.1.attn.c_attn.bias"].shape == (144,)
    assert not tensors["transformer.h.1.attn.c_attn.bias"].any()
    ids = torch.randint(0, 300, (1, 30))
    theirs, ours = AutoModelForCausalLM.from_pretrained(folder).double(), ours.double()
    torch.testing.assert_close(theirs(ids).logits, ours.logits(ours(ids)))


def test_large_models_are_cut_into_files(exported):
    ours, folder = exported("llama", max_shard_bytes=30_000)
    files = sorted(folder.glob("*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    together = {}
    for file in files:
        tensors = load_file(file)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 30_000 or len(tensors) == 1
        assert {name for name, where in index["weight_map"].items() if where == file.name} == tensors.keys()
        together |= tensors
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in together.values())
    assert together.keys() == {n if n == "lm_head.weight" else f"model.{n}" for n in ours.state_dict()}


def test_a_tied_head_is_not_written_twice_and_files_say_whose_they_are(exported):
    _, folder = exported("gpt2")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        assert file.metadata() == {"format": "pt"}  # transformers 4 refuses a file without


def test_bfloat16_stays_bfloat16(build, tmp_path):
    model = build("qwen3").bfloat16()
    export_model(model, None, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(theirs.model.layers[1].mlp.up_proj.weight, model.layers[1].mlp.up_proj.weight)


def test_weights_are_made_one_at_a_time(exported, monkeypatch):
    alive = []

    def watched(tensors, path):
        for tensor in tensors:
            alive.append(tensor.name)
        return _write_file([t._replace(make=lambda t=t: alive.remove(t.name) or t.make()) for t in tensors], path)

    monkeypatch.setattr("lightning_llm.interop.weights._write_file", watched)
    exported("gpt2")
    assert not alive  # each was asked for once, when it was written


def test_old_and_new_names_of_the_rotation_stand_side_by_side(exported):
    _, folder = exported("llama, llama3 rope")
    written = json.loads((folder / "config.json").read_text())
    scaling = {**MODELS["llama, llama3 rope"]["rope_scaling"]}
    assert written["rope_parameters"] == {**scaling, "rope_theta": 10000.0}
    assert (written["rope_theta"], written["rope_scaling"]) == (10000.0, scaling)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({**SIZES, "mlp": "relu"}, r"LlamaForCausalLM cannot have mlp 'relu': its MLP is SwiGLU or GeGLU$"),
        ({**SIZES, "block": "post"}, r"LlamaForCausalLM cannot have block 'post': its norms are before"),
        (
            {**SIZES, "attention": WINDOW},
            r"LlamaForCausalLM cannot have attention .*sliding_window.*: it has full attention",
        ),
        ({**SIZES, "partial_rotary_factor": 0.5}, r"cannot have partial_rotary_factor 0.5: it rotates whole heads"),
        ({**SIZES, "position": "my.Position"}, r"LlamaForCausalLM cannot have position 'my.Position': it has rope"),
        ({**SIZES, "lm_head_bias": True}, r"LlamaForCausalLM cannot have lm_head_bias True: its head has none$"),
        ({**SIZES, "position": "none"}, r"LlamaForCausalLM cannot have position 'none': it has rope$"),
        ({**GPT, "mlp": "gelu", "lm_head_bias": True}, r"GPT2LMHeadModel cannot have lm_head_bias True"),
        ({**GPT, "mlp": "gelu", "num_key_value_heads": 3}, r"GPT2LMHeadModel cannot have num_key_value_heads 3"),
        ({**GPT, "mlp": "gelu", "head_dim": 10}, r"GPT2LMHeadModel cannot have head_dim 10"),
        ({**SIZES, "mlp": "swiglu", "mlp_bias": True, "qk_norm": True}, r"qk_norm True: .* \| Qwen3.*mlp_bias True"),
        (
            {**SIZES, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 8},
            r"multiple of num_attention_heads",
        ),
        (
            {**SIZES, "norm": "layernorm", "lm_head_bias": True},
            r"LlamaForCausalLM cannot have norm 'layernorm': it has rmsnorm; lm_head_bias True",
        ),
        ({**SIZES, "mlp": "torch.nn.Identity"}, r"LlamaForCausalLM cannot have mlp 'torch.nn.Identity'"),
    ],
)
def test_what_has_no_home_is_refused_with_all_reasons(options, says):
    with pytest.raises(ValueError, match=says):
        mapping_for(ModelConfig(**{"mlp": "swiglu", **options}))


def test_a_refusal_leaves_nothing_behind(build, tmp_path):
    with pytest.raises(ValueError, match="no Hugging Face class computes what this model does"):
        export_model(build("llama", mlp="gelu"), None, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_is_left_alone(build, tmp_path):
    (tmp_path / "out").mkdir()
    export_model(build("llama"), None, tmp_path / "out")  # an empty one may be there
    before = sorted((p.name, p.stat().st_mtime_ns) for p in (tmp_path / "out").iterdir())
    with pytest.raises(ValueError, match="out is not empty"):
        export_model(build("llama"), None, tmp_path / "out")
    assert sorted((p.name, p.stat().st_mtime_ns) for p in (tmp_path / "out").iterdir()) == before


def test_a_failure_leaves_no_folder(build, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lightning_llm.interop.writer.model_card", full)
    with pytest.raises(OSError, match="No space left"):
        export_model(build("llama"), None, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_larger_than_the_embedding_is_refused(build, tmp_path):
    tokenizer = Tokenizer.train_char([chr(n) for n in range(200, 501)])
    with pytest.raises(ValueError, match=r"tokenizer has 301 ids, more than the 300 rows"):
        export_model(build("llama"), tokenizer.to_str(), tmp_path / "out")


def test_the_card_tells_config_data_and_metrics(build, tokenizer, tmp_path):
    config = {
        "seed_everything": 7,
        "model": {"architecture": {"hidden_size": 48}, "optimizer": {"class_path": "lightning_llm.optim.AdamW"}},
        "data": {"corpus": "shakespeare", "path": None},
        "trainer": {"max_steps": 250, "default_root_dir": "somewhere"},
    }
    metrics = {"val_loss": 1.5, "best_val_loss": 1.25, "steps": 250, "bits_per_byte": float("nan"), "checkpoint": "x"}
    record = SourceRun("best.ckpt", 200, metrics, config)
    export_model(build("gpt2"), tokenizer.to_str(), tmp_path / "out", record=record)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "as `GPT2LMHeadModel`" in card
    assert "`best.ckpt`, saved at optimizer step 200" in card
    assert "| best validation loss (nats per token) | 1.25 |" in card
    assert "bits per byte" not in card  # it was not measured
    assert "| num_attention_heads | 6 |" in card
    head, *blocks = card.split("```yaml\n")
    data, training = (yaml.safe_load(block.split("```")[0]) for block in blocks)
    assert data == {"data": {"corpus": "shakespeare"}}
    assert training["seed_everything"] == 7
    assert training["trainer"] == {"max_steps": 250}
    assert yaml.safe_load(head.split("---")[1])["library_name"] == "transformers"


def test_no_value_of_a_config_ends_its_block_in_the_card(build):
    hostile = {"data": {"corpus": "a\n```\n# headline\n````\n[link](http://x)"}}
    card = model_card(build("gpt2").config, "LlamaForCausalLM", None, SourceRun("x.ckpt", 7, None, hostile))
    begin = card.index("`````yaml\n")
    block = card[begin : card.index("\n`````", begin)]
    assert yaml.safe_load(block.partition("\n")[2]) == hostile
    assert card.count("```yaml\n") == 2  # that of the training has three


def test_parameters_of_a_loss_are_left_out(build, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "parts"))
    export_model(build("llama", loss="multi_token.MultiToken"), None, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert not [name for name in file.keys() if "objective" in name]  # noqa: SIM118
    AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
