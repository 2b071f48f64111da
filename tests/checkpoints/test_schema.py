"""Checkpoints from a stranger: edited by hand, built to cost hours or all memory, or holding code. One line each."""

import copy
import io
import math
import os
import pickle
import resource
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from lightning_llm.checkpoints.archives import read_archive
from lightning_llm.checkpoints.compatibility import check_described
from lightning_llm.checkpoints.reading import (
    check_run_checkpoint,
    digest,
    is_whole,
    load_transformer,
    read_checkpoint,
    read_outline,
)
from lightning_llm.checkpoints.schema import RESUME, validate
from lightning_llm.checkpoints.sharded import MARK, PROCESSES
from lightning_llm.cli import convert, inference
from lightning_llm.cli.train import cli_main
from lightning_llm.optim import AdamW, Constant
from lightning_llm.training import LanguageModel, load_checkpoint, save_checkpoint
from lightning_llm.training.initial_weights import read_initial_weights

OPTIONS = [
    "--model.architecture.hidden_size=16",
    "--model.architecture.num_hidden_layers=1",
    "--model.architecture.num_attention_heads=2",
    "--model.architecture.max_position_embeddings=16",
    "--data.tokenizer=char",
    "--data.context_length=8",
    "--data.global_batch_size=4",
    "--trainer.val_check_interval=2",
    "--trainer.limit_val_batches=1",
    "--trainer.log_every_n_steps=1",
    "--trainer.accelerator=cpu",
    "--keep_freed_memory=false",
]
FIT, EPOCH = ("loops", "fit_loop"), ("loops", "fit_loop", "epoch_loop.batch_progress")
GROUP, STATE = ("optimizer_states", 0, "param_groups", 0), ("optimizer_states", 0, "state", 0)
SHAPE, OWN = ("hyper_parameters", "architecture"), ("lightning_llm",)
WEIGHT = ("state_dict", "transformer.embed_tokens.weight")
SCHEDULE = ("lr_schedulers", 0)
GONE = object()


@pytest.fixture(scope="session")
def run(tmp_path_factory, text_file):
    """A run of two steps: its folder, the options that resume it, and what its checkpoint holds."""
    folder, before = tmp_path_factory.mktemp("run"), Path.cwd()
    os.chdir(folder)
    try:
        cli_main(["fit", f"--data.path={text_file}", "--trainer.max_steps=2", *OPTIONS])
        (checkpoint,) = folder.glob("runs/*/*/checkpoints/step-*.ckpt")
        return folder, [f"--data.path={text_file}", *OPTIONS], torch.load(checkpoint, weights_only=True)
    finally:
        os.chdir(before)


@pytest.fixture
def content(run):
    return copy.deepcopy(run[2])


def edited(part, place, new):
    """A copy of nested dicts and lists with another value at a place, or without one."""
    if not place:
        return new
    inner = part[place[0]] if len(place) > 1 else None
    changed = list(part) if isinstance(part, list | tuple) else dict(part)
    if new is GONE and len(place) == 1:
        del changed[place[0]]
    else:
        changed[place[0]] = edited(inner, place[1:], new)
    return tuple(changed) if isinstance(part, tuple) else changed


