"""The command ``estimate``: what it prints and writes, that it costs no torch, and how it answers mistakes."""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from lightning_llm.__main__ import main
from lightning_llm.accounting import hardware, step_memory
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer
from lightning_llm.optim import MuonAdamW, param_groups

ROOT = Path(__file__).parents[2]
ARCHITECTURE = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def config(write_config):
    """``config(section={…}, …)`` writes a config and returns its path."""
    data = {"context_length": 16, "global_batch_size": 8, "micro_batch_size": 2}
    return partial(write_config, model={"architecture": ARCHITECTURE}, data=data)


def run(tmp_path, *words):
    assert main(["estimate", *words, "--json", str(tmp_path / "out.json")]) == 0
    return json.loads((tmp_path / "out.json").read_text())


def test_figures_are_those_of_the_accounting(config, tmp_path, capsys):
    report = run(tmp_path, "--config", config(), "--explain", "--precision", "32-true")
    expected = step_memory(ModelConfig(**ARCHITECTURE), rows=2, context_length=16, accumulation=4)
    memory = report["memory"]
    assert memory["peak"] == expected.peak
    assert sum(entry["bytes"] for entry in memory["at_peak"]) == memory["peak"]
    assert report["settings"]["accumulation"] == 4
    out = capsys.readouterr().out
    assert "live at the peak, by category and part of the model" in out
    assert "activations, attention" in out
    assert "attention: L·h·H·d·2" in out


def test_packed_documents_are_counted(config, tmp_path):
    found = run(tmp_path, "--config", config(data={"document_mask": True}), "--precision", "32-true")
    settings = {name: found["settings"][name] for name in ("rows", "context_length", "accumulation")}
    expected = step_memory(ModelConfig(**ARCHITECTURE), document_mask=True, **settings)
    assert found["memory"]["peak"] == expected.peak
    assert found["settings"]["document_mask"] is True


@pytest.mark.parametrize(
    ("path", "words", "state"),
    [("torch.optim.Adamax", [], 2), ("pytorch_optimizer.ScheduleFreeAdamW", ["--trust-code"], 2)],
)
def test_the_state_of_an_optimizer_that_is_not_listed_is_measured(path, words, state, config, tmp_path):
    file = config(model={"architecture": ARCHITECTURE, "optimizer": path})
    memory = run(tmp_path, "--config", file, "--precision", "32-true", *words)["memory"]
    assert memory["optimizer_state"] == pytest.approx(state * memory["parameters"], rel=0.01)


def first_line(capsys):
    return capsys.readouterr().out.splitlines()[0]


def test_the_first_line_is_a_sentence(config, tmp_path, capsys):
    report = run(tmp_path, "-c", config(), "--precision", "32-true")
    peak, parameters = report["memory"]["peak"], report["parameters"]["all"]
    needs = f"The model has {parameters:,} parameters, and training it needs {peak / 2**20:.2f} MiB of memory"
    assert first_line(capsys) == f"{needs}. Give --gpu to estimate the time."
    words = ("--config", config(), "--precision", "32-true", "--gpu", "rtx 4090", "--world-size", "2")
    seconds = run(tmp_path, *words, "--utilization", "0.001")["time"]["seconds_per_step"]
    says = f" on each device. At 0.1 % of the peak of NVIDIA GeForce RTX 4090, a step takes {1000 * seconds:.3g} ms."
    assert first_line(capsys).endswith(says)
    run(tmp_path, *words, "--steps", "100000000000")
    line = first_line(capsys)
    assert "At an assumed 40 % of the peak of NVIDIA GeForce RTX 4090, a step takes " in line
    assert re.search(r"and 100,000,000,000 steps take [\d.]+ hours\.$", line)


def test_the_config_of_a_run_knows_its_vocabulary(tiny, tmp_path, capsys):
    cli = tiny("fit", **{"trainer.max_steps": 1})
    file = "runs/run/version_0/config.yaml"
    content = yaml.safe_load(Path(file).read_text())
    assert content["model"]["architecture"]["vocab_size"] is None
    assert content["data"]["store"] is None
    expected = sum(parameter.numel() for parameter in cli.model.transformer.parameters())
    assert run(tmp_path, "-c", file)["parameters"]["all"] == expected
    Path("more.yaml").write_text("data: {micro_batch_size: 1}\n")
    assert run(tmp_path, "-c", file, "-c", "more.yaml")["parameters"]["all"] == expected
    assert main(["plan", "-c", file, "--memory", "1GB", "--gpu", "h100"]) == 0
    assert "1 × NVIDIA H100 80GB HBM3" in capsys.readouterr().out
    Path("other.yaml").write_text("data: {path: other.txt}\n")  # whose vocabulary the checkpoint does not know
    assert main(["estimate", "-c", file, "-c", "other.yaml"]) == 2
    assert "other.txt" in capsys.readouterr().err
    Path("copy.yaml").write_text(Path(file).read_text())
    assert run(tmp_path, "-c", "copy.yaml")["parameters"]["all"] == expected  # the store is known


