"""Every block of code of README and docs/ is run, but for those that say why not; there is no third case.

The blocks of a page run in their order in one folder, as a reader goes through it, made small by ``scaled.py``. A block
with a title is a file that is written first.
"""

import argparse
import gzip
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess

import pytest
import yaml

from lightning_llm.__main__ import SUBCOMMANDS, TRAINER_WORDS
from lightning_llm.cli.commands import COMMANDS
from tests.docs.markdown import PAGES, README, ROOT, blocks, outside_of_blocks
from tests.docs.scaled import is_whole
from tests.docs.shell import Shell

RUN = {"sh", "python", "yaml"}
SHOWN = {"text", "json"}  # output, drawings
OPTIONS = ("model:", "data:", "trainer:", "import", "from")  # what begins a config, or Python
PROGRAMS = ("lightning-llm", "python", "python3", "pip", "pytest", "torchrun", "sbatch", "git", "mkdocs", "ruff")
# What cannot be had in a test. A reason begins with one of them, so that none is made up by the way.
REASONS = ("needs a GPU", "needs the network", "needs two hosts", "needs SLURM", "needs a browser", "takes", "installs")
BENCHMARK = re.compile(r"^python ((?:-m )?benchmarks[\w./]*)", re.MULTILINE)
QUICK = {"README.md", "first-steps.md", "ablate.md"}
BASE = "configs/shakespeare-char.yaml"


@pytest.fixture(scope="module")
def shell():
    shell = Shell()
    yield shell
    shell.close()


@pytest.fixture(scope="module")
def trained(shell, tmp_path_factory):
    """What lies on the reader's disk: texts, configs, two runs."""
    folder = tmp_path_factory.mktemp("pages")
    prose = "\n".join(line for _, line in outside_of_blocks(ROOT / "docs" / "data.md"))
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    for part in ("docs/benchmarks", "docs/images", "books", "corpus", "lightning_llm/part", "stores"):
        (folder / part).mkdir(parents=True)
    for place, name in enumerate(
        ["my.txt", "more.txt", "books/one.txt", "play.txt", "docs/x.md", "lightning_llm/part/x.py"]
    ):
        (folder / name).write_text(prose[place:] + prose[:place])  # copies would land in the same split
    (folder / "tinyshakespeare.txt").write_text(prose)
    (folder / "scene.txt").write_text("To be")
    for name in ("web", "code"):
        lines = [json.dumps({"text": f"{name} {line}"}) for line in prose.splitlines() if line]
        (folder / "corpus" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "texts").mkdir()
    (folder / "texts" / "web.jsonl.gz").write_bytes(gzip.compress((folder / "corpus" / "web.jsonl").read_bytes()))
    for rows in (ROOT / "docs" / "benchmarks").glob("swiglu-*.json"):
        shutil.copy(rows, folder / "docs" / "benchmarks")
    for name in ("a.yaml", "b.yaml"):
        shutil.copy(ROOT / BASE, folder / name)
    script = f"""
        lightning-llm fit --config {BASE}
        lightning-llm fit --config {BASE} --seed_everything 2
    """
    done = shell.run(script, folder)
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture
def workshop(trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True, symlinks=True)
    return tmp_path


def pages():
    return [pytest.param(page, marks=() if page.name in QUICK else pytest.mark.slow) for page in PAGES if script(page)]


