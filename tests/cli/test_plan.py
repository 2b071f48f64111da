"""The command ``plan``: what it chooses, prints and writes, that ``fit`` takes it, and how it answers mistakes."""

import json
from functools import partial
from pathlib import Path

import pytest
import yaml

from lightning_llm.__main__ import main
from lightning_llm.cli.train import cli_main

ARCHITECTURE = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL = ("--data.tokenizer=char", "--keep_freed_memory=False", "--trainer.log_every_n_steps=1")
LEAST_LINE = "the smallest that fits is "


pytestmark = pytest.mark.usefixtures("traced_once")


@pytest.fixture
def config(write_config):
    """``config(section={…}, …)`` writes a config and returns its path."""
    data = {"context_length": 16, "global_batch_size": 8, "seed": 5}
    return partial(write_config, model={"architecture": ARCHITECTURE}, data=data)


def run(tmp_path, *words):
    assert main(["plan", *words, "--json", str(tmp_path / "out.json")]) == 0
    return json.loads((tmp_path / "out.json").read_text())


def test_the_plan_is_printed_with_its_reasons(config, tmp_path, capsys):
    report = run(tmp_path, "--config", config(), "--memory", "1200KB")
    out = capsys.readouterr().out
    chosen = report["chosen"]
    assert chosen["memory"]["peak"] <= 1_200_000
    assert chosen["micro_batch_size"] * chosen["accumulation"] == 8
    assert f"micro_batch_size {chosen['micro_batch_size']}: the next best, " in out
    assert f"recompute {chosen['recompute']}: the next best, " in out
    assert "peaks of this device are assumed" in out
    assert f"predicted peak {chosen['memory']['peak'] / 2**20:.2f} MiB, at" in out
    row = next(line for line in out.splitlines() if line.startswith("  * "))
    assert f"{chosen['seconds']:.4g}" in row
    assert report["chosen"] in report["frontier"]
    assert all(other["seconds"] >= chosen["seconds"] for other in report["next_best"].values())