@pytest.mark.parametrize(("data", "size"), [({"tokenizer": "char", "path": "a.txt"}, 3), ({"tokenizer": "byte"}, 256)])
def test_text_and_tokenizer_tell_the_vocabulary(config, tmp_path, monkeypatch, capsys, data, size):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("abcab")
    sizes = {"context_length": 16, "global_batch_size": 8}
    file = config(model={"architecture": {**ARCHITECTURE, "vocab_size": None}}, data={**data, **sizes})
    assert run(tmp_path, "-c", file)["parameters"]["head"] == size * 32
    said = capsys.readouterr().out
    assert "a step: 1 × 8 rows of 16 tokens, precision " in said
    assert not any(word in said for word in ("None", "False", "{", "[", "state_per_parameter", "optimizer_state"))


@pytest.mark.slow
def test_a_part_in_the_current_folder_is_found(config, tmp_path):
    (tmp_path / "own_part.py").write_text("from torch import nn\n\nclass MLP(nn.Identity):\n    pass\n")
    file = config(model={"architecture": {**ARCHITECTURE, "mlp": "own_part.MLP"}})
    words = [sys.executable, "-m", "lightning_llm", "estimate", "-c", file, "--trust-code"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert "parameters and FLOPs of mlp own_part.MLP were measured" in done.stdout, done.stderr


def test_damaged_checkpoints_do_not_know_the_vocabulary(finished, tmp_path):
    run_folder = Path("runs/run/version_0")
    first, *_ = sorted((run_folder / "checkpoints").glob("*.ckpt"))
    first.unlink()
    first.write_bytes(b"PK")
    assert run(tmp_path, "-c", str(run_folder / "config.yaml"))["parameters"]["all"]


def test_days_of_a_run_at_a_given_utilization(config, tmp_path):
    words = ("--config", config(), "--gpu", "H200", "--steps", "1000")
    time = run(tmp_path, *words, "--precision", "32-true", "--utilization", "0.5")["time"]
    flops = run(tmp_path, *words)["flops"]
    assert time["days"] == pytest.approx((flops["forward"] + flops["backward"]) * 1000 / (67e12 * 0.5) / 86400)
    assert not time["utilization_is_assumed"]
    assert run(tmp_path, *words)["time"]["utilization_is_assumed"]


def test_the_largest_batch_fits_and_one_more_row_does_not(config, tmp_path):
    words = ("--memory", "4MB", "--precision", "32-true")
    rows = run(tmp_path, "--config", config(), *words)["largest_batch"]["rows"]
    settings = {"context_length": 16, "accumulation": 4}
    peaks = [step_memory(ModelConfig(**ARCHITECTURE), rows=n, **settings).peak for n in (rows, rows + 1)]
    assert peaks[0] <= 4_000_000 < peaks[1]


def test_buckets_of_ddp_are_as_large_as_the_gradients(config, tmp_path):
    words = ("--config", config(), "--world-size", "2")
    alone = run(tmp_path, "--config", config())["memory"]
    assert run(tmp_path, *words)["memory"]["ddp_buckets"] == alone["gradients"]
    assert run(tmp_path, *words, "--gradient-views")["memory"]["ddp_buckets"] == alone["ddp_buckets"] == 0


@pytest.mark.parametrize("state_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 1, "qk_norm": True},
        {"mlp": "gelu", "mlp_bias": True, "attention_bias": True, "norm": "layernorm", "position": "learned"},
    ],
)
def test_state_of_muon_is_that_of_the_real_optimizer(config, tmp_path, state_dtype, precision, changes):
    arguments = {} if state_dtype is None else {"state_dtype": state_dtype}
    optimizer = {"class_path": "lightning_llm.optim.MuonAdamW", "init_args": arguments}
    file = config(model={"architecture": {**ARCHITECTURE, **changes}, "optimizer": optimizer})
    memory = run(tmp_path, "--config", file, "--precision", precision)["memory"]
    model = Transformer(ModelConfig(**ARCHITECTURE, **changes))
    model.to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    real = MuonAdamW(param_groups(model), **arguments)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    real.step()
    saved = [value for own in real.state_dict()["state"].values() for value in own.values() if torch.is_tensor(value)]
    assert memory["optimizer_state"] == sum(tensor.nbytes for tensor in saved)
    alone = run(
        tmp_path, "--config", config(model={"architecture": {**ARCHITECTURE, **changes}}), "--precision", precision
    )
    saving = alone["memory"]["optimizer_state"] - memory["optimizer_state"]
    assert alone["memory"]["peak"] - memory["peak"] == saving > 0


