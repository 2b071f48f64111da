"""A line about a mistake ends with the page that explains the command or the option."""

import re
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.cli.commands import COMMANDS, FIRST, OPTIONS, with_page
from lightning_llm.cli.interrupts import interrupts

ROOT = Path(__file__).parents[2]
SHALLOW = ("--model.architecture.num_hidden_layers", "1", "--model.architecture.mlp", "gelu")  # is traced fast
SAMPLES = "lightning_llm.training.callbacks.SampleText"
MISTAKES = [  # one for each page at the least, as a user makes it
    (["fit", "--config", "nowhere.yaml"], "docs/first-steps.md"),
    (["fitt"], "docs/first-steps.md"),
    (["check", "--config", "nowhere.yaml"], "docs/resume.md"),
    (["fit", "--ckpt_path", "last"], "docs/resume.md"),
    (["prepare", "nowhere.txt"], "docs/data.md"),
    (["prepare", "--vocab", "3"], "docs/data.md"),
    (["fit", "--data.context_length", "0"], "docs/data.md"),
    (["fit", "--data.store", "nowhere", "--data.raw_dtype", "uint7"], "docs/data.md"),
    (["tokenizer", "train", "nowhere.txt"], "docs/generation.md"),
    (["generate", "nowhere"], "docs/generation.md"),
    (["export", "nowhere", "out"], "docs/interop.md"),
    (["fit", "--model.init_from", "nowhere"], "docs/interop.md"),
    (["consolidate", "nowhere", "--out", "x"], "docs/distributed.md"),
    (["fit", "--trainer.devices", "0"], "docs/distributed.md"),
    (["dashboard", "nowhere"], "docs/dashboard.md"),
    (["fit", f"--trainer.callbacks+={SAMPLES}", "--trainer.callbacks.every_n_steps=0"], "docs/dashboard.md"),
    (["plan"], "docs/accounting.md"),
    (["fit", "--model.memory_budget", "1KiB", *SHALLOW], "docs/accounting.md"),
    (["same", "--config", "nowhere.yaml", "--vary", "all"], "docs/extending.md"),
    (["ablate", "status", "nowhere"], "docs/ablate.md"),
    (["fit", "--model.architecture.mlp", "swigloo"], "docs/extending.md"),
    (["fit", "--model.architecture.layers", "[{attention: value_residual}, {}]"], "docs/parts.md"),
    (["fit", "--model.architecture.hidden_size", "33"], "docs/reference/model.md"),
    (["fit", "--model.architecture.checkpoint_level", "7"], "docs/memory-optimized.md"),
    (["fit", "--trainer.max_stpes", "9"], "docs/config.md"),
    (["fit", "--model.loss_chunks", "-1"], "docs/memory-optimized.md"),
    (["fit", "--model.compile_mode", "fast"], "docs/speed.md"),
    (["fit", "--trainer.accelerator", "cpu", "--data.tokenizer", "char", "--trainer.capture", "true"], "docs/speed.md"),
]
PAGES = {FIRST, *(command.page for command in COMMANDS.values()), *OPTIONS}


@pytest.mark.parametrize(("words", "page"), MISTAKES, ids=lambda value: value if isinstance(value, str) else value[-1])
def test_a_mistake_names_its_page(words, page, tmp_path, monkeypatch, capsys, text_file):
    monkeypatch.chdir(tmp_path)
    steps = ["--trainer.max_steps=1"] if words[0] == "fit" else []
    text = [f"--data.path={text_file}"] if steps and "--data.store" not in words else []
    assert main([*words, *steps, *text]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"\((docs/\S+\.md)\)$", line)[1] == page, line


def test_every_page_is_there():
    assert not [page for page in PAGES if not (ROOT / page).is_file()]


def test_no_page_is_left_out_above():
    assert {page for _, page in MISTAKES} == PAGES - {"docs/memory.md"}  # for which see the next test


@pytest.mark.parametrize(
    ("command", "line", "page"),
    [
        ("fit", "lightning-llm fit: out of memory: CUDA out of memory. Tried to allocate", "docs/memory.md"),
        ("fit", "MemoryProfiler.top must be a whole number of at least 1, got 0", "docs/memory.md"),
        ("fit", "lightning-llm fit: stopped: the loss of step 3 is nan", "docs/resume.md"),
        ("fit", "process 1 on host has lost the others: connection reset; start the job again", "docs/distributed.md"),
        ("fit", "the first of two counts: data.store and model.architecture.mlp", "docs/data.md"),
        ("prepare", "a tool has one page, whatever is named: mlp, devices", "docs/data.md"),
        ("-m", "python -m benchmarks: error: stored is no bench", "benchmarks/README.md"),
        ("generate", "stored is no store", "docs/generation.md"),
        ("fit", "stored, not a word of the table", "docs/first-steps.md"),
    ],
)
def test_the_word_that_stands_first_leads(command, line, page):
    assert with_page(command, line) == f"{line} ({page})"


@pytest.mark.parametrize("page", ["docs/memory.md", "docs/reference/model.md"])
def test_a_line_that_names_a_page_keeps_it(page):
    line = f"relu2: mlp_bias is not supported ({page})"
    assert with_page("ablate", line) == line


def test_a_program_gives_the_name_of_the_outer_one_back(capsys):
    def inner(words):
        assert interrupts.program == "other"
        return 0

    before = interrupts.program
    assert main(["word"], run=inner, program="other") == 0
    assert interrupts.program == before