ONE, NAN = torch.tensor(1.0), torch.tensor(math.nan)
EDITS = [
    (("state_dict",), GONE, "lacks state_dict"),
    (("state_dict",), [], r"state_dict is \[\], expected a dict"),
    (WEIGHT, GONE, "embed_tokens.weight is missing"),
    (WEIGHT, "x", "embed_tokens.weight is 'x', expected a tensor"),
    (WEIGHT, torch.zeros(3, 3), r"embed_tokens.weight is \(3, 3\) there"),
    (WEIGHT, torch.zeros(35, 16, dtype=torch.int64), "embed_tokens.weight is"),
    (("state_dict", "surplus"), torch.zeros(1), "'surplus' is unexpected"),
    (("state_dict", 7), torch.zeros(1), "a name in state_dict is 7"),
    (("global_step",), GONE, "lacks global_step"),
    (("global_step",), -1, "global_step is -1, expected a whole number from 0"),
    (("global_step",), 2.5, "global_step is 2.5"),
    (("global_step",), True, "global_step is True"),
    (("global_step",), 10**600, "global_step is 1000000000"),
    (("global_step",), 3, "global_step is 3, the loops count 2 steps"),
    (("epoch",), "0", "epoch is '0', expected"),
    (("pytorch-lightning_version",), GONE, "lacks pytorch-lightning_version"),
    (("pytorch-lightning_version",), "0.9.0", "pytorch-lightning_version is '0.9.0'"),
    (("pytorch-lightning_version",), "x", "expected one of Lightning 2"),
    (("hyper_parameters",), GONE, "lacks hyper_parameters.architecture"),
    (("hyper_parameters",), 5, "hyper_parameters is 5, expected an object"),
    (("hyper_parameters", "_instantiator"), "lightning.pytorch.cli.instantiate_module", "_instantiator is"),
    (("hyper_parameters", "loss_chunks"), -1, "loss_chunks is -1"),
    (("hyper_parameters", "optimizer", "class_path"), 1, "optimizer.class_path is 1, expected text"),
    (("hyper_parameters", "optimizer", "init_args"), [], r"init_args is \[\]"),
    (("hyper_parameters", "optimizer", "init_args", "unknown"), 1, "cannot be made"),
    (SHAPE, [], r"architecture is \[\], expected an object"),
    ((*SHAPE, "unknown"), 1, "architecture.unknown is unknown"),
    ((*SHAPE, "hidden_size"), "16", "hidden_size is '16', expected a whole number"),
    ((*SHAPE, "hidden_size"), 0, "hidden_size must be at least 1"),
    ((*SHAPE, "hidden_size"), 10**18, "hidden_size must be at most"),
    ((*SHAPE, "hidden_size"), 32, "is of another model"),
    ((*SHAPE, "num_hidden_layers"), 10**6, "num_hidden_layers must be at most"),
    ((*SHAPE, "vocab_size"), None, "vocab_size is null"),
    ((*SHAPE, "vocab_size"), 3, "ids, the architecture's vocab_size is 3"),
    ((*SHAPE, "qk_norm"), "yes", "qk_norm is 'yes', expected True or False"),
    ((*SHAPE, "norm"), ["rmsnorm"], r"norm is \['rmsnorm'\], expected text"),
    ((*SHAPE, "rope_theta"), float("nan"), "rope_theta is nan, expected a number"),
    ((*SHAPE, "rope_scaling"), "x", "rope_scaling is 'x', expected a dict"),
    ((*SHAPE, "mlp"), 3, "mlp is 3, expected text"),
    (("loops",), GONE, "lacks loops"),
    ((*FIT,), {}, "loops.fit_loop.state_dict is missing"),
    ((*EPOCH, "is_last_batch"), GONE, "is_last_batch is missing"),
    ((*EPOCH, "current", "ready"), -1, "current.ready is -1"),
    ((*EPOCH, "current", "ready"), 10**6, "current counts ready 1000000"),
    ((*EPOCH, "current", "reset"), 5, "current.reset is unknown"),
    (("loops", "validate_loop"), GONE, "loops.validate_loop is missing"),
    ((*FIT, "state_dict", "combined_loader"), 3, "combined_loader is 3, expected a list"),
    (("callbacks",), [], r"callbacks is \[\]"),
    (("callbacks", "RunCheckpoints", "best_loss"), None, "best_loss is None"),
    (("callbacks", "RunCheckpoints", "best_step"), 9, "best_step is 9, global_step is 2"),
    (("callbacks", "TrainingLog"), {"loss": torch.zeros(2), "steps": 1}, "TrainingLog.loss is .*expected one number"),
    (
        ("callbacks", "TrainingLog"),
        {"loss": ONE, "count": NAN},
        "TrainingLog.count is .*expected one number",
    ),
    (("callbacks", "ResumeDiff", "options", "data.seed"), torch.zeros(2), "data.seed is a tensor"),
    (("callbacks", "InputHashes", "batches"), "x" * 16, "batches is 'xxxxxxxxxxxxxxxx', expected 16 hex digits"),
    (("callbacks", "InputHashes", "initial_values"), {"a": 1}, "initial_values.a is 1, expected text"),
    (("callbacks", "ModelCheckpoint{}"), {"best_model_path": "a/../../b", "best_model_score": None}, "elsewhere"),
    (("optimizer_states",), [], "optimizer_states is a list of 0, expected one"),
    (("optimizer_states", 0), None, r"optimizer_states\[0\] is None"),
    ((*STATE, "exp_avg"), torch.zeros(2), r"exp_avg of parameter 0 has shape \(2,\)"),
    ((*STATE, "exp_avg"), GONE, "is not the same for all parameters"),
    ((*STATE, "step"), float("inf"), "step is inf, global_step is 2"),
    ((*STATE, "step"), [], "step of parameter 0 is"),
    ((*STATE, "step"), 10**6, "step is 1000000, global_step is 2"),
    (("optimizer_states", 0, "state", 99), {}, "in no group"),
    (("optimizer_states", 0, "state", "0"), {}, "a name in"),
    ((*GROUP, "lr"), float("nan"), "lr is nan, expected a number from 0"),
    ((*GROUP, "lr"), GONE, "no lr"),
    ((*GROUP, "betas"), (0.9,), "betas must be two numbers"),
    ((*GROUP, "eps"), "x", "eps is 'x'"),
    ((*GROUP, "params"), [0, 0], "parameters twice"),
    (("lr_schedulers",), [], "lr_schedulers is a list of 0, expected one"),
    ((*SCHEDULE, "last_epoch"), 10**6, "last_epoch is 1000000"),
    ((*SCHEDULE, "base_lrs"), [float("inf")] * 4, r"base_lrs\[0\] is inf"),
    ((*SCHEDULE, "base_lrs"), [], "base_lrs is a list of 0, the optimizer has"),
    ((*SCHEDULE, "step"), 3, r"lr_schedulers\[0\].step is not part of"),
    (("TokenDataModule",), GONE, "lacks TokenDataModule"),
    (("TokenDataModule", "store"), 3, "store is 3, expected text"),
    (OWN, GONE, "lacks lightning_llm"),
    ((*OWN, "format_version"), 99, "format 99, this version reads up to 1: upgrade"),
    ((*OWN, "format_version"), GONE, "format_version is missing"),
    ((*OWN, "tokenizer"), "{}", "expected the text of a tokenizer.json"),
    ((*OWN, "execution", "precision"), "8-bit", "precision is '8-bit', expected"),
]