def test_state_in_bfloat16_and_shards(config, tmp_path):
    alone = run(tmp_path, "--config", config())["memory"]
    optimizer = {"class_path": "lightning_llm.optim.AdamW", "init_args": {"state_dtype": "bfloat16"}}
    in_config = config(model={"architecture": ARCHITECTURE, "optimizer": optimizer})
    assert run(tmp_path, "--config", in_config)["memory"]["optimizer_state"] == alone["optimizer_state"] / 2
    half = run(tmp_path, "--config", config(), "--state-dtype", "bfloat16")["memory"]
    assert alone["peak"] - half["peak"] == alone["optimizer_state"] / 2
    words = ("--config", config(trainer={"strategy": "fsdp2", "devices": 2}))
    shard = run(tmp_path, *words)
    assert shard["settings"]["world_size"] == 2
    assert shard["memory"]["optimizer_state"] == alone["optimizer_state"] / 2
    assert shard["memory"]["gathered"] > shard["memory"]["ddp_buckets"] == 0
    assert run(tmp_path, *words, "--strategy", "ddp")["memory"]["gathered"] == 0


def test_on_a_gpu_the_memory_needed_has_a_reserve(config, tmp_path, capsys):
    words = ("--config", config(), "--gpu", "h100", "--memory", "2GiB")
    report = run(tmp_path, *words)
    memory = report["memory"]
    assert memory["needed"] == pytest.approx(1.05 * memory["peak"] + 728 * 2**20, abs=1)
    assert "of the device, with a reserve" in capsys.readouterr().out
    freed = run(tmp_path, *words, "--reserve", "0B")
    assert freed["memory"]["needed"] == memory["peak"]
    assert freed["largest_batch"]["rows"] > report["largest_batch"]["rows"]
    assert (
        run(tmp_path, "--config", config())["memory"]["needed"] == run(tmp_path, "--config", config())["memory"]["peak"]
    )


def test_deferred_reduction_is_read_from_the_config(config, tmp_path):
    sharded = {"class_path": "lightning_llm.training.distributed.ShardedStrategy"}
    deferred = {**sharded, "init_args": {"defer_reduction": True}}
    for strategy, name in (("fsdp2", "fsdp2"), (sharded, "fsdp2"), ("fsdp2_deferred", "fsdp2_deferred")):
        words = ("--config", config(trainer={"strategy": strategy, "devices": 2}))
        assert run(tmp_path, *words)["settings"]["strategy"] == name
    words = ("--config", config(trainer={"strategy": deferred, "devices": 2}), "--micro-batch-size", "1")
    assert run(tmp_path, *words)["settings"]["strategy"] == "fsdp2_deferred"
    gradients = run(tmp_path, *words)["memory"]["gradients"]
    assert gradients == 2 * run(tmp_path, *words, "--strategy", "fsdp2")["memory"]["gradients"]


