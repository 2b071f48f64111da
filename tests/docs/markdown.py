"""Code blocks of Markdown, and the comments in front of them that say why a block is not run."""

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]
NOT_RUN = "not run: "
_FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})(\w*)(.*)$")
_TITLE = re.compile(r'title="([^"]+)"')
_COMMENT = re.compile(r"^<!--\s*(.*?)\s*-->$")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: Where it stands.
        line: Its first line, from 1.
        language: The word behind the fence, perhaps empty.
        title: The file that it is the content of, if it says so.
        comment: What the HTML comment right before it says, if there is one.
        text: Its lines.
    """

    page: Path
    line: int
    language: str
    title: str | None
    comment: str | None
    text: str

    @property
    def reason(self) -> str | None:
        """Why it is not run, if it says so."""
        return self.comment.removeprefix(NOT_RUN) if self.comment and self.comment.startswith(NOT_RUN) else None


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    start, fence = None, ""
    for number, line in enumerate(lines):
        match = _FENCE.match(line)
        if start is None and match:
            start, fence = number, match[2]
        elif start is not None and match and match[2].startswith(fence) and not match[3]:
            opening = _FENCE.match(lines[start])
            before = _COMMENT.match(lines[start - 1].strip()) if start else None
            title = _TITLE.search(opening[4])
            found.append(
                Block(
                    page=page,
                    line=start + 1,
                    language=opening[3],
                    title=title and title[1],
                    comment=before and before[1],
                    text="\n".join(lines[start + 1 : number]) + "\n",
                )
            )
            start = None
    assert start is None, f"{page.name}:{start + 1 if start else 0}: a block that does not end"
    return found


def outside_of_blocks(page: Path) -> list[tuple[int, str]]:
    """The other lines, with their numbers from 1."""
    inside = {n for block in blocks(page) for n in range(block.line, block.line + block.text.count("\n") + 2)}
    lines = page.read_text(encoding="utf-8").splitlines()
    return [(number, line) for number, line in enumerate(lines, 1) if number not in inside]
