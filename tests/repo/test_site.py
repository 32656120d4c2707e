"""The site holds together before it is built: navigation, reach, nothing from elsewhere, pages as the generator wants.

`make docs` builds it, with an environment of its own, and checks what was built."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from docs.site import check, results
from docs.site.assemble import page_text
from docs.site.pages import CONFIG, FRONT, ROOT, links, navigation, outside_code, pages, shown_as

FOLDERS = {"docs/decisions/index.md": "docs/decisions"}
"""Pages of the navigation that are listings of a folder, made when the site is built."""


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def test_the_navigation_names_pages_that_exist_each_once() -> None:
    named = navigation()
    assert len(set(named)) == len(named)
    assert [page for page in named if page not in pages() and not Path(ROOT, FOLDERS.get(page, "no")).is_dir()] == []
    assert named[0] == FRONT


def test_every_page_is_two_clicks_from_the_front_page() -> None:
    """The navigation is on each page; what it does not name, a page that it names links to."""
    first = set(navigation())
    second = set(first)
    for page in first & set(pages()):
        second |= {link.page for link in links(page, read(page))}
    for listing in first & FOLDERS.keys():
        second |= {page for page in pages() if page.startswith(f"{FOLDERS[listing]}/")}
    assert [page for page in pages() if page not in second] == []


@pytest.mark.parametrize("page", pages())
def test_a_page_loads_nothing_from_elsewhere(page: str) -> None:
    pattern = re.compile(r"!\[[^\]]*\]\(https?:|<(?:img|script|link|iframe)\b[^>]*(?:src|href)=.https?:")
    assert [match[0] for match in outside_code(read(page), pattern)] == []


def test_the_site_is_set_to_load_nothing_from_elsewhere() -> None:
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    assert config["theme"]["font"] is False
    assert not {"extra_css", "extra_javascript"} & config.keys()


def test_what_the_tests_read_of_a_fence_the_site_does_not_show() -> None:
    page = "docs/gate.md"
    text = page_text(
        page, "```python stack\nx\n```\n```toml file=a/b.toml\n```\n[code](../gateway/README.md#urls) `[no](x.py)`\n"
    )
    assert text == (
        '```python\nx\n```\n```toml title="a/b.toml"\n```\n[code](../gateway/README.md#urls) `[no](x.py)`\n'
    )


def test_a_link_to_code_leads_to_a_page_that_shows_it() -> None:
    text = page_text("docs/gate.md", "[it](../cli/src/headrace_cli/guard.py) and [all](decisions)")
    assert text == "[it](../cli/src/headrace_cli/guard_py.md) and [all](decisions/index.md)"
    assert shown_as(".env.example") == "_env_example.md"


def test_figures_are_those_of_the_one_file() -> None:
    found = [(page, results.written(read(page)) == read(page)) for page in results.PAGES]
    assert found == [(page, True) for page in results.PAGES], "run python -m docs.site.results"
    used = {name for page in results.PAGES for _, name, _ in results.BLOCK.findall(read(page))}
    assert used == results.BLOCKS.keys()


def test_decisions_are_numbered_without_gaps() -> None:
    decisions = list((ROOT / "docs" / "decisions").glob("*.md"))
    numbers = [path.name[:4] for path in decisions]
    assert sorted(numbers) == [f"{number:04}" for number in range(1, len(numbers) + 1)]
    for path in decisions:
        assert path.read_text(encoding="utf-8").startswith(f"# {int(path.name[:4])}. "), path.name


def test_the_check_of_the_built_site_sees_what_is_wrong(tmp_path: Path) -> None:
    for name, text in {
        "index.html": '<a href="a/">a</a><script src="https://cdn.example/x.js"></script>',
        "a/index.html": '<a href="../b/index.html">b</a>',
        "b/index.html": '<a href="../c/#there">c</a>',
        "c/index.html": "",
        "lost/index.html": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    built = check.read(tmp_path)
    assert check.clicks(built) == {"index.html": 0, "a/index.html": 1, "b/index.html": 2, "c/index.html": 3}
    assert check.elsewhere(built) == ["https://cdn.example/x.js"]


def test_what_builds_the_site_is_pinned_with_hashes_and_names_no_host() -> None:
    lock = read("requirements-docs.lock")
    entries = re.split(r"\n(?=\w)", lock.strip())
    assert all("==" in entry and "--hash=sha256:" in entry for entry in entries)
    assert "://" not in lock
    wanted = {line for line in read("requirements-docs.in").splitlines() if line and not line.startswith("#")}
    assert wanted <= {entry.split("==")[0] for entry in entries}