@pytest.mark.parametrize(("place", "new", "says"), EDITS, ids=range(len(EDITS)))
def test_an_edit_is_one_line(content, tmp_path, place, new, says):
    torch.save(edited(content, place, new), tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=says) as refusal:
        check_run_checkpoint(tmp_path / "x.ckpt")
    assert str(tmp_path / "x.ckpt") in str(refusal.value) or "cannot be made" in says
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 1000


def places(part, place=()):
    if place:
        yield place
    inner = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list | tuple) else ()
    for name, each in inner:
        yield from places(each, (*place, name))


NEW = (GONE, None, "x", -1, 2**52, 10**30, float("nan"), [1, [2]], {"reset": 3}, torch.zeros(2, 3))


def refusal_of(changed):
    try:
        validate(changed, "x", (*RESUME, "TokenDataModule"))
        check_described(changed, "x")
    except ValueError as error:
        return str(error)
    return None


def test_any_leaf_may_be_anything(content):
    """The reader accepts it with the same meaning, as a field that older versions lack, or raises a ValueError."""
    listed = [place for place in places(content) if not {"tokenizer", "ResumeDiff"} & {*map(str, place)}]
    listed = [place for place in listed if place[:3] != STATE[:3] or place[3:4] in ((), (0,))]
    found = {}
    for number, place in enumerate(listed):
        for new in NEW[number % 2 :: 2]:  # every other one: its neighbor gets the rest
            found[place, str(new)] = refusal_of(edited(content, place, new))
    accepted = [place for (place, _), refusal in found.items() if refusal is None]
    assert len(accepted) < len(found) / 4
    assert not {place[0] for place in accepted} & {"state_dict", "global_step", "pytorch-lightning_version"}
    assert not [refusal for refusal in found.values() if refusal and "\n" in refusal]


def refused_line(capsys, call):
    """What a command prints where it refuses: one line, status 2."""
    try:
        status = call()
    except SystemExit as leaving:
        status = leaving.code
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if "error:" in line]
    assert status == 2, error
    assert len(lines) == 1, error
    assert "Traceback" not in error
    return lines[0]