def test_fit_takes_what_is_written(config, tmp_path, text_file, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = {"architecture": {**ARCHITECTURE, "max_position_embeddings": 16}, "memory_budget": "1TB"}
    trainer = {"max_steps": 1, "accelerator": "cpu", "precision": "bf16-true", "accumulate_grad_batches": 3}
    mine = config(
        model=model, trainer=trainer, data={"context_length": 16, "global_batch_size": 8, "path": str(text_file)}
    )
    chosen = run(tmp_path, "--config", mine, "--memory", "560KB", "--out", "plan.yaml")["chosen"]
    written = yaml.safe_load(Path("plan.yaml").read_text())
    assert "memory_budget" not in written["model"]
    assert written["trainer"] == {"max_steps": 1, "accelerator": "cpu", "precision": "bf16-true"}
    cli = cli_main(
        ["fit", "--config=plan.yaml", "--trainer.val_check_interval=1", "--trainer.limit_val_batches=1", *SMALL]
    )
    assert cli.datamodule.micro_batch_size == chosen["micro_batch_size"]
    assert cli.trainer.accumulate_grad_batches == chosen["accumulation"]
    assert cli.model.architecture.recompute == chosen["recompute"]
    assert cli.model.architecture.checkpoint_level == chosen["checkpoint_level"]
    assert cli.model.loss_chunks == chosen["loss_chunks"]


def test_on_a_gpu_the_plan_leaves_memory_free(config, tmp_path, capsys):
    large = {"architecture": {**ARCHITECTURE, "hidden_size": 1024, "num_attention_heads": 8}}
    words = ("--config", config(model=large), "--gpu", "h100", "--precision", "bf16-mixed")
    report = run(tmp_path, *words, "--memory", "90GB")
    out = capsys.readouterr().out
    chosen, reserve = report["chosen"], report["assumed"]["reserve"]
    assert report["memory"] == int(79.1 * 2**30)
    assert "83.82 GiB is more than NVIDIA H100 80GB HBM3 reports, which is 79.10 GiB" in out
    assert chosen["needed"] == pytest.approx(1.05 * chosen["memory"]["peak"] + reserve["fixed"], abs=1)
    assert "of it free: 728.00 MiB for context and libraries, and 5% of the tensors" in out
    least = run(tmp_path, *words, "--memory", "90GB", "--reserve", "0B")["chosen"]
    assert least["needed"] == least["memory"]["peak"]
    given = config("given.yaml", model={**large, "memory_budget": "2GiB", "memory_reserve": "1GiB"})
    words = ("--config", given, "--gpu", "h100", "--out", str(tmp_path / "plan.yaml"))
    assert run(tmp_path, *words, "--memory", "2GiB")["assumed"]["reserve"] == {"fixed": 2**30, "share": 0}
    assert "memory_reserve" not in yaml.safe_load((tmp_path / "plan.yaml").read_text())["model"]


def test_tf32_of_the_config_counts(config, tmp_path):
    words = ("--gpu", "H200", "--memory", "1GB", "--precision", "32-true")
    plain = run(tmp_path, "--config", config(), *words)["chosen"]["time"]["matmuls"]
    fast = run(tmp_path, "--config", config(trainer={"tf32": True}), *words)["chosen"]["time"]["matmuls"]
    assert fast < plain


def test_several_processes(config, tmp_path):
    words = ("--config", config(), "--gpu", "H200", "--world-size", "2", "--out", str(tmp_path / "plan.yaml"))
    report = run(tmp_path, *words, "--memory", "3GB")
    trainer = yaml.safe_load((tmp_path / "plan.yaml").read_text())["trainer"]
    assert trainer == {"precision": "bf16-mixed", "strategy": report["chosen"]["strategy"], "devices": 2}
    views = run(tmp_path, *words, "--memory", "3GB", "--strategy", "ddp", "--gradient-views", "--overwrite")
    assert views["chosen"]["strategy"] == "ddp"
    assert views["chosen"]["memory"]["buckets"] == 0
    written = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert written["trainer"]["strategy"]["init_args"] == {"gradient_as_bucket_view": True}


def test_state_in_bfloat16_only_where_it_is_allowed(config, tmp_path, error_line):
    optimizer = {"class_path": "lightning_llm.optim.AdamW", "init_args": {"lr": 0.01}}
    mine = config(model={"architecture": ARCHITECTURE, "optimizer": optimizer})
    assert main(["plan", "--config", mine, "--memory", "1KB"]) == 2
    least = int(error_line().split(LEAST_LINE)[1].split(" bytes")[0].replace(",", ""))
    assert run(tmp_path, "--config", mine, "--memory", f"{least}B")["chosen"]["state_dtype"] is None
    words = ["--config", mine, "--memory", f"{least - 5000}B", "--out", str(tmp_path / "plan.yaml")]
    assert main(["plan", *words]) == 2
    assert "bytes are enough: add --allow-bf16-state" in error_line()
    assert run(tmp_path, *words, "--allow-bf16-state")["chosen"]["state_dtype"] == "bfloat16"
    written = yaml.safe_load((tmp_path / "plan.yaml").read_text())["model"]["optimizer"]
    assert written == {"class_path": optimizer["class_path"], "init_args": {"lr": 0.01, "state_dtype": "bfloat16"}}


def test_later_configs_win(config, tmp_path):
    first = config()
    second = config("second.yaml", model={}, data={"global_batch_size": 6})
    chosen = run(tmp_path, "--config", first, "--config", second, "--memory", "1GB")["chosen"]
    assert (chosen["micro_batch_size"], chosen["accumulation"]) == (6, 1)


def test_nothing_is_overwritten_unless_told(config, tmp_path, error_line):
    out = tmp_path / "plan.yaml"
    out.write_text("mine\n")
    words = ["plan", "--config", config(), "--memory", "1GB", "--out", str(out)]
    assert main(words) == 2
    assert "exists: choose another file, or add --overwrite" in error_line()
    assert out.read_text() == "mine\n"
    assert main([*words, "--overwrite"]) == 0
    assert "micro_batch_size" in out.read_text()
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


def test_the_picture(config, tmp_path):
    run(tmp_path, "--config", config(), "--memory", "1200KB", "--png", str(tmp_path / "new" / "plan.png"))
    assert (tmp_path / "new" / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "sections", "expected"),
    [
        (["--memory", "1KB"], {}, LEAST_LINE),
        (["--memory", "80Gigs"], {}, "'80Gigs' is not a size: give a number with one of B, KB, MB, GB, TB, KiB, "),
        ([], {}, "the following arguments are required: --memory"),
        (["--memory", "1GB", "--gpu", "H20"], {}, "device 'H20' is not in the table: there are NVIDIA H200, "),
        (["--memory", "1GB", "--gpu", "Q9", "--precision", "bf16-mixed"], {}, "device 'Q9' is not in the table"),
        (["--memory", "1GB", "--precision", "8-bit"], {}, "precision '8-bit' is not covered: choose one of 32-true"),
        (
            ["--memory", "1GB", "--gpu", "Tesla T4", "--precision", "bf16-mixed"],
            {},
            "Tesla T4 has no bfloat16 peak in the table: use --precision 32-true",
        ),
        (["--memory", "1GB", "--world-size", "3"], {}, "global_batch_size 8 cannot be divided by 3 devices"),
        (["--memory", "1GB", "--matmul-share", "7"], {}, "--matmul-share must be above 0 and at most 1, got 7.0"),
        (["--memory", "1GB", "--link-bandwidth", "0"], {}, "--link-bandwidth must be above 0"),
        (
            ["--memory", "1GB"],
            {"model": {"architecture": {**ARCHITECTURE, "mlp": "my.own.MLP"}}},
            "the config names code from outside lightning_llm: my.own.MLP; nothing was imported",
        ),
        (["--memory", "1GB"], {"model": {"architecture": {}}}, "vocab_size is null: give the number of token ids"),
        (["--memory", "1GB"], {"data": {"global_batch_size": "many"}}, "data.global_batch_size must be a whole number"),
        (
            ["--memory", "1GB", "--allow-bf16-state"],
            {"model": {"architecture": ARCHITECTURE, "optimizer": {"class_path": "torch.optim.SGD"}}},
            "--allow-bf16-state is for lightning_llm.optim.AdamW, the optimizer is SGD",
        ),
    ],
)
def test_a_mistake_is_one_line(config, words, sections, expected, error_line):
    assert main(["plan", "--config", config(**sections), *words]) == 2
    assert expected in error_line()
