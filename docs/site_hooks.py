"""What the site has beside the pages of docs/: the README as its home, and the files outside that a page links to.

A link such as ``../configs/slurm.sh`` works wherever the repository itself is shown. The site does not know where that
is, so there the link leads to a page of its own that shows the file; a notebook is shown with its outputs.
"""

import base64
import html
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "all-benchmarks.md",
    "benchmarks/log.md": "performance-log.md",
}
SHOWN = "files/"  # where the files outside lie on the site
LANGUAGES = {".py": "python", ".sh": "sh", ".yaml": "yaml", ".toml": "toml", ".json": "json"}
_LINK = re.compile(r"(?:(?<=\]\()|(?<=src=\")|(?<=srcset=\"))(?![a-z]+:)([^)\s#\"]+)")
_ROLE = re.compile(r":(?:func|class|meth|mod):<code>~?([^<]*?)(?: &lt;[^<]*&gt;)?</code>")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\w\\$])\$(?!\s)([^$\n]+?)(?<!\s)\$(?!\w)", re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of files outside of docs/."""
    for name, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text(encoding="utf-8")))
    pages = [*PAGES, *(f"docs/{file.src_uri}" for file in files.documentation_pages() if not file.generated_by)]
    for path in sorted({path for page in pages for path in _linked(page)}):
        if path not in PAGES and not path.startswith("docs/") and (ROOT / path).exists():
            for file in _shown(path, config):
                files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    here, name = page.file.src_uri, _in_repository(page.file.src_uri)
    if here.startswith(SHOWN) and not name.endswith(".ipynb"):
        return markdown  # code

    def moved(found: re.Match[str]) -> str:
        path = _resolved(name, found[1])
        return posixpath.relpath(_on_site(path), posixpath.dirname(here)) if (ROOT / path).exists() else found[1]

    return _LINK.sub(moved, markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Docstrings say ``:func:`name```, which Markdown does not know: leave the name."""
    return _ROLE.sub(lambda found: f"<code>{found[1].rpartition('.')[2]}</code>", content)


def _linked(page: str) -> Iterator[str]:
    return (_resolved(page, target) for target in _LINK.findall((ROOT / page).read_text(encoding="utf-8")))


def _resolved(page: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def _on_site(path: str) -> str:
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{SHOWN}{path}.md"


def _in_repository(place: str) -> str:
    if place.startswith(SHOWN):
        return place.removeprefix(SHOWN).removesuffix(".md")
    return {place: name for name, place in PAGES.items()}.get(place, f"docs/{place}")


def _shown(path: str, config: MkDocsConfig) -> Iterator[File]:
    source, place = ROOT / path, f"{SHOWN}{path}.md"
    if source.is_dir():
        names = sorted(f"{each.name}/" if each.is_dir() else each.name for each in source.glob("[!._]*"))
        yield File.generated(config, place, content=f"# {path}/\n\n" + "".join(f"- `{name}`\n" for name in names))
    elif source.suffix == ".ipynb":
        pictures: list[bytes] = []
        content = _notebook(json.loads(source.read_text(encoding="utf-8")), source.name, pictures)
        yield File.generated(config, place, content=content)
        for number, picture in enumerate(pictures):
            yield File.generated(config, f"{posixpath.dirname(place)}/{source.name}-{number}.png", content=picture)
    else:
        language = LANGUAGES.get(source.suffix, "text")
        text = _fenced(source.read_text(encoding="utf-8"), language)
        yield File.generated(config, place, content=f"# {path}\n\n{text}")


def _notebook(notebook: dict[str, Any], name: str, pictures: list[bytes]) -> str:
    """Markdown of a notebook with its outputs; pictures are gathered, to be written beside it."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(_FORMULA.sub(_mathml, source))
            continue
        parts.append(_fenced(source, "python"))
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![output of the cell above]({name}-{len(pictures)}.png)")
                pictures.append(base64.b64decode(data["image/png"]))
            elif "text/markdown" in data:
                parts.append(_FORMULA.sub(_mathml, "".join(data["text/markdown"])))
            elif text := "".join(output.get("text", data.get("text/plain", ""))):
                parts.append(_fenced(text, "text"))
    return "\n\n".join(parts)


def _mathml(found: re.Match[str]) -> str:
    formula, display = (found[1], "block") if found[1] else (found[2], "inline")
    return str(convert(html.unescape(formula.strip()), display=display))


def _fenced(text: str, language: str) -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