def commands(path, options, tmp_path):
    """Every command that reads a checkpoint, by name; none may leave anything."""
    text = next(option.removeprefix("--data.path=") for option in options if option.startswith("--data.path="))
    trained = [f"--trainer.default_root_dir={tmp_path / 'out'}", *options]
    return {
        "fit": lambda: cli_main(["fit", f"--ckpt_path={path}", "--trainer.max_steps=3", *trained]),
        "check": lambda: cli_main(["check", f"--ckpt_path={path}", "--trainer.max_steps=3", *trained]),
        "validate": lambda: cli_main(["validate", f"--ckpt_path={path}", *trained]),
        "init_from": lambda: cli_main(["fit", f"--model.init_from={path}", "--trainer.max_steps=1", *trained]),
        "generate": lambda: inference.run_generate([str(path), "--prompt", "A", "--max-new-tokens", "1"]),
        "evaluate": lambda: inference.run_evaluate([str(path), "--data", text]),
        "export": lambda: convert.run_export([str(path), str(tmp_path / "out")]),
        "consolidate": lambda: convert.run_consolidate([str(path), "--out", str(tmp_path / "out")]),
    }


class Code:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("harm", ["code", "an edit"])
def test_every_command_refuses_with_one_line(run, content, tmp_path, monkeypatch, capsys, harm):
    folder, options, _ = run
    monkeypatch.chdir(folder)
    path = tmp_path / "x.ckpt"
    if harm == "code":
        content["callbacks"]["Evil"] = Code(tmp_path / "ran")
    else:
        content["state_dict"][WEIGHT[1]] = "x"
    torch.save(content, path)
    for name, call in commands(path, options, tmp_path).items():
        line = refused_line(capsys, call)
        assert ("running its code" if harm == "code" else "expected a tensor") in line, name
        assert sorted(os.listdir(tmp_path)) == ["x.ckpt"], name


def test_python_refuses_it_too(content, tmp_path):
    path = tmp_path / "x.ckpt"
    torch.save({**content, "callbacks": Code(tmp_path / "ran")}, path)
    with torch.serialization.safe_globals([os.mkdir]):  # what this process trusts is not what a file may call
        for read in (
            LanguageModel.load_from_checkpoint,
            read_checkpoint,
            read_outline,
            load_transformer,
            digest,
            lambda path: read_initial_weights(str(path)),
            lambda path: load_checkpoint(path, torch.nn.Linear(1, 1), AdamW([torch.nn.Parameter(torch.zeros(1))])),
        ):
            with pytest.raises(ValueError, match="mkdir of"):
                read(path)
    assert not (tmp_path / "ran").exists()


def test_a_model_is_loaded_and_an_instantiator_is_not_called(content, tmp_path):
    torch.save(content, tmp_path / "x.ckpt")
    assert LanguageModel.load_from_checkpoint(tmp_path / "x.ckpt", schedule=Constant()).architecture.hidden_size == 16
    torch.save(edited(content, ("hyper_parameters", "_instantiator"), "builtins.print"), tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="_instantiator is"):
        LanguageModel.load_from_checkpoint(tmp_path / "x.ckpt")


def test_a_plain_loops_state_is_of_its_parameters(tmp_path):
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizer = AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_checkpoint(model, optimizer, 1, tmp_path / "x.pt")
    content = torch.load(tmp_path / "x.pt", weights_only=True)
    content["optimizer"]["state"][0]["exp_avg"] = torch.zeros(5)
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 has shape \(5,\)"):
        load_checkpoint(tmp_path / "x.pt", other, AdamW(other.parameters()))


# ---- files that are not what they seem


def tensor_file(pickled, parts=None):
    """A file in torch's form around a pickle of one's own."""
    file = io.BytesIO()
    torch.save({}, file)
    made = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(made, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, pickled if entry.filename.endswith("data.pkl") else old.read(entry))
        for name, bytes_ in (parts or {}).items():
            new.writestr(f"archive/{name}", bytes_)
    return made.getvalue()


def doubled_tuples(times):
    return b"\x80\x02}" + b"K\x01\x85" + b"q\x00h\x00\x86" * times + b"K\x01s."


def doubled_lists(times):
    pickled = b"\x80\x02}X\x01\x00\x00\x00a](]q\x00K\x01a"
    for number in range(times):  # a list of twice the one before, each under a number of its own
        pickled += b"]q" + bytes([number + 1]) + 2 * (b"h" + bytes([number]) + b"a")
    return pickled + b"es."


def storage(count, kind=b"FloatStorage"):
    """The pickle of a tensor of one number whose part is said to hold ``count``."""
    key = b"(X\x07\x00\x00\x00storagectorch\n" + kind + b"\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + key + count + b"tQK\x00K\x01\x85K\x01\x85\x89ccollections\n"
    return b"\x80\x02}X\x01\x00\x00\x00a" + tensor + b"OrderedDict\n)RtRs."


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def many_views():
    whole = torch.zeros(2**14)
    return saved({"a": [whole[number:] for number in range(100)]})


