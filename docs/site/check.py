"""Check of the built site: each page is two clicks at most from the front page, and no resource comes from elsewhere.

python -m docs.site.check SITE REPORT
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from os.path import normpath
from pathlib import Path
from urllib.parse import unquote, urlsplit

from docs.site.assemble import address
from docs.site.assemble import pages as documentation

_CLICKS_MAX = 2
_LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
_ONLY_NAMED = {"canonical", "alternate", "next", "prev"}


class Page(HTMLParser):
    """Links and resources of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called by the parser for each element."""
        attributes = dict(attrs)
        if tag == "a" and (target := attributes.get("href")):
            self.links.append(target)
        target = attributes.get(_LOADED.get(tag, ""))
        if target and attributes.get("rel") not in _ONLY_NAMED:
            self.loads.append(target)


def read(site: Path) -> dict[str, Page]:
    """Return the links and resources of each page, by its path relative to the site."""
    paths = {path.relative_to(site).as_posix(): path for path in site.rglob("*.html") if path.name != "404.html"}
    return {name: Page(path.read_text(encoding="utf-8")) for name, path in paths.items()}


def clicks(pages: dict[str, Page]) -> dict[str, int]:
    """Return the clicks from the front page to each page; unreachable pages are missing."""
    clicks_to = {"index.html": 0}
    waiting = ["index.html"]
    while waiting:
        page = waiting.pop(0)
        for target in pages[page].links:
            name = _target(page, target)
            if name in pages and name not in clicks_to:
                clicks_to[name] = clicks_to[page] + 1
                waiting.append(name)
    return clicks_to


def _target(page: str, link: str) -> str:
    """The page that a link leads to, as `read` names it; empty when it leaves the site."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return ""
    path = normpath(f"{page.rpartition('/')[0] or '.'}/{unquote(parts.path)}") if parts.path else page
    return path if path.endswith(".html") else normpath(f"{path}/index.html")


def elsewhere(pages: dict[str, Page]) -> list[str]:
    """Return the resources that pages load from another host."""
    return sorted({target for page in pages.values() for target in page.loads if urlsplit(target).netloc})


def unbuilt(index: str, pages: Mapping[str, Page]) -> list[str]:
    """Return the addresses of `llms.txt` at which the site has no page."""
    addresses = re.findall(r"^- \[[^\]]*\]\(([^)]*)\)", index, re.MULTILINE)
    return [each for each in addresses if f"{each.removeprefix('./')}index.html" not in pages]


def main() -> None:
    """Return 1 when a page is too far away or needs another host; the report has the reasons."""
    site, report = map(Path, sys.argv[1:])
    pages = read(site)
    clicks_to = clicks(pages)
    written = {f"{address(page)}index.html" for page in documentation()}
    far = sorted(name for name in written if clicks_to.get(name, _CLICKS_MAX + 1) > _CLICKS_MAX)
    lost = sorted(pages.keys() - clicks_to.keys())
    dead = unbuilt((site / "llms.txt").read_text(encoding="utf-8"), pages)
    summary = {
        "pages": len(written),
        "texts_of_files": len(pages) - len(written),
        "clicks_max": max(clicks_to[name] for name in written if name in clicks_to),
        "too_far": far,
        "not_reachable": lost,
        "unbuilt_in_llms_txt": dead,
        "elsewhere": elsewhere(pages),
    }
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    wrong = far + lost + dead + elsewhere(pages)
    sys.stdout.write(f"{len(written)} pages, each {summary['clicks_max']} clicks at most from the front page\n")
    if wrong:
        sys.exit(f"further than {_CLICKS_MAX} clicks, not built, or from elsewhere: {', '.join(wrong[:20])}")


if __name__ == "__main__":
    main()
