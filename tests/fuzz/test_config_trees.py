"""Configs with one to three edits: fit, check, validate, estimate, plan and compare answer right or in one line."""

import json

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lightning_llm import ModelConfig, Transformer
from lightning_llm.checkpoints.reading import load_transformer
from tests.fuzz import watch
from tests.fuzz.conftest import CONFIG, SMALL, Subject, amount
from tests.fuzz.mutations import edited, edited_bytes, edits, raw_edits

RUN = "runs/tiny/version_0"
TREES = {"tiny.yaml": CONFIG, "small.yaml": SMALL}
LONG = {"max_steps", "num_workers", "num_nodes", "devices", "strategy", "accelerator", "trainer", "limit_val_batches"}


def written(tree, raw):
    """The bytes of a config."""
    text = yaml.dump(tree, Dumper=yaml.SafeDumper, allow_unicode=False)
    return edited_bytes(text.encode("utf-8", "surrogatepass"), raw)


def read(content):
    """What a YAML parser finds in it: options by name, or nothing that a program could use."""
    try:
        found = yaml.load(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # as the commands do
    except (yaml.YAMLError, UnicodeError, RecursionError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def names_data(tree):
    data = tree.get("data")
    return isinstance(data, dict) and not {"store", "mixture"}.isdisjoint(data)


def words_of(command, name):
    options = {
        "validate": ["--ckpt_path", RUN],
        "estimate": ["--json", "out.json"],
        "plan": ["--memory", "1GiB", "--out", "planned.yaml"],
    }
    return [command, "--config", name, *options.get(command, [])]


def check_result(command, result, work, content):
    """A config that is accepted means what it says."""
    tree = read(content)
    assert tree is not None
    if command == "check":
        assert result.out.splitlines()[-1] == "ok"
        assert not [name for name in result.made if "runs/" in name]
    elif command == "estimate":
        report = json.loads((work / "out.json").read_text())
        fields = dict((tree.get("model") or {}).get("architecture") or {})
        config = ModelConfig(**{"vocab_size": 280, **{k: v for k, v in fields.items() if v is not None}})
        if config.num_hidden_layers <= 50:
            with torch.device("meta"):
                assert report["parameters"]["all"] == sum(p.numel() for p in Transformer(config).parameters())
    elif command == "plan":
        assert yaml.safe_load((work / "planned.yaml").read_text())["model"]["architecture"]
    elif command == "fit":
        runs = [path.parent for path in work.glob("runs/*/*/summary.json")]
        assert runs
        assert all(isinstance(json.loads((run / "summary.json").read_text())["val_loss"], float) for run in runs)
        assert all(load_transformer(file) for run in runs for file in run.glob("checkpoints/best.ckpt"))


@pytest.mark.parametrize(
    ("commands", "is_slow"),
    [(("estimate", "plan"), True), (("check", "check", "validate", "fit"), False)],
    ids=["accounting", "training"],
)
def test_a_config_means_what_it_says_or_is_refused(world, commands, is_slow):
    subject = Subject("configs")

    @amount(10, is_slow)
    @given(st.sampled_from(commands), st.sampled_from(sorted(TREES)), edits(most=2), raw_edits())
    def draw(command, name, drawn, raw):
        tree, touched = edited(TREES[name], drawn)
        if command == "fit" and any(LONG & set(map(str, keys)) for keys in touched):
            command = "check"  # of the config of a long run, or of several processes
        if command in ("check", "validate", "fit") and not names_data(tree):
            command = "estimate"  # the others would begin to prepare the default text
        content = written(tree, raw)
        subject.count(read(content) is not None)
        parts = ["stores/s", "stores/t", *([RUN] if command == "validate" else [])]
        with world.copy(*parts) as (root, work):
            (work / name).write_bytes(content)

            def act():
                story = f"{name} with {drawn} {raw}, at {touched}:\n{content[:1500]!r}"
                result = watch.run(words_of(command, name), root, work, story)
                if result.status == 0:
                    subject.succeeded += 1
                    watch.correct(lambda: check_result(command, result, work, content), command, story)

            act()

    name = sorted(TREES)[0]
    content = written(TREES[name], [])
    with world.copy("stores/s", "stores/t") as (root, work):  # the draws may all be mistakes
        (work / name).write_bytes(content)
        result = watch.run(words_of(commands[0], name), root, work, "as it was written")
        assert result.status == 0
        check_result(commands[0], result, work, content)
    subject.succeeded = 1
    draw()
    subject.check()


def test_the_record_of_a_run_is_compared_or_refused(world):
    subject = Subject("records")
    trees = {name: (world.template / RUN / name) for name in ("config.yaml", "summary.json", "status.json")}
    trees = {name: yaml.safe_load(path.read_text()) for name, path in trees.items()}

    @amount(10)
    @given(st.sampled_from(["config.yaml", "config.yaml", "summary.json", "status.json"]), edits(), raw_edits())
    def draw(name, drawn, raw):
        tree, touched = edited(trees[name], drawn)
        is_yaml = name.endswith(".yaml")
        content = written(tree, raw) if is_yaml else edited_bytes(json.dumps(tree).encode(), raw)
        subject.count(read(content) is not None)
        with world.copy(RUN) as (root, work):
            (work / RUN / name).write_bytes(content)

            def act():
                story = f"{name} with {drawn} {raw}, at {touched}:\n{content[:1500]!r}"
                result = watch.run(["compare", "runs", "--format", "json"], root, work, story)
                if result.status == 0:
                    subject.succeeded += 1
                    watch.correct(lambda: json.loads(result.out), "compare", story)

            act()

    draw()
    subject.check()