def attributes():
    value = OrderedDict(a=1)
    value.items_ = 3
    return saved({"state_dict": value})


def overlapping():
    content = bytearray(saved({"a": torch.zeros(1000), "b": torch.ones(1000)}))
    first = content.index(b"PK\x01\x02", content.index(b"PK\x01\x02"))
    offsets = []
    while first >= 0:
        offsets.append(first)
        first = content.find(b"PK\x01\x02", first + 4)
    place = content.index(b"archive/data/1", offsets[0]) - 46
    content[place + 42 : place + 46] = bytes(4)
    return bytes(content)


def nested(depth):
    return b"\x80\x02}X\x01\x00\x00\x00a" + b"]" * depth + b"a" * (depth - 1) + b"s."


HOSTILE = {
    "tuples that double": (lambda: tensor_file(doubled_tuples(40)), "too much work"),
    "lists that double": (lambda: tensor_file(doubled_lists(40)), "more than 500000 values"),
    "deep nesting": (lambda: tensor_file(nested(50_000)), "100 inside one another"),
    "many operations": (lambda: tensor_file(b"\x80\x02}" + b"N" * 2_100_000 + b"."), "more than 1250000 operations"),
    "a storage larger than its part": (
        lambda: tensor_file(storage(b"J\x00\x00\x00\x40"), {"data/0": b"\0\0\0\0"}),
        "has 4 bytes, not 1073741824",
    ),
    "an expanded tensor": (lambda: saved({"a": torch.zeros(1).expand(10**6, 10**6)}), "larger than its data"),
    "many views": (many_views, "larger than its data"),
    "sparse": (lambda: saved({"a": torch.eye(3).to_sparse()}), "running its code"),
    "meta": (lambda: saved({"a": torch.empty(10**12, device="meta")}), "running its code"),
    "complex": (lambda: saved({"a": torch.zeros(2, dtype=torch.complex64)}), "running its code"),
    "quantized": (
        lambda: saved({"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}),
        "running its code",
    ),
    "a call that allocates": (
        lambda: tensor_file(b"\x80\x02ctorch.storage\nUntypedStorage\n\x8a\x06\0\0\0\0\0\x01\x85R."),
        "its pickle calls",
    ),
    "attributes": (attributes, "dict with attributes"),
    "a function": (lambda: tensor_file(b"\x80\x02}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\ns."), "plain"),
    "no dict": (lambda: saved([1]), r"holds \[1\]"),
    "overlapping parts": (overlapping, "truncated or damaged"),
    "a part twice": (lambda: tensor_file(b"\x80\x02}.", {"data.PKL": b"\x80\x02}."}), "truncated or damaged"),
    "something behind": (lambda: saved({}) + b"x" * 40, "truncated or damaged"),
    "torch's old form": (
        lambda: pickle.dumps({"a": 1}),
        "truncated or damaged, or not a checkpoint",
    ),
    "tar": (lambda: b"ustar" * 300, "truncated or damaged, or not a checkpoint"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.filterwarnings("ignore:.*sparse.*", "ignore:.*quantiz.*")
def test_a_hostile_file_is_refused(tmp_path, name):
    make, says = HOSTILE[name]
    path = tmp_path / "x.ckpt"
    path.write_bytes(make())
    for mmap in (False, True):
        with pytest.raises(ValueError, match=says) as refusal:
            read_archive(path, mmap=mmap)
        assert "\n" not in str(refusal.value)


def test_thousands_of_parts_are_not_indexed(tmp_path, monkeypatch):
    from lightning_llm.checkpoints import archives

    monkeypatch.setattr(archives, "MOST_INDEX_BYTES", 2000)
    path = tmp_path / "x.ckpt"
    torch.save({str(number): torch.zeros(1) for number in range(100)}, path)
    with pytest.raises(ValueError, match="truncated or damaged, or not a checkpoint"):
        read_archive(path)


def test_tied_weights_and_views_are_fine(tmp_path):
    weight = torch.arange(12.0).view(3, 4)
    torch.save({"a": weight, "b": weight, "c": weight.T, "d": weight[1:], "e": torch.zeros(0, 10**6)}, tmp_path / "x")
    assert torch.equal(read_archive(tmp_path / "x")["d"], weight[1:])


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "link to a device"])
def test_what_is_no_file_is_answered_at_once(tmp_path, kind):
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    else:
        path = Path("/dev/zero")
    with pytest.raises(ValueError, match="is not a file"):
        read_checkpoint(path)
    assert not is_whole(path)


MEMORY = """
import resource, sys
from lightning_llm.checkpoints.archives import read_archive
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        read_archive(path, mmap=False)
        raise SystemExit(f"{path} was read")
    except ValueError as error:
        print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_refusing_takes_no_memory(tmp_path):
    names = ("lists that double", "tuples that double", "an expanded tensor", "a storage larger than its part")
    for number, name in enumerate(names):
        (tmp_path / f"{number}.ckpt").write_bytes(HOSTILE[name][0]())
    paths = [str(tmp_path / f"{number}.ckpt") for number in range(len(names))]
    ended = subprocess.run([sys.executable, "-c", MEMORY, *paths], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    scale = 1 if sys.platform == "darwin" else 1024  # bytes there, kibibytes elsewhere
    assert int(ended.stdout.splitlines()[-1]) * scale < 2**29, resource.getpagesize()


# ---- folders of shards


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "x.ckpt"
    path.mkdir()
    main = {"state_dict": {"w": {MARK: "w", "shape": [4, 2]}}, PROCESSES: 2}
    shards = [{"w": {"start": 2 * number, "rows": torch.ones(2, 2)}} for number in range(2)]

    def write(main_changes=(), first=None):
        torch.save({**main, **dict(main_changes)}, path / "checkpoint.pt")
        for number, shard in enumerate([shards[0] if first is None else first, shards[1]]):
            torch.save(shard, path / f"shard-0000{number}.pt")
        return path

    return write


MARKED = {MARK: "w", "shape": [4, 2]}
FOLDERS = [
    ({PROCESSES: -1}, None, "__processes__ is -1"),
    ({PROCESSES: "2"}, None, "__processes__ is '2', expected"),
    ({PROCESSES: 10**15}, None, "does not exist"),
    ({PROCESSES: 1}, None, "lacks rows of w"),
    ({"state_dict": {"w": {MARK: "../w", "shape": [4, 2]}}}, None, "lacks rows of ../w"),
    ({"state_dict": {"w": {MARK: ["w"], "shape": [4, 2]}}}, None, r"__shards__ is \['w'\]"),
    ({"state_dict": {"w": {**MARKED, "shape": [-4, 2]}}}, None, r"shape\[0\] is -4"),
    ({"state_dict": {"w": {**MARKED, "shape": [10**12, 2]}}}, None, "lacks rows of w"),
    ({"state_dict": {"w": {**MARKED, "shape": []}}}, None, "lacks rows of w"),
    ({"state_dict": {"w": {MARK: "w"}}}, None, "shape is missing"),
    ({}, {"w": {"start": 1, "rows": torch.ones(2, 2)}}, "lacks rows of w"),
    ({}, {"w": {"start": 0, "rows": torch.ones(3, 2)}}, "lacks rows of w"),
    ({}, {"w": {"start": 0, "rows": torch.ones(2, 3)}}, "lacks rows of w"),
    ({}, {"w": {"start": 0, "rows": torch.ones(2, 2, dtype=torch.int64)}}, "lacks rows of w"),
    ({}, {"w": {"start": 0, "rows": torch.ones(())}}, "lacks rows of w"),
    ({}, {"w": {"start": "0", "rows": torch.ones(2, 2)}}, "start is '0', expected"),
    ({}, {"w": {"start": 0, "rows": 3}}, "rows is 3, expected a tensor"),
    ({}, {"w": 3}, "w is 3, expected an object"),
]


@pytest.mark.parametrize(("changes", "first", "says"), FOLDERS)
def test_a_folder_of_shards_is_checked(folder, changes, first, says):
    path = folder(changes, first)
    for mmap in (False, True):
        with pytest.raises(ValueError, match=says) as refusal:
            read_checkpoint(path, mmap=mmap)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["shard-00001.pt", "checkpoint.pt"])
def test_a_shard_that_is_a_link_is_refused(folder, tmp_path, name):
    path = folder()
    assert torch.equal(read_checkpoint(path)["state_dict"]["w"], torch.ones(4, 2))
    (path / name).rename(tmp_path / "elsewhere.pt")
    (path / name).symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(ValueError, match=f"{name} is a link"):
        read_checkpoint(path)
