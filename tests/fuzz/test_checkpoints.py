"""Checkpoints with one to three edits: the commands that read one load the same weights or answer in one line."""

import json

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_llm.checkpoints.archives import write_atomically
from lightning_llm.checkpoints.reading import load_transformer, read_checkpoint
from tests.fuzz import watch
from tests.fuzz.conftest import Subject, amount
from tests.fuzz.mutations import edited, edited_bytes, edits, raw_edits

RUN = "runs/tiny/version_0"
FILE = f"{RUN}/checkpoints/step-00000001.ckpt"
COMMANDS = {
    "generate": [FILE, "--prompt", "a", "--max-new-tokens", "3"],
    "export": [FILE, "out"],
    "consolidate": [FILE, "--out", "out.ckpt"],
    "evaluate": [FILE, "--data", "text.txt", "--json", "out.json"],
    "check": ["--config", f"{RUN}/config.yaml", "--ckpt_path", FILE],
    "validate": ["--config", f"{RUN}/config.yaml", "--ckpt_path", FILE],
    "fit": ["--config", f"{RUN}/config.yaml", "--ckpt_path", FILE],
    "init_from": ["--config", "tiny.yaml", "--model.init_from", FILE],  # of check
}
WEIGHTS = "state_dict"


def same_weights(tensors, original, touched):
    """Each tensor is that of the original, but for those that an edit was made to."""
    changed = {keys[1] for keys in touched if keys[0] == WEIGHTS and len(keys) > 1}
    assert (WEIGHTS,) not in touched, "edits of the whole of the weights cannot leave a model"
    for name, tensor in original.items():
        if name not in changed and not is_swapped(touched):
            assert torch.equal(tensors[name], tensor), name


def is_swapped(touched):
    return any(keys[0] == WEIGHTS for keys in touched)


def check_result(command, result, work, original, touched):
    if any(len(keys) == 1 for keys in touched if keys[0] == WEIGHTS):
        return
    if command in ("generate", "evaluate", "export"):
        model, _ = load_transformer(work / FILE)
        found = {f"transformer.{name}": tensor for name, tensor in model.state_dict().items()}
        same_weights(found, original[WEIGHTS], touched)
    if command == "generate":
        assert result.out
    elif command == "evaluate":
        assert json.loads((work / "out.json").read_text())["tokens"] > 0
    elif command == "consolidate":
        same_weights(read_checkpoint(work / "out.ckpt")[WEIGHTS], original[WEIGHTS], touched)
    elif command == "export":
        assert (work / "out" / "config.json").is_file()
    elif command in ("check", "init_from"):
        assert result.out.splitlines()[-1] == "ok"
    elif command == "fit":
        assert isinstance(json.loads((work / RUN / "summary.json").read_text())["val_loss"], float)


def test_a_checkpoint_is_read_as_it_was_written_or_refused(world):
    subject = Subject("checkpoints")
    original = torch.load(world.template / FILE, weights_only=True)
    names = [*COMMANDS, "generate", "export", "evaluate", "consolidate", "generate", "export", "validate"]

    @amount(10)
    @given(st.sampled_from(names), edits(), raw_edits())
    def draw(command, drawn, raw):
        tree, touched = edited(original, drawn)
        with world.copy(RUN, "stores/s", "text.txt", "tiny.yaml") as (root, work):
            file = work / FILE
            write_atomically(tree, file)
            if raw:
                file.write_bytes(edited_bytes(file.read_bytes(), raw))
            subject.count(is_readable(file))
            if raw:
                touched.append((WEIGHTS, "any"))

            def act():
                story = f"{drawn} {raw} at {touched}"
                words = ["check" if command == "init_from" else command, *COMMANDS[command]]
                result = watch.run(words, root, work, story)
                if result.status == 0:
                    subject.succeeded += 1
                    watch.correct(lambda: check_result(command, result, work, original, touched), command, story)

            act()

    draw()
    subject.check()


def is_readable(file):
    """Whether torch's own reader takes it."""
    try:
        return isinstance(torch.load(file, weights_only=True), dict)
    except Exception:
        return False
