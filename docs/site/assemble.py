"""Layout of the pages for the generator: which files are pages, each under the path that it has in the repository, and
the targets of their links.

A page is also read where the repository is hosted, so it is plain Markdown with relative links. Here links to code lead
to pages that show the code, fences lose the arguments of the tests, formulas become MathML and diagrams SVG.

python -m docs.site.assemble FOLDER
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from os.path import relpath
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
_FENCE = re.compile(r"^( *)```(\w+)([^\n`]*)$", re.MULTILINE)
_FILE = re.compile(r"file=([\w./-]+)")
_DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^\$\$(.+?)\$\$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<![\\$\w])\$(?! )((?:(?!\n\n)[^$]){1,200}?)(?<! )\$(?![\w$])")
_LANGUAGES = {
    ".py": "python", ".java": "java", ".toml": "toml", ".json": "json", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash",
}  # fmt: skip
_HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"
_LINES_MAX = 1500


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


def main() -> None:
    """Lay all pages out in the named folder and replace its content."""
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    shown_links: dict[str, Link] = {}
    for page in pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        for link in links(page, text):
            shown_links[link.page] = link
        _write(target / page, page_text(page, text))
    for page in navigation():
        if page.endswith("/index.md"):
            shown_links[page] = Link(page.removesuffix("/index.md"), "", 0, 0)
    for path, link in shown_links.items():
        if path not in pages():
            _show(target, path, link, shown_links)
    for document in (path for path in tracked() if path.endswith(".openapi.json")):
        shutil.copyfile(ROOT / document, target / document)
    (target / "llms.txt").write_text(index_for_models(), encoding="utf-8")


def index_for_models() -> str:
    """Return `llms.txt` (llmstxt.org): each page of the navigation by section, with its title and first sentence."""
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    for entry in config["nav"]:
        (section, content), *_ = entry.items()
        named = content if isinstance(content, list) else [{section: content}]
        lines += ["", f"## {section}", ""]
        lines += [_entry(title, page) for item in named for title, page in item.items()]
    return "\n".join([*lines, ""])


def _entry(title: str, page: str) -> str:
    """Return the line of a page with its address relative to the root of the site."""
    source = ROOT / page
    return f"- [{title}]({address(page) or './'})" + (f": {_first_sentence(source)}" if source.exists() else "")


def _first_sentence(page: Path) -> str:
    """Return the first sentence below the title, without marks of Markdown."""
    paragraphs = page.read_text(encoding="utf-8").split("\n\n")[1:]
    text = next((each for each in paragraphs if each[:1].isalnum() or each.startswith(("*", "`", "["))), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[*`]", r"\1", " ".join(text.split()))
    return re.split(r"(?<=\.)\s(?=[A-Z])", plain, maxsplit=1)[0]


def page_text(page: str, text: str) -> str:
    """One page as the generator gets it."""
    for link in reversed(links(page, text)):
        anchor = f"#{link.anchor}" if link.anchor else ""
        text = text[: link.start] + relpath(link.page, Path(page).parent.as_posix()) + anchor + text[link.stop :]
    text = _DIAGRAM.sub(lambda match: _diagram(match[1]), text)
    text = _replaced(text, _BLOCK, lambda tex: _formula(tex, "block"))
    text = _replaced(text, _INLINE, lambda tex: _formula(tex, "inline"))
    return _FENCE.sub(_fence, text)


def _fence(match: re.Match[str]) -> str:
    """`stack` is for the tests; the name of a file is its title."""
    file = _FILE.search(match[3])
    return f"{match[1]}```{match[2]}" + (f' title="{file[1]}"' if file else "")


def _replaced(text: str, pattern: re.Pattern[str], change: Callable[[str], str]) -> str:
    for match in reversed(list(outside_code(text, pattern))):
        text = text[: match.start()] + change(match[1]) + text[match.end() :]
    return text


def _formula(tex: str, display: str) -> str:
    from latex2mathml.converter import convert

    markup: str = convert(tex, display=display)
    return markup


def _diagram(source: str) -> str:
    from mermaidx import render

    return f'<div class="diagram">{render(source).svg()}</div>'


def _show(target: Path, path: str, link: Link, shown_links: dict[str, Link]) -> None:
    """Show the target of a link that is no page: a picture, a folder, or the text of a file."""
    source = ROOT / link.path
    if link.is_picture:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / path)
    elif source.is_dir():
        _write(target / path, _listing(link.path, target, shown_links))
    else:
        _write(target / path, _source(link.path))


def _listing(folder: str, target: Path, shown_links: dict[str, Link]) -> str:
    inside = [path for path in tracked() if path.startswith(f"{folder}/")]
    lines = []
    for path in inside:
        link = Link(path, "", 0, 0)
        if link.page not in pages() and link.page not in shown_links:
            _show(target, link.page, link, shown_links)
        lines.append(f"- [{_title(path, folder)}]({relpath(link.page, folder)})")
    return "\n".join([_HIDDEN + f"# {folder}", "", *lines, ""])


def _title(path: str, folder: str) -> str:
    if not path.endswith(".md"):
        return path.removeprefix(f"{folder}/")
    return (ROOT / path).read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ")


def _source(path: str) -> str:
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    if len(lines) > _LINES_MAX:
        lines = [*lines[:_LINES_MAX], f"... {len(lines) - _LINES_MAX} more lines"]
    language = _LANGUAGES.get(Path(path).suffix, "text")
    return _HIDDEN + "\n".join([f"# {path}", "", f"`````{language}", *lines, "`````", ""])


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
