"""Command lines with one to three edits, of every command: an answer, or one line that says what is wrong."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_llm.__main__ import SUBCOMMANDS, TRAINER_WORDS
from tests.fuzz import watch
from tests.fuzz.conftest import Subject, amount
from tests.fuzz.mutations import WORD_KINDS, edited_words, edits

RUN, CKPT = "runs/tiny/version_0", "runs/tiny/version_0/checkpoints/best.ckpt"
TRAINING = [
    *("--config", "tiny.yaml", "--model.architecture.hidden_size", "16", "--model.optimizer.lr=0.01"),
    *("--data.context_length=4", "--data.micro_batch_size", "1", "--trainer.gradient_clip_val", "0.5"),
    *("--seed_everything=7", "--trainer.max_steps=2", "--model.schedule=lightning_llm.optim.Constant"),
    *("--trainer.logger=false", "--trainer.default_root_dir=runs"),
]
LINES = {  # the first of each command ends well as it is
    "fit": [TRAINING],
    "check": [TRAINING],
    "validate": [["--ckpt_path", RUN, "--data.eval_batch_size=2", "--trainer.limit_val_batches", "1"]],
    "test": [["--ckpt_path", CKPT, "--config", f"{RUN}/config.yaml", "--trainer.limit_test_batches=1"]],
    "predict": [["--ckpt_path", RUN, "--data.predict_prompts", '["a", "b 1"]']],
    "prepare": [
        ["text.txt", "--tokenizer", "byte", "--test-fraction", "0.1", "--out", "made/store"],
        ["text.txt", "--tokenizer", "bpe", "--vocab-size", "270", "--text-key", "text", "--shard", "1/2", "--out", "m"],
        ["--merge", "shards/u"],
        [
            "text.txt",
            "--tokenizer",
            "stores/s/tokenizer.json",
            "--begin-of-text=none",
            "--end-of-text",
            "a",
            "--out",
            "m",
        ],
    ],
    "tokenizer": [["train", "text.txt", "--vocab-size=270", "--special-token", "<end>", "--out", "made.json"]],
    "data": [
        ["inspect", "stores/s", "--split", "train", "--start", "3", "--tokens", "9"],
        ["verify", "stores/s"],
        ["inspect", "stores/s", "--raw-dtype", "uint16", "--vocab-size", "280"],
    ],
    "generate": [
        [RUN, "--prompt", "a", "--num-samples=2", "--temperature", "0.7", "--top-k", "5", "--top-p", "0.9", "--seed=3"],
        [
            "hf",
            "--min-p",
            "0.1",
            "--repetition-penalty=1.2",
            "--stop",
            "\n",
            "--device",
            "cpu",
            "--prompt-file=text.txt",
        ],
        [CKPT, "-", "--interactive"],
    ],
    "evaluate": [[RUN, "--data", "text.txt", "--stride", "4", "--per-document", "--json", "made.json"]],
    "export": [[RUN, "made", "--max-shard-size", "8KB"]],
    "import": [["hf", "--out", "made.ckpt"]],
    "consolidate": [[CKPT, "--out", "made.ckpt"]],
    "dashboard": [["runs", "--port", "0"]],
    "runs": [["runs", RUN, "--json", "made.json"], ["clean", "runs", "--yes"]],
    "compare": [["runs", RUN, "--format", "json"]],
    "estimate": [
        ["-c", f"{RUN}/config.yaml", "--gpu", "rtx 4090", "--precision=bf16-true"],
        ["--config", "tiny.yaml", "--config", "small.yaml", "--vocab-size=300", "--explain", "--memory", "1GiB"],
        [
            "--config",
            "tiny.yaml",
            "--world-size",
            "2",
            "--strategy",
            "ddp",
            "--micro-batch-size=2",
            "--json",
            "made.json",
        ],
        ["--config=tiny.yaml", "--gpu", "H200", "--precision=bf16-mixed", "--steps", "9", "--utilization", "0.4"],
    ],
    "plan": [
        ["--config", "tiny.yaml", "--memory", "1GiB", "--out", "made.yaml", "--png", "made.png", "--allow-bf16-state"],
        [
            "--config",
            "small.yaml",
            "--memory=9MB",
            "--matmul-share",
            "0.5",
            "--link-bandwidth",
            "1GB",
            "--json=m.json",
        ],
    ],
    "same": [
        ["--config", "tiny.yaml", "--vary", "loss_chunks=1", "--json", "made.json"],
        ["-c", "small.yaml", "--vary=model.architecture.recompute=mlp", "--part", "mlp", "--device", "cpu", "--table"],
    ],
    "ablate": [
        ["power", "--baseline", "tiny.yaml", "--vary", "model.architecture.mlp=relu", "--spread", "0.01", "--pairs=5"],
        ["status", "out"],
        ["extend", "out", "--pairs", "2", "--variants", "relu", "--workers=1"],
        ["run", "--pairs", "1", "small.yaml"],
    ],
}
# What rightly takes long where its value is another or, of the second kind, where it is left out
ENDLESS = (
    "--trainer.max_steps",
    "--data.num_workers",
    "--max-new-tokens",
    "--num-samples",
)
NEEDED = {"fit": ("--config",), "check": ("--config",)}
PARTS = ["stores/s", "stores/t", "shards", "runs", "hf", "text.txt", "tiny.yaml", "small.yaml"]


def is_understood(result):
    """Whether the words got past the parser of the options."""
    return not re.search(r"--help explains|unknown command|error: [\w.]+: (\w+: )?expected ", result.err)


def asks_for_long(words, line):
    """A change that rightly takes long: more steps, more texts, a large corpus, large matrices."""
    asked = options(words)
    changed = [option for option in asked if option not in options(line) and option[0].startswith(ENDLESS)]
    return changed or not {*NEEDED.get(words[0], ())} <= {name for name, _ in asked}


def options(words):
    """Each option with its value."""
    following = [*words[1:], ""]
    pairs = [(word, after) for word, after in zip(words, following, strict=True) if word.startswith("--")]
    return [(*word.split("=", 1),) if "=" in word else (word, after) for word, after in pairs]


def check_result(result, work):
    """What was written is whole."""
    for name in ("made.json", "m.json"):
        if (work / name).is_file():
            json.loads((work / name).read_text())
    assert not [name for name in result.made if ".tmp" in name]


def test_the_lines_are_of_all_commands():
    assert LINES.keys() == {*TRAINER_WORDS, *SUBCOMMANDS}


@pytest.mark.parametrize(
    ("commands", "draws"),
    [(("fit", "check", "validate", "test", "predict"), 10), (tuple(SUBCOMMANDS), 30)],
    ids=["trainer", "tools"],
)
def test_a_command_line_is_done_or_refused(world, commands, draws):
    subject = Subject("words")

    def act(words, root, work, story):
        result = watch.run(words, root, work, story)
        if result.status == 0:
            subject.succeeded += 1
            watch.correct(lambda: check_result(result, work), words[0], story)
        return result

    # Ten draws may all be refused, so that no correct result is looked at: first, a line of each command without edits
    for command in commands:
        with world.copy(*PARTS) as (root, work):
            result = act([command, *LINES[command][0]], root, work, "without edits")
            assert result.status == 0, f"{command}: {result.err}"

    @amount(draws)
    @given(st.sampled_from(commands), st.integers(0, 5), edits(WORD_KINDS, most=2))
    def draw(command, number, drawn):
        line = LINES[command][number % len(LINES[command])]
        words = edited_words([command, *line], drawn, keep=1)
        if asks_for_long(words, line):
            words = [words[0], *line]
        with world.copy(*PARTS) as (root, work):
            subject.drawn += 1
            subject.parsed += is_understood(act(words, root, work, f"{drawn}"))

    draw()
    subject.check()
