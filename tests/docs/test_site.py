"""The site: built strictly, whole, and with nothing in it that is fetched from elsewhere."""

import html
import importlib
import json
import re
import shutil
import subprocess
import sys

import pytest

from tests.docs.markdown import ROOT
from tests.docs.test_repository import comparison
from tests.test_notebooks import NOTEBOOKS

pytestmark = pytest.mark.slow  # .ci/run alone: building takes long

PACKAGES = ("", "ablate", "accounting", "data", "generation", "interop", "measure", "model", "ops", "optim", "training")
# what a browser fetches by itself; a link that somebody clicks is another thing
FETCHED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//|<link\b(?![^>]*canonical)[^>]*//")


def build(source, site):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(source / "mkdocs.yml")]
    return subprocess.run([*command, "--site-dir", str(site)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_pages_fetch_nothing(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        assert not FETCHED.search(page.read_text(encoding="utf-8")), page
    assert FETCHED.search('<script src="https://elsewhere/x.js">')
    assert FETCHED.search('<link rel="stylesheet" href="//elsewhere/x.css">')


def test_the_readme_is_the_home(site):
    home = (site / "index.html").read_text(encoding="utf-8")
    assert 'src="images/verdicts.png"' in home
    assert 'srcset="images/verdicts-dark.png"' in home
    assert (site / "images" / "verdicts-dark.png").is_file()
    assert 'href="first-steps.html"' in home
    assert 5 < len(re.findall("<tr>", home)) <= 1 + len(next(iter(comparison().values())))


def test_the_comparison_shows_its_tables_and_the_tests_behind_them(site):
    page = (site / "comparison.html").read_text(encoding="utf-8")
    assert 'href="files/tests/cli/test_kill.py.html"' in page
    assert len(re.findall("<tr>", page)) == sum(1 + len(answers) for answers in comparison().values())


def test_files_outside_of_docs_are_shown(site):
    page = (site / "files" / "configs" / "slurm.sh.html").read_text(encoding="utf-8")
    text = html.unescape(re.sub("<[^>]+>", "", page))
    for line in (ROOT / "configs" / "slurm.sh").read_text(encoding="utf-8").splitlines():
        assert line in text


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_shown_with_their_pictures(site, notebook):
    page = (site / "files" / "notebooks" / f"{notebook.name}.html").read_text(encoding="utf-8")
    pictures = re.findall(rf'src="({re.escape(notebook.name)}-\d+\.png)"', page)
    shown = [output for cell in cells(notebook) for output in cell.get("outputs", []) if "data" in output]
    assert len(pictures) == sum("image/png" in output["data"] for output in shown)
    for picture in pictures:
        assert (site / "files" / "notebooks" / picture).read_bytes().startswith(b"\x89PNG")
    formulas = any(
        re.search(r"\$[^$\n]+\$", "".join(c["source"])) for c in cells(notebook) if c["cell_type"] == "markdown"
    )
    assert formulas == ("<math" in page)


def cells(notebook):
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


def test_the_reference_has_every_public_name(site):
    pages = "".join(path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html"))
    assert ":func:<code>" not in pages
    for package in [*PACKAGES, "training.callbacks"]:
        module = importlib.import_module(".".join(["lightning_llm", *filter(None, [package])]))
        for name in module.__all__:
            assert re.search(rf'id="lightning_llm\.[\w.]*\b{name}"', pages) or name.startswith("__"), (package, name)


def test_a_fault_ends_the_build(tmp_path):
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "lightning_llm").symlink_to(ROOT / "lightning_llm")
    for name in ("benchmarks", "configs", "tests", "notebooks"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "README.md").write_text("[x](docs/nowhere.md)")
    (tmp_path / "docs" / "new.md").write_text("# New")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert all(name in done.stderr for name in ("nowhere", "new.md"))
