"""Pages hang together: links lead to something, anchors included, and the index names every page."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.fences import ROOT, pages

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def links(page: Path) -> list[str]:
    """The targets of a page's links within the repository."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [target for target in _LINK.findall(text) if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub generates for headings."""
    headings = _HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for page, target in ((source, link) for source in pages() for link in links(source)):
        name, _, anchor = target.partition("#")
        linked_page = (page.parent / name).resolve() if name else page
        assert linked_page.exists(), f"{page.relative_to(ROOT)} links to {target}"
        assert linked_page.is_relative_to(ROOT), f"{target} is outside the repository"
        if anchor:
            assert anchor in anchors(linked_page), f"{page.relative_to(ROOT)} links to {target}: no such heading"


def test_the_index_names_every_page() -> None:
    """Check the list of pages. Decisions have a folder of their own, and GitHub's own files are no pages."""
    index = ROOT / "docs" / "README.md"
    named = {(index.parent / target).resolve() for target in links(index)} | {index}
    listed = [page for page in pages() if not {"decisions", "examples", ".github"} & set(page.parts)]
    assert [str(page.relative_to(ROOT)) for page in listed if page not in named] == []
