"""What the documents say is so: the file tree, the links, the commands, the configs."""

import os
import re
import shlex
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml

from lightning_llm.__main__ import main
from lightning_llm.cli.dashboard import build_parser as dashboard_parser
from lightning_llm.cli.generate import build_parser as generate_parser
from lightning_llm.cli.train import cli_main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
OVERLAYS = [ROOT / "configs" / name for name in ("ddp.yaml", "fsdp.yaml")]  # only say how, over another
CONFIGS = sorted(set((ROOT / "configs").glob("*.yaml")) - set(OVERLAYS))
SMALL = [
    "--model.architecture.hidden_size=32",
    "--model.architecture.intermediate_size=64",
    "--model.architecture.num_hidden_layers=2",
    "--model.architecture.num_attention_heads=2",
    "--model.architecture.max_position_embeddings=32",
    "--data.context_length=32",
    "--data.global_batch_size=4",
    "--data.micro_batch_size=2",
    "--data.vocab_size=300",
    "--trainer.max_steps=2",
    "--trainer.val_check_interval=2",
    "--trainer.limit_val_batches=2",
    "--trainer.log_every_n_steps=1",
]


def package_files():
    return {
        str(path.relative_to(ROOT)) for path in (ROOT / "lightning_llm").rglob("*.py") if path.name != "__init__.py"
    }


def test_the_file_tree_names_every_file_and_no_other():
    tree = README.split("## Files")[1].split("```")[1]
    named = set(re.findall(r"^(lightning_llm/\S+\.py)  +\S", tree, re.M))
    assert named == package_files()


def documents():
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_links_resolve(document):
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        linked = document.parent / path if path else document
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}, (
                target
            )


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_config_trains_two_steps(config, text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli = cli_main(["fit", f"--config={config}", f"--data.path={text_file}", *SMALL])
    assert cli.trainer.global_step == 2
    assert (Path(cli.trainer.log_dir) / "summary.json").is_file()


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_overlays_train_over_another_config_and_leave_its_name(overlay, text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = ROOT / "configs" / "shakespeare-char.yaml"
    options = [f"--config={base}", f"--config={overlay}", f"--data.path={text_file}", *SMALL]
    with mock.patch.dict(os.environ):  # to which Lightning adds the address of the group
        cli = cli_main(["fit", *options, "--trainer.devices=1", "--trainer.accelerator=cpu"])
    torch.distributed.destroy_process_group()
    assert cli.trainer.global_step == 2
    assert Path(cli.trainer.log_dir).parent.name == "shakespeare-char"
    assert type(cli.trainer.strategy).__name__ == {"ddp": "DDPStrategy", "fsdp": "ShardedStrategy"}[overlay.stem]


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_overlays_say_only_how_and_are_named_in_the_readme(overlay):
    assert f"`{overlay.name}`" in README
    assert yaml.safe_load(overlay.read_text()).keys() == {"trainer"}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_named_in_the_readme(config):
    assert f"`{config.name}`" in README
    assert yaml.safe_load(config.read_text())["trainer"]["max_steps"] > 0


def test_the_readme_has_the_two_commands():
    assert "python -m pip install -e . && lightning-llm fit --config configs/quickstart.yaml\n" in README
    assert 'python -m pip install -e ".[dev]" && pytest\n' in README


def shell_commands():
    blocks = re.findall(r"```sh\n(.*?)```", README, re.S)
    lines = [line.split("&&")[-1].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("lightning-llm ")]


@pytest.mark.parametrize("command", shell_commands())
def test_readme_commands_are_understood(command, text_file, tmp_path, monkeypatch):
    """Each is run as it stands, but small, on a text that is there, below a temporary folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "my.txt").write_text(text_file.read_text())
    (tmp_path / "more.txt").write_text(text_file.read_text())
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text(text_file.read_text()[::-1])  # a copy would land in the same split
    word, *options = shlex.split(command)[1:]
    if word == "fit":
        resumes = "--ckpt_path" in options
        if resumes:
            cli_main(["fit", *options[:2], "--data.path=my.txt", *SMALL, "--trainer.max_steps=1"])
        cli = cli_main(["fit", *options, "--data.path=my.txt", *SMALL])
        assert cli.trainer.global_step == 2
    elif word == "validate":
        cli_main(["fit", "--config=configs/shakespeare-char.yaml", "--data.path=my.txt", *SMALL])
        assert "val_loss" in cli_main([word, *options]).trainer.callback_metrics
    elif word == "generate":
        assert generate_parser().parse_args(options).checkpoint == options[0]
    else:
        if word == "check":
            options.append("--data.path=my.txt")
        elif word == "bench":
            options += ["--shapes", "1x8x8x16x1", "--rounds", "1"]
        elif word in ("compare", "export"):
            cli_main(["fit", "--config=configs/shakespeare-char.yaml", "--data.path=my.txt", *SMALL])
        elif word == "dashboard":
            assert dashboard_parser().parse_args(options).runs == options  # it would run until Ctrl-C
            return
        elif word == "data":
            assert main(["prepare", "books/", "more.txt", "--vocab-size", "300", "--out", options[-1]]) == 0
        assert main([word, *options]) == 0
