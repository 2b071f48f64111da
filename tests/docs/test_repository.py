"""What README and docs/ say of the repository is so: the file tree, the links, the configs, the comparison."""

import ast
import io
import re
import tokenize

import pytest
import yaml

from tests.docs.markdown import README, ROOT

TEXT = README.read_text(encoding="utf-8")
CONFIG_PAGE = ROOT / "docs" / "config.md"
OVERLAYS = [ROOT / "configs" / name for name in ("ddp.yaml", "fsdp.yaml", "memory-profile.yaml")]  # only say how
CONFIGS = sorted(set((ROOT / "configs").glob("*.yaml")) - set(OVERLAYS))
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_guide_to_changes_names_files_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    guide = text.split("## Folders")[1].split("## Requirements for a change")[0]
    named = re.findall(r"\b((?:\w+/)+\w+\.py|__main__\.py)", guide)
    assert len(set(named)) > 25
    assert [
        name for name in named if not any((folder / name).is_file() for folder in (ROOT, ROOT / "lightning_llm"))
    ] == []


def test_the_tests_that_pages_name_exist():
    named = {name for page in DOCUMENTS for name in re.findall(r"\btests/[\w/]+\.py", page.read_text("utf-8"))}
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_stored_rows_and_reports_name_no_path_of_a_machine():
    stored = [path for name in ("benchmarks", "experiments") for path in (ROOT / "docs" / name).glob("*.[jh]*")]
    assert len(stored) > 50
    assert [path.name for path in stored if re.search(r"/(root|home|Users|tmp)/", path.read_text("utf-8"))] == []


def test_every_page_can_be_reached_from_the_readme():
    seen, new = set(), {README}
    while new:
        page = new.pop()
        seen.add(page)
        links = re.findall(r"\]\(([^)#:]+\.md)[^)]*\)", page.read_text(encoding="utf-8"))
        new |= {(page.parent / link).resolve() for link in links} - seen
    assert not set((ROOT / "docs").rglob("*.md")) - seen


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_overlays_say_only_how_and_are_named_on_the_page_of_configs(overlay):
    assert f"`{overlay.name}`" in CONFIG_PAGE.read_text(encoding="utf-8")
    assert yaml.safe_load(overlay.read_text()).keys() == {"trainer"}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_named_on_the_page_of_configs(config):
    assert f"`{config.name}`" in CONFIG_PAGE.read_text(encoding="utf-8")
    assert yaml.safe_load(config.read_text())["trainer"]["max_steps"] > 0


COMPARISON = ROOT / "docs" / "comparison.md"


def comparison():
    """The questions of the comparison, each with the answer of every project, ours first."""
    sections = re.findall(r"^## ([^\n]+\?)\n(.+?)(?=^## |\Z)", COMPARISON.read_text(encoding="utf-8"), re.M | re.S)
    rows = {
        question: dict(re.findall(r"^\| (?!project|---)([^|]+) \| (.+) \|$", text, re.M)) for question, text in sections
    }
    return {question: answers for question, answers in rows.items() if answers}


def test_what_the_comparison_claims_has_a_source():
    questions = comparison()
    assert len(questions) > 5
    projects = list(next(iter(questions.values())))
    assert projects[0] == "lightning-llm"
    assert len(projects) > 4
    for question, answers in questions.items():
        assert "lightning-llm" in answers, question
        assert list(answers) == [project for project in projects if project in answers], question
        (_, ours), *others = answers.items()
        shown = re.findall(r"\]\(([^)]+)\)", ours)
        assert ours == "no" or shown, question
        assert all(re.match(r"\.\./(tests/|benchmarks/README\.md#)|reliability\.md", link) for link in shown), question
        for project, answer in others:
            said = re.findall(r"\]\((https://[^)]+)\)", answer)
            assert answer == "–" or said, f"{question} {project}: {answer}"
            for link in said:  # a page that may change is pinned
                assert "github.com" not in link or re.search(r"/(blob|tree)/([0-9a-f]{40}|v[\d.]+)/", link), link


PACKAGE = ROOT / "lightning_llm"
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
# A file with its folder, and a name in backticks that begins with a room of the package: in a docstring or a comment.
FILE = re.compile(r"(?<![\w/.-])((?:\w+/)+\w+\.(?:py|md|yaml))\b")
DOTTED = re.compile(rf"`~?((?:lightning_llm\.)?(?:{'|'.join(ROOMS)})(?:\.\w+)+)")
OPTIONS = {"model": "training/module.py", "data": "data/datamodule.py"}  # whose parameters are the keys of a config
OTHER_FILES = {"model.safetensors"}


def explanations(path):
    """Line and text of each docstring and comment."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            yield node.body[0].lineno, ast.get_docstring(node, clean=False)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def is_there(name):
    """Whether a dotted name is a module, something at the top of one, a public name of a room, or an option."""
    room, first, *rest = name.removeprefix("lightning_llm.").split(".")
    module = PACKAGE / room / f"{first}.py"
    while rest and module.with_suffix("").is_dir():
        module = module.with_suffix("") / f"{rest.pop(0)}.py"
    if module.is_file():
        return not rest or bool(re.search(rf"^(?:def |class )?{rest[0]}\b", module.read_text("utf-8"), re.M))
    if module.with_suffix("").is_dir() or name in OTHER_FILES:
        return True
    public = (module.parent / "__init__.py").read_text("utf-8")
    options = (PACKAGE / OPTIONS[room]).read_text("utf-8") if room in OPTIONS else ""
    return bool(re.search(rf"\b{module.stem}\b", public) or re.search(rf"^        {first}:", options, re.M))


def lost_names(path, text):
    """Files and names in a text that do not exist; folders of other projects do not count."""
    for name in FILE.findall(text):
        folders = [folder for folder in (ROOT, PACKAGE, path.parent) if (folder / name.split("/")[0]).is_dir()]
        if folders and not any((folder / name).is_file() for folder in folders):
            yield name
    yield from (name for name in DOTTED.findall(text) if not is_there(name))


@pytest.mark.parametrize("folder", ["lightning_llm", "benchmarks", "tests"])
def test_docstrings_and_comments_name_what_exists(folder):
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in explanations(path)
        for name in lost_names(path, text)
    ]
    assert not found, "\n".join(found)


def test_a_lost_name_is_found():
    there = "ops/swiglu.py, torch/lost.py, swiglu_tiles.py, `ops.swiglu`, ``ops.linear_cross_entropy``, ``data.store``,"
    there += " :mod:`lightning_llm.data.order`, `training.callbacks`, ``training.callbacks.run_checkpoints``"
    lost = "ops/lost.py, ``ops.lost``, ``ops.swiglu.lost``, ``data.lost``, `training.callbacks.lost`"
    path = PACKAGE / "ops" / "swiglu.py"
    assert list(lost_names(path, there)) == []
    assert list(lost_names(path, lost)) == re.findall(r"[\w./]*lost[\w.]*", lost)
