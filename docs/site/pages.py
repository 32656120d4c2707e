"""Files that are pages of the site, and the targets of their links."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "mkdocs.yml"
FRONT = "README.md"
_CODE = re.compile(r"^ *(`{3,}).*?^ *\1 *$|``.+?``|`[^`\n]+`|<!--.*?-->", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\])\((?P<target>[^)\s]+)\)")
_NOT_OURS = re.compile(r"[a-z]+:|#")
_NO_PAGES = (".github/",)


@dataclass(frozen=True)
class Link:
    """A link to a file of the repository: its target relative to ROOT, with the anchor, and its position."""

    path: str
    anchor: str
    start: int
    stop: int

    @property
    def page(self) -> str:
        """The page that shows it: itself, the README of a folder, a listing of the folder, or the file's own text."""
        target = ROOT / self.path
        if target.is_dir():
            readme = f"{self.path}/README.md"
            return readme if (ROOT / readme).exists() else f"{self.path}/index.md"
        return self.path if self.path.endswith(".md") or self.is_picture else shown_as(self.path)

    @property
    def is_picture(self) -> bool:
        return Path(self.path).suffix in {".png", ".svg"}


def shown_as(path: str) -> str:
    """The page that has the text of a file which is no page."""
    return f"{path.replace('.', '_')}.md"


@cache
def tracked() -> tuple[str, ...]:
    """Files of the repository, those not yet added among them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(line for line in sorted(listed.stdout.splitlines()) if (ROOT / line).exists())


@cache
def pages() -> tuple[str, ...]:
    """Return every Markdown file except those that only the host of the repository reads."""
    return tuple(path for path in tracked() if path.endswith(".md") and not path.startswith(_NO_PAGES))


def address(page: str) -> str:
    """Return the folder of the site in which the generator puts a page; empty for the front page."""
    folder, _, name = page.removesuffix(".md").rpartition("/")
    return f"{page.removesuffix('.md')}/" if name not in ("README", "index") else f"{folder}/" if folder else ""


def outside_code(text: str, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
    """Matches that stand neither in code nor in a comment."""
    code = [match.span() for match in _CODE.finditer(text)]
    for match in pattern.finditer(text):
        if not any(start <= match.start() < stop for start, stop in code):
            yield match


def links(page: str, text: str) -> list[Link]:
    """Links from `page` to files and folders of the repository, in order."""
    page_links = []
    for match in outside_code(text, _LINK):
        name, _, anchor = match["target"].partition("#")
        if name and not _NOT_OURS.match(name):
            path = ((ROOT / page).parent / name).resolve().relative_to(ROOT).as_posix()
            page_links.append(Link(path, anchor, *match.span("target")))
    return page_links


def navigation() -> list[str]:
    """The pages that stand in the navigation, in its order. Every page of the site shows it."""

    def leaves(node: Any) -> Iterator[str]:
        if isinstance(node, str):
            yield node
        else:
            for child in node.values() if isinstance(node, dict) else node:
                yield from leaves(child)

    return list(leaves(yaml.load(CONFIG.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)["nav"]))
