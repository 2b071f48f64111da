"""Write docs/reference/files.md: every source file with the first line of its docstring.

python docs/source_files.py
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "files.md"
INTRODUCTION = """# Source files

Each file with the first line of its docstring, written by `python docs/source_files.py`. [Contributing](
../../CONTRIBUTING.md) explains the folders and says which file to edit for a change.
""".replace("(\n", "(")


def purpose(path: Path) -> str:
    """The first line of a module's docstring, up to the period that ends it."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.sub(r":\w+:(?=`)", "", docstring.partition("\n")[0].rstrip(".")).replace("``", "`")


def page() -> str:
    """The whole page: one table per folder, of the package first."""
    sections = [INTRODUCTION]
    for top in ("lightning_llm", "benchmarks"):
        folders = sorted({path.parent for path in (ROOT / top).rglob("*.py")})
        for folder in folders:
            title = purpose(folder / "__init__.py") if (folder / "__init__.py").is_file() else ""
            files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
            rows = "".join(f"| `{path.name}` | {purpose(path)} |\n" for path in files)
            head = f"## {folder.relative_to(ROOT)}/\n\n" + (f"{title}.\n\n" if title else "")
            sections.append(f"{head}| file | purpose |\n| --- | --- |\n{rows}")
    return "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
