"""Tests that every code fence runs, parses, or is listed in `NOT_RUN` with a reason, and that links and index are
complete.

Fences that call a running Headrace run in `test_tutorials.py`.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from headrace_cli.app import app
from headrace_runtime.errors import SettingError
from tests.docs.fences import (
    NOT_RUN,
    PARSED,
    ROOT,
    Fence,
    Folder,
    all_fences,
    check,
    executed,
    fences,
    key_of,
    pages,
    problem,
    tutorials,
)

_HEADRACE = re.compile(r"^\$ headrace (.*)$", re.MULTILINE)
_MAKE = re.compile(r"^make ([a-z-]+)", re.MULTILINE)
_TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)


def test_every_fence_says_what_it_is() -> None:
    assert [reason for page in pages() for fence in fences(page) if (reason := problem(fence))] == []


@pytest.mark.parametrize("fence", executed(stack=False), ids=lambda fence: fence.label)
def test_code_runs(fence: Fence, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.add_files(ROOT / fence.page)
    folder.run(fence)


@pytest.mark.parametrize(
    "fence", [fence for fence in all_fences() if fence.language in PARSED], ids=lambda fence: fence.label
)
def test_data_is_what_it_says(fence: Fence, tmp_path: Path) -> None:
    if fence.language == "toml":
        tomllib.loads(fence.text)
        settings = fence.file in (None, "headrace.toml")  # another file is another program's
        if settings and ROOT / fence.page not in tutorials():  # there a service reads it that the page itself adds
            check(fence.text, tmp_path)
    else:
        assert json.loads(fence.text) if fence.language == "json" else yaml.safe_load(fence.text)


@pytest.mark.parametrize(
    "fence", [fence for fence in all_fences() if fence.language == "diff"], ids=lambda fence: fence.label
)
def test_a_change_that_a_page_makes_fits_the_code(fence: Fence) -> None:
    git = ["git", "apply", "--check", "--recount", "-"]
    process = subprocess.run(git, cwd=ROOT, input=fence.text, capture_output=True, text=True, check=False)
    assert process.returncode == 0, f"{fence.label}: {process.stderr}"


_command_tree = functools.cache(get_command)


@pytest.mark.parametrize(
    "fence", [fence for fence in all_fences() if fence.language == "console"], ids=lambda fence: fence.label
)
def test_commands_that_are_only_shown_exist_with_these_options(fence: Fence) -> None:
    for line in _HEADRACE.findall(fence.text.replace("\\\n", " ")):
        group = _command_tree(app)
        words = shlex.split(line, comments=True)
        while isinstance(group, TyperGroup) and words and not words[0].startswith("-"):
            assert words[0] in group.commands, f"{fence.label}: no command {words[0]!r} in: headrace {line}"
            group = group.commands[words.pop(0)]
        options = {option for parameter in group.params for option in (*parameter.opts, *parameter.secondary_opts)}
        shown_options = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert shown_options <= options, f"{fence.label}: no option {shown_options - options} in: headrace {line}"


def test_what_is_not_run_is_still_there_and_names_real_targets() -> None:
    skipped = [fence for fence in all_fences() if key_of(fence)]
    assert sorted(key for fence in skipped if (key := key_of(fence))) == sorted(NOT_RUN), "each leaves out one fence"
    targets = set(_TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    named = {name for fence in skipped for name in _MAKE.findall(fence.text)}
    assert named <= targets, named - targets


def test_the_runner_sees_through_fences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of wrong page fails its check, so that the checks above can be trusted."""
    monkeypatch.setattr("tests.docs.fences.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```python\nassert False, 'seen'\n```\n")
    with pytest.raises(AssertionError, match="seen"):
        Folder(tmp_path).run(fences(page)[0])
    page.write_text("```\nx\n```\n")
    assert "page.md:1: fence language ''" in (problem(fences(page)[0]) or "")
    page.write_text("```python once\nx\n```\n")
    assert "'once' says nothing" in (problem(fences(page)[0]) or "")
    for wrong in ("[gateway]\nprot = 1", "[trainer]\nmodel = 3", "bus = 1", "[gatway]\nport = 1"):
        with pytest.raises(SettingError):
            check(wrong, tmp_path)


_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def links(page: Path) -> list[str]:
    """Return the targets of a page's links within the repository."""
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
    """Decisions have their own folder with an index, and GitHub's own files are not pages."""
    index = ROOT / "docs" / "README.md"
    named = {(index.parent / target).resolve() for target in links(index)} | {index}
    listed = [page for page in pages() if not {"decisions", "examples", ".github"} & set(page.parts)]
    assert [str(page.relative_to(ROOT)) for page in listed if page not in named] == []
