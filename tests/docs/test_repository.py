"""What README and docs/ say of the repository is so: the file tree, the links, the configs, the comparison."""

import re
from pathlib import Path

import pytest
import yaml
from PIL import Image

from benchmarks.frontier import fingerprint
from tests.docs.markdown import README, ROOT

TEXT = README.read_text(encoding="utf-8")
OVERLAYS = [ROOT / "configs" / name for name in ("ddp.yaml", "fsdp.yaml")]  # only say how, over another
CONFIGS = sorted(set((ROOT / "configs").glob("*.yaml")) - set(OVERLAYS))
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_file_tree_names_every_file_and_no_other():
    tree = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Files")[1].split("```")[1]
    named = re.findall(r"^((?:lightning_llm|benchmarks)/\S+\.py)  +\S", tree, re.M)
    files = [*(ROOT / "lightning_llm").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    assert set(named) == {str(path.relative_to(ROOT)) for path in files if path.name != "__init__.py"}
    folders = [str(Path(name).parent) for name in named]
    assert len(named) == len(set(named))
    for folder in set(folders):
        within = [name for name, its in zip(named, folders, strict=True) if its == folder]
        assert within == sorted(within)


def test_the_guide_to_changes_names_files_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    guide = text.split("## Folders")[1].split("## What a change needs")[0]
    named = re.findall(r"\b((?:\w+/)+\w+\.py|__main__\.py)", guide)
    assert len(set(named)) > 25
    assert [
        name for name in named if not any((folder / name).is_file() for folder in (ROOT, ROOT / "lightning_llm"))
    ] == []


def anchors(document):
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(document):
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = document.parent / path if path else document
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_every_page_can_be_reached_from_the_readme():
    seen, new = set(), {README}
    while new:
        page = new.pop()
        seen.add(page)
        links = re.findall(r"\]\(([^)#:]+\.md)[^)]*\)", page.read_text(encoding="utf-8"))
        new |= {(page.parent / link).resolve() for link in links} - seen
    assert not set((ROOT / "docs").rglob("*.md")) - seen


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_overlays_say_only_how_and_are_named_in_the_readme(overlay):
    assert f"`{overlay.name}`" in TEXT
    assert yaml.safe_load(overlay.read_text()).keys() == {"trainer"}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_named_in_the_readme(config):
    assert f"`{config.name}`" in TEXT
    assert yaml.safe_load(config.read_text())["trainer"]["max_steps"] > 0


def test_the_picture_is_that_of_the_rows():
    files = [
        ROOT / "docs" / "benchmarks" / f"swiglu-{dtype}-cpu{end}.json"
        for end in ("", "-kept")
        for dtype in ("float32", "bfloat16")
    ]
    picture = Image.open(ROOT / "docs" / "images" / "frontier.png")
    assert picture.text["Description"] == fingerprint(files), "draw it again, as docs/memory-optimised.md does"


def comparison():
    """The rows of the README's table beside others: what is compared, then a cell for each project, ours first."""
    lines = TEXT.split("## Beside others")[1].split("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return rows[0], rows[1:]


def test_what_the_comparison_claims_has_a_source():
    head, rows = comparison()
    assert len(rows) > 5
    for name, ours, *others in rows:
        assert len(others) == len(head) - 2, name
        shown = re.findall(r"\]\(([^)]+)\)", ours)
        assert ours == "no" or shown, name
        assert all(re.match(r"tests/|docs/(benchmarks|reliability)\.md", link) for link in shown), name
        for project, cell in zip(head[2:], others, strict=True):
            said = re.findall(r"\]\((https://[^)]+)\)", cell)
            assert cell == "–" or said, f"{name}, {project}: {cell}"
            for link in said:  # a page that may change is pinned
                assert "github.com" not in link or re.search(r"/(blob|tree)/([0-9a-f]{40}|v[\d.]+)/", link), link
