"""Every config of configs/ trains two steps, made small."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from lightning_llm.cli.train import cli_main
from tests.docs.markdown import ROOT
from tests.docs.scaled import MODEL, TRAINER
from tests.docs.test_repository import CONFIGS, OVERLAYS

UNCOMPILED = "--model.compile_mode=null"  # tests/model/test_compiled.py compiles
SMALL = [*MODEL, *TRAINER, UNCOMPILED, "--data.vocab_size=300", "--trainer.max_steps=2"]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_config_trains_two_steps(config, text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli = cli_main(["fit", f"--config={config}", f"--data.path={text_file}", *SMALL])
    assert cli.trainer.global_step == 2
    assert (Path(cli.trainer.log_dir) / "summary.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_overlays_train_over_another_config_and_leave_its_name(overlay, text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = ROOT / "configs" / "shakespeare-char.yaml"
    options = [f"--config={base}", f"--config={overlay}", f"--data.path={text_file}", *SMALL]
    with mock.patch.dict(os.environ):  # to which Lightning adds the address of the group
        cli = cli_main(["fit", *options, "--trainer.devices=1"])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    assert cli.trainer.global_step == 2
    assert Path(cli.trainer.log_dir).parent.name == "shakespeare-char"
    strategies = {"ddp": "DDPStrategy", "fsdp": "ShardedStrategy", "memory-profile": "SingleDeviceStrategy"}
    assert type(cli.trainer.strategy).__name__ == strategies[overlay.stem]