def script(page):
    """The blocks of a page that are run, as one script of the shell."""
    parts = []
    for block in blocks(page):
        place = f"{page.name}:{block.line}"
        written = block.title or f"block-{block.line}.{block.language}"
        if block.reason is not None or block.language not in RUN:
            continue
        parts.append(f"echo '== {place}'")
        if block.language == "sh":
            parts.append(block.text)
            continue
        parts.append(f"cat > {written} <<'END OF BLOCK'\n{block.text}END OF BLOCK")
        if block.language == "yaml":
            configs = f"--config {written}" if is_whole(block.text) else f"--config {BASE} --config {written}"
            parts.append(f"lightning-llm fit {configs} --print_config > /dev/null")
        elif block.title is None:
            parts.append(f"python {written}")
    return "\n".join(parts)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_the_commands_of_a_page_work(page, shell, workshop):
    done = shell.run(script(page), workshop)
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout, done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_block_is_run_or_says_why_not(page):
    for block in blocks(page):
        place = f"{page.name}:{block.line}"
        assert block.language in RUN | SHOWN, f"{place}: say which language it is: {sorted(RUN | SHOWN)}"
        if block.language in SHOWN:
            lines = [line for line in block.text.splitlines() if ": error: " not in line]
            first = [line.removeprefix("$ ").split(" ")[0] for line in lines]
            assert not set(first) & {*PROGRAMS, *OPTIONS}, (
                f"{place}: code in a block that is not run: name its language"
            )
            assert block.reason is None, f"{place}: nothing would be run there"
        elif block.reason is not None:
            assert block.reason.startswith(REASONS), f"{place}: {block.reason!r} is none of {REASONS}"
            assert re.search(r": .{10}|; .{10}|, .{10}", block.reason), f"{place}: say what stands in for it"
        if block.language == "python" and block.title:
            used = block.title.removesuffix(".py")
            uses = [b.text for b in blocks(page) if b is not block and b.reason is None and used in b.text]
            assert uses, f"{place}: nothing uses {block.title}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_command_hides_outside_of_a_block(page):
    reasons = [block.line for block in blocks(page) if block.comment]
    before = ""
    for number, line in outside_of_blocks(page):
        assert not (line.startswith("    ") and not before.strip()), f"{page.name}:{number}: use a fence"
        if line.startswith("<!-- not run:"):
            assert number + 1 in reasons, f"{page.name}:{number}: no block follows right behind it"
        before = line


def benchmarks_that_are_not_run():
    found = set()
    for page in PAGES:
        texts = [block.text for block in blocks(page) if block.reason is not None]
        found |= {words for text in texts for words in BENCHMARK.findall(text)}
    return sorted(found)


@pytest.mark.parametrize("program", benchmarks_that_are_not_run())
def test_a_benchmark_that_is_not_run_starts(program, quick_processes):
    environment = {**os.environ, **quick_processes.environment}
    command = [quick_processes.python, *program.split(), "--help"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def inline_commands():
    found = set()
    for page in PAGES:
        prose = " ".join(line for _, line in outside_of_blocks(page))
        found |= {(page.name, text) for text in re.findall(r"`(lightning-llm [a-z][^`]*)`", prose)}
    return sorted(found)


@pytest.fixture(scope="module")
def fit_options(shell, trained):
    done = shell.run(f"lightning-llm fit --config {BASE} --print_config", trained)
    names = set()

    def gather(prefix, content):
        names.add(prefix)
        if isinstance(content, dict):
            for name, value in content.items():
                gather(f"{prefix}.{name}".removeprefix("."), value)

    gather("", yaml.safe_load(done.stdout))
    return names | {"config", "help", "print_config", "ckpt_path"}


@pytest.mark.parametrize(("page", "text"), inline_commands())
def test_a_command_in_the_prose_has_options_that_exist(page, text, fit_options):
    _, command, *words = shlex.split(text)
    given = {word.partition("=")[0].rstrip("+") for word in words if word.startswith("--") and len(word) > 2}
    if command in TRAINER_WORDS:
        assert {name.removeprefix("--") for name in given} <= fit_options
        return
    assert command in SUBCOMMANDS
    module = importlib.import_module(f"lightning_llm.cli.{COMMANDS[command].module}")
    parser = getattr(module, f"run_{command}").parser
    assert given <= option_names(parser)


def option_names(parser):
    parsers = [parser]
    for action in parsers[0]._actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers += action.choices.values()
    return {name for parser in parsers for name in parser._option_string_actions}


def test_the_readme_has_the_two_commands():
    text = README.read_text(encoding="utf-8")
    assert "python -m pip install -e . && lightning-llm fit --config configs/quickstart.yaml\n" in text
    assert 'python -m pip install -e ".[dev]" && pytest\n' in text
