"""README.md and docs/*.md as text: links, anchors, and the blocks of commands."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^```(?P<about>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)[^)]*\)|<img[^>]* src=\"([^\"]+)\"|<a[^>]* href=\"([^\"]+)\"")
_HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)
_NO_ANCHOR = re.compile(r"[^\w\- ]")
_HERE_DOCUMENT = re.compile(r"<<'(\w+)'")
_FILE = re.compile(r"^cat > (?P<name>\S+) <<'END'\n(?P<text>.*?)^END$", re.MULTILINE | re.DOTALL)

SECOND_TERMINAL = 'title="second terminal"'
"""Behind ```sh: the block is typed while the block before it runs."""

BESIDE_THE_TEST = ("make test", "make install", "make demo", "make docs", "pip ", "git ", "cd ")
"""Commands with these beginnings are not executed: they install, or have tests of their own."""


@dataclass(frozen=True)
class Block:
    """The commands of one ```sh block; `beside` the block before it, in a second terminal."""

    text: str
    beside: bool

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command, without the lines of here-documents, comments and `&`."""
        found, end = [], ""
        for line in self.text.replace("\\\n", " ").splitlines():
            if end:
                end = "" if line == end else end
                continue
            found.append([word for word in shlex.split(line, comments=True) if word != "&"])
            if here := _HERE_DOCUMENT.search(line):
                end = here[1]
        return [words for words in found if words]

    @property
    def files(self) -> dict[str, str]:
        """The texts that `cat > NAME <<'END'` writes, by name."""
        return {match["name"]: match["text"] for match in _FILE.finditer(self.text)}

    @property
    def to_execute(self) -> str:
        """The text without the lines of BESIDE_THE_TEST."""
        lines = self.text.splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith(BESIDE_THE_TEST))


def pages() -> list[Path]:
    """README.md and every page of docs/."""
    return [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The ```sh blocks of a page, in order."""
    found = _FENCE.finditer(page.read_text())
    return [
        Block(block["text"], SECOND_TERMINAL in block["about"])
        for block in found
        if block["about"].split()[:1] == ["sh"]
    ]


def links(text: str) -> Iterator[str]:
    """The targets of the links and pictures of a page, without those in code."""
    prose = re.sub(r"`[^`\n]*`", "", _INDENTED.sub("", _FENCE.sub("", text)))
    for match in _LINK.finditer(prose):
        yield next(target for target in match.groups() if target)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub, and the site, give to the headings of a page."""
    seen: Counter[str] = Counter()
    found = set()
    for title in _HEADING.findall(_FENCE.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        name = _NO_ANCHOR.sub("", shown.lower()).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def faults_of(page: Path, text: str) -> list[str]:
    """A line per link of a page's text that leads nowhere, or out of docs/, which the site lacks."""
    faults = []
    for target in links(text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            faults.append(f"{page.name}: {target}: no such file")
        elif page.parent == DOCS and not file.is_relative_to(DOCS):
            faults.append(f"{page.name}: {target}: is not in docs/: write its name as code")
        elif anchor and anchor not in anchors(text if file == page else file.read_text()):
            faults.append(f"{page.name}: {target}: no such heading")
    return faults