def test_configs_are_composed_and_the_precision_is_said(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(hardware, "CPU_INFO", tmp_path / "none")
    first = config()
    Path(tmp_path, "second.yaml").write_text("data: {global_batch_size: 4}\n", encoding="utf-8")
    settings = run(tmp_path, "--config", first, "--config", str(tmp_path / "second.yaml"))["settings"]
    assert (settings["rows"], settings["accumulation"], settings["precision"]) == (2, 2, "32-true")
    assert "precision auto is 32-true: the CPU has no bf16 in hardware" in capsys.readouterr().out
    assert run(tmp_path, "--config", first, "--gpu", "H200")["settings"]["precision"] == "bf16-mixed"


@pytest.mark.parametrize(
    ("sections", "note"),
    [
        ({"trainer": {"capture": True}}, "capture: pool not counted"),
        (
            {"model": {"architecture": ARCHITECTURE, "compile_mode": "default"}},
            "memory is that of eager code; compiled code needs more or less (docs/accounting.md)",
        ),
    ],
)
def test_what_is_left_out_is_named(config, tmp_path, capsys, sections, note):
    assert note not in run(tmp_path, "--config", config())["notes"]
    assert note in run(tmp_path, "--config", config(**sections))["notes"]
    assert f"\n{note}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sections", "expected"),
    [
        (["--gpu", "H20"], {}, "device 'H20' is not in the table: there are NVIDIA H200, "),
        (["--memory", "80Gigs"], {}, "'80Gigs' is not a size: give a number with one of B, KB, MB, GB, TB, KiB, "),
        (["--memory", "10kB"], {}, "'10kB' is not a size"),
        (["--memory", "1KiB"], {}, "the smallest that fits is "),
        (
            ["--precision", "8-bit"],
            {},
            "precision '8-bit' is not covered: choose one of 32-true, bf16-true, bf16-mixed",
        ),
        (["--world-size", "3"], {}, "data.global_batch_size 8 cannot be divided by 3 devices"),
        (["--gpu", "H200", "--utilization", "50"], {}, "--utilization must be above 0 and at most 1, got 50.0"),
        ([], {"model": {"architecture": {}}}, "vocab_size is null: give the number of token ids (--vocab-size)"),
        ([], {"model": {"architecture": ARCHITECTURE, "optimizer": "my.Own"}}, "optimizer 'my.Own' is not known"),
        (
            [],
            {"model": {"architecture": ARCHITECTURE, "optimizer": "pytest.Own"}},
            "code from outside lightning_llm: pytest.Own",
        ),
        (
            ["--state-dtype", "bfloat16"],
            {"model": {"architecture": ARCHITECTURE, "optimizer": {"class_path": "torch.optim.Adam"}}},
            "state_dtype is an option of lightning_llm.optim.AdamW, the optimizer is Adam: leave it out",
        ),
        ([], {"model": {"architecture": {**ARCHITECTURE, "num_hidden_layers": 10**8}}}, "must be at most 2000, got"),
        ([], {"model": {"architecture": {**ARCHITECTURE, "hidden_size": 10**6}}}, "parameters, more than 1e+13"),
        ([], {"model": {"architecture": {**ARCHITECTURE, "vocab_size": 10**12}}}, "parameters, more than 1e+13"),
        ([], {"model": [1]}, "model in the config must have options, got [1]"),
    ],
)
def test_a_mistake_is_one_line(config, words, sections, expected, error_line):
    assert main(["estimate", "--config", config(**sections), *words]) == 2
    assert expected in error_line()


def test_a_missing_config_is_one_line(error_line):
    assert main(["estimate", "--config", "nowhere.yaml"]) == 2
    assert "nowhere.yaml" in error_line()


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"model": {"architecture": ARCHITECTURE, "optimizer": ["AdamW"]}}, "model.optimizer must be a name"),
        ({"model": {"architecture": ARCHITECTURE, "optimizer": {"class_path": True}}}, "model.optimizer.class_path"),
        (
            {"model": {"architecture": ARCHITECTURE, "optimizer": {"class_path": "torch.optim.SGD", "init_args": 3}}},
            "init_args in the config must have options",
        ),
        ({"model": {"architecture": {**ARCHITECTURE, "depth": 3}}}, "model.architecture.depth is unknown"),
        ({"model": {"architecture": ARCHITECTURE, "loss_chunks": "two"}}, "model.loss_chunks must be a whole number"),
        ({"data": {"document_mask": "yes please"}}, "data.document_mask must be true or false, got 'yes please'"),
        ({"data": {"global_batch_size": 10**30}}, "data.global_batch_size must be a whole number from 1"),
        ({"trainer": {"precision": [1]}}, "trainer.precision must be a name"),
        ({"trainer": {"num_nodes": {"x": 1}}}, "trainer.num_nodes must be a whole number"),
        ({"trainer": {"max_steps": "all"}}, "trainer.max_steps must be a whole number"),
        ({"trainer": {"strategy": {"class_path": 2}}}, "trainer.strategy.class_path must be a name"),
    ],
)
def test_a_value_of_another_type_is_one_line(config, sections, expected, error_line):
    assert main(["estimate", "--config", config(**sections)]) == 2
    assert expected in error_line()
