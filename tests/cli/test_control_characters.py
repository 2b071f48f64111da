"""Whatever a stranger's files and a user's words hold, no command prints a character that a terminal obeys."""

import io
import json
import os
import pty
import re
import subprocess
import sys

import pytest
import yaml
from tqdm import tqdm

from lightning_llm.__main__ import SUBCOMMANDS, TRAINER_WORDS, main
from lightning_llm.cli.command_line import experiment_name
from lightning_llm.cli.standard_streams import Printable
from lightning_llm.io.untrusted import ESCAPE

OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\U000e0000-\U000e007f]")
CODE = "\x1b[38;5;201m"  # none that rich uses here
EVIL = f"{CODE}\x1b]0;own\x07\x9b2J\x7f\r\u202e\u2066\u2028\U000e0041[red]"
MODEL = {
    "architecture": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
}


class Screen:
    """Both standard streams as a process of the command's own has them. Not a fixture: pytest changes them between."""

    def __init__(self, patch, is_terminal=False):
        self.raw = {}
        for name in ("stdout", "stderr"):
            self.raw[name] = io.BytesIO()
            stream = Printable(self.raw[name], encoding="utf-8", errors=ESCAPE, write_through=True)
            stream.isatty = lambda: is_terminal
            patch.setattr(sys, name, stream)

    def text(self):
        """What was printed since."""
        said = "".join(raw.getvalue().decode() for raw in self.raw.values())
        for raw in self.raw.values():
            raw.seek(0)
            raw.truncate()
        return said


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A folder with text, config and run, each with a hostile name, and what `fit` printed."""
    folder = tmp_path_factory.mktemp("hostile") / EVIL
    folder.mkdir()
    text, config = folder / f"text{EVIL}.txt", folder / f"con{EVIL}fig.yaml"
    text.write_text(f"{EVIL} says\n" * 400, newline="")
    sample = {"every_n_steps": 2, "prompt": CODE, "max_new_tokens": 30}
    options = {
        "model": MODEL,
        "data": {
            "path": str(text),
            "tokenizer": "char",
            "context_length": 16,
            "global_batch_size": 4,
            "predict_prompts": [EVIL],
        },
        "trainer": {
            "max_steps": 2,
            "log_every_n_steps": 1,
            "accelerator": "cpu",
            "callbacks": [{"class_path": "lightning_llm.training.callbacks.SampleText", "init_args": sample}],
        },
        "keep_freed_memory": False,
    }
    config.write_text(yaml.safe_dump(options))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        screen = Screen(patch)
        assert main(["fit", "--config", str(config)]) == 0, screen.text()
        said = screen.text()
        other = text.rename(folder / f"{EVIL}other.txt")
        text.write_bytes(other.read_bytes())
        second = [f"--data.path={other}", "--trainer.callbacks=null"]
        assert main(["fit", "--config", str(config), *second]) == 0, screen.text()
    run = next((folder / "runs").glob("*/version_0"))
    return folder, text, config, run, said


def harmless(said, shows=r"\x1b[38;5;201m"):
    assert not OBEYED.search(said), said
    assert shows in said, said


def test_fit_prints_report_and_samples_harmless(hostile):
    *_, said = hostile
    harmless(said)
    assert "\nsample after step 2\n\\x1b[38;5;201m" in said
    assert re.search(r"model\s+[\d,]+ parameters", said)


WORDS = {
    "check": "--config CONFIG",
    "validate": "--ckpt_path RUN --data.path nowhere{EVIL}",
    "test": "--config CONFIG --ckpt_path RUN",
    "predict": "--config CONFIG --ckpt_path RUN",
    "prepare": "TEXT --tokenizer char --out store{EVIL}",
    "tokenizer": "train TEXT --kind byte --out tokenizer{EVIL}.json",
    "data inspect": "inspect STORE",
    "data verify": "verify STORE",
    "evaluate": "RUN --data TEXT --per-document",
    "export": "RUN exported{EVIL}",
    "import": "exported{EVIL} --out imported{EVIL}.ckpt",
    "consolidate": "RUN --out whole{EVIL}.ckpt",
    "compare": "runs",
    "runs": "runs",
    "estimate": "--config CONFIG --vocab-size 40",
    "plan": "--config CONFIG --vocab-size 40 --memory 1GB --out plan{EVIL}.yaml",
    "same": "--config CONFIG --vary loss_chunks --vary model.architecture.{EVIL}=1",
    "dashboard": "runs --port 70000{EVIL}",
    "ablate": "status nowhere{EVIL}",
}
SHOWS = {
    "predict": r'"text": "\u001b[38;5;201m',
    "estimate": "parameters",
    "check": "context",
    "plan": r"\033[38;5;201m",
}


def test_the_folder_of_a_run_is_in_the_root_whatever_the_config_is_called(tmp_path):
    for name in ("...yaml", "..yaml", f"{EVIL}.yaml", "漢" * 80 + ".yaml"):
        path = tmp_path / name
        path.write_text("model: {}")
        experiment = experiment_name(["fit", "--config", str(path)])
        assert (tmp_path / experiment).resolve().parent == tmp_path
        assert not OBEYED.search(experiment)


def test_each_command_is_among_these():
    assert {word.split()[0] for word in WORDS} == {*TRAINER_WORDS, *SUBCOMMANDS} - {"fit", "generate"}


@pytest.mark.parametrize("word", WORDS)
def test_what_a_command_prints_is_harmless(hostile, monkeypatch, word):
    screen = Screen(monkeypatch)
    folder, text, config, run, _ = hostile
    monkeypatch.chdir(folder)
    store = next((folder / "stores").iterdir())
    places = {"CONFIG": config, "RUN": run, "TEXT": text, "STORE": store}
    words = [str(places.get(part, part.replace("{EVIL}", EVIL))) for part in WORDS[word].split()]
    main([word.split()[0], *words])
    harmless(said := screen.text(), SHOWS.get(word, r"\x1b[38;5;201m"))
    if word == "predict":
        assert json.loads(said)["prompt"] == EVIL


@pytest.mark.parametrize("word", [*TRAINER_WORDS, *SUBCOMMANDS, "none"])
def test_a_mistake_is_one_line(tmp_path, monkeypatch, word):
    screen = Screen(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for words in ([f"--{EVIL}\nlightning-llm: all is well"], [f"{EVIL}\nlightning-llm: all is well", "--config", EVIL]):
        assert main([word, *words]) == 2
        harmless(said := screen.text(), "error: ")
        assert said.count("\n") == 1, said


def test_a_config_that_is_no_yaml_is_one_line(tmp_path, monkeypatch):
    screen = Screen(monkeypatch)
    path = tmp_path / f"{EVIL}.yaml"
    for content in (f"a: {EVIL}", "a: [", "a: !!python/name:\u202ex", f'"\\e{EVIL[-5:]}": 1'):
        path.write_text(content)
        assert main(["fit", "--config", str(path)]) == 2
        harmless(said := screen.text())
        assert said.count("\n") == 1, said


@pytest.mark.parametrize("is_terminal", [False, True])
def test_generate_is_exact_but_on_a_terminal(hostile, monkeypatch, is_terminal):
    screen = Screen(monkeypatch, is_terminal)
    assert main(["generate", str(hostile[3]), "--prompt", EVIL, "--max-new-tokens", "5", "--num-samples", "2"]) == 0
    said = screen.text()
    assert (EVIL in said) == (not is_terminal)
    if is_terminal:
        harmless(said)


def test_a_stack_trace_is_harmless_and_a_bar_is_drawn(monkeypatch):
    screen = Screen(monkeypatch)
    sys.excepthook(ValueError, ValueError(EVIL), None)
    harmless(screen.text())
    for _ in tqdm([1], file=sys.stderr):
        pass
    assert "\r" in screen.text()


def in_a_terminal(processes, *words, **options):
    """Exit status and output of a command in a process of its own, with a pseudo-terminal for all streams."""
    leader, follower = pty.openpty()
    command = [processes.python, "-m", "lightning_llm", *words]
    options["env"] = {**os.environ, **processes.environment}
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, **options) as process:
        os.close(follower)
        said = b""
        try:
            while chunk := os.read(leader, 65536):
                said += chunk
        except OSError:  # Linux says so of a terminal that nobody has open any more
            pass
        status = process.wait()
    os.close(leader)
    return status, said.decode()


def test_on_a_terminal_only_rich_has_codes(hostile, tmp_path, quick_processes):
    folder, _, config, *_ = hostile
    words = ["fit", "--config", str(config), f"--trainer.default_root_dir={tmp_path}"]
    status, said = in_a_terminal(quick_processes, *words, cwd=folder)
    assert status == 0, said
    assert "\x1b[1m" in said
    # what the terminal makes of a newline, and what rich moves, hides and paints
    said = re.sub(r"\r+\n|\r?\x1b\[(2K|1A|\?25[lh]|(?!38;5;201)[\d;]*m)|\r", "\n", said)
    harmless(said)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_what_the_output_cannot_say_is_escaped(tmp_path, encoding):
    (tmp_path / "text.txt").write_text("words " * 50)
    name = b"caf\xc3\xa9\xff\x1b[2J.json"
    words = [sys.executable, "-m", "lightning_llm", "tokenizer", "train", "text.txt", "--kind", "byte", "--out", name]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": encoding, "PYTHONUTF8": "1"}
    expected = {"ascii": r"caf\u00e9\udcff\x1b[2J.json", "utf-8": r"café\udcff\x1b[2J.json"}[encoding]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert f"{expected}: byte, 256 ids" in done.stdout.decode(encoding)
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True)  # it is there now
    assert (done.returncode, done.stdout) == (2, b"")
    assert expected in done.stderr.decode(encoding)
    assert done.stderr.count(b"\n") == 1


def test_the_parsers_own_backspace_is_not_shown(quick_processes):
    command = [quick_processes.python, "-m", "lightning_llm", "fit", "--help"]
    environment = {**os.environ, **quick_processes.environment}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "--print_config[=flags]" in done.stdout
    assert "\\x08" not in done.stdout
