"""Tests that every code fence runs, parses, or is listed in `NOT_RUN` with a reason, that links and index are complete,
and that the claims of `docs/life-of-a-trajectory.md` about the code are true.

Fences that call a running Headrace run in `test_tutorials.py`, which also follows a real turn. A trail that is read
while services write waits for missing events.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import shlex
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from headrace_cli.app import app
from headrace_runtime.errors import SettingError
from headrace_schemas import EVENTS, Checkpoint, Event, Experience, Reward, RewardPart, Trajectory, Turn
from headrace_schemas.values.blobs import BlobRef
from tests.docs.fences import (
    FOLLOWED,
    NOT_RUN,
    PARSED,
    ROOT,
    Fence,
    Folder,
    Log,
    Missing,
    all_fences,
    check,
    executed,
    fences,
    follow,
    key_of,
    pages,
    problem,
    tutorials,
)
from tests.support.turns import START, ask, closed, feedback, report, user, verdict

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


PAGE = ROOT / "docs" / "life-of-a-trajectory.md"
_STEP = re.compile(r"^## \d+\. (\w+): (.*)$", re.MULTILINE)
_POINT = re.compile(r"^- (.*?)(?=^- |^\n|\Z)", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"\[`([\w.]+)`\]\(([^)]+\.py)\)")
_TOPICS = re.compile(r"(Reads|Writes) ([^.]*)\.")


@dataclass(frozen=True)
class Name:
    """Function or class that the page links to."""

    qualified: str
    path: Path

    @property
    def simple(self) -> str:
        return self.qualified.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.qualified} in {self.path.relative_to(ROOT)}"


@dataclass(frozen=True)
class Step:
    """Section of the page: its service, its topics, and the linked names of each bullet in order."""

    service: str
    reads: frozenset[str]
    writes: frozenset[str]
    points: tuple[tuple[Name, ...], ...]


@cache
def steps() -> tuple[Step, ...]:
    parts = _STEP.split(PAGE.read_text(encoding="utf-8"))[1:]
    return tuple(_step(service, text) for service, text in zip(parts[::3], parts[2::3], strict=True))


def _step(service: str, text: str) -> Step:
    topics: dict[str, frozenset[str]] = {"Reads": frozenset(), "Writes": frozenset()}
    for verb, named in _TOPICS.findall(text.strip().split("\n\n")[0]):
        topics[verb] = frozenset(re.findall(r"`([a-z-]+)`", named))
    return Step(service, topics["Reads"], topics["Writes"], tuple(map(_names, _POINT.findall(text))))


def _names(text: str) -> tuple[Name, ...]:
    return tuple(Name(name, (PAGE.parent / target).resolve()) for name, target in _NAME.findall(text))


def every_name() -> list[Name]:
    """Return all linked names of the page, including those outside bullets."""
    return list(dict.fromkeys(_names(PAGE.read_text(encoding="utf-8"))))


def definition(name: Name) -> ast.AST | None:
    """Return the definition of `name` in the code, or None if there is none."""
    node_found: ast.AST | None = _tree(name.path)
    for part in name.qualified.split("."):
        body = getattr(node_found, "body", [])
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        node_found = next((node for node in body if isinstance(node, kinds) and node.name == part), None)
    return node_found


def used_by(name: Name) -> set[str]:
    """Return the simple names that the definition of `name` mentions."""
    node = definition(name)
    assert node is not None, f"{name} does not exist"
    named = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    return named | {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


TOPICS = ROOT / "schemas" / "src" / "headrace_schemas" / "topics.yaml"
OF_STEP = [pytest.param(step, id=f"{number}-{step.service}") for number, step in enumerate(steps(), 1)]


def test_what_is_named_exists() -> None:
    for name in every_name():
        assert name.path.exists(), f"no file {name.path.relative_to(ROOT)}"
        assert definition(name) is not None, f"no {name}"


@pytest.mark.parametrize("step", OF_STEP)
def test_the_order_of_the_story_is_that_of_the_code(step: Step) -> None:
    """Each name of a point must be used by the definition of an earlier name."""
    assert step.points, "a step without a function"
    for names in step.points:
        before: set[str] = set()
        for name in names:
            called = name.qualified.split(".")[-2] if name.simple == "__call__" else name.simple
            assert not before or called in before, (
                f"nothing before {name} uses it: {[str(name_before) for name_before in names]}"
            )
            before |= used_by(name)


@pytest.mark.parametrize("step", OF_STEP)
def test_topics_have_the_producer_and_the_consumer_that_the_page_says(step: Step) -> None:
    specs = yaml.safe_load(TOPICS.read_text(encoding="utf-8"))
    for topic in step.reads | step.writes:
        described = specs[topic]
        if topic in step.reads:
            assert step.service in described["consumers"], f"{step.service} does not read {topic}"
        elif topic != "dead-letters":  # everybody's
            assert step.service == described["producer"], f"{step.service} does not write {topic}"


def test_the_trail_goes_through_every_topic_that_the_page_writes() -> None:
    written = {topic for step in steps() for topic in step.writes}
    assert written == {*FOLLOWED, "session-ends", "dead-letters"}
    assert written <= EVENTS.keys()


def experience_of(run: Trajectory, turn: Turn, *sources: str) -> Experience:
    return Experience(
        time=START, experience_id=Experience.id_of(run.trajectory_id, 0), trajectory_id=run.trajectory_id,
        session_key=run.session_key, session_id="s", model="m", branch=run.branches[0], turn_ids=(turn.turn_id,),
        reward=1.0, parts=tuple(RewardPart(source=source, value=1.0, weight=1.0) for source in sources),
    )  # fmt: skip


def rewarded(run: Trajectory, source: str) -> Reward:
    return Reward(
        time=START, trajectory_id=run.trajectory_id, session_key=run.session_key, source=source, revision=0,
        outcome="scored", value=1.0,
    )  # fmt: skip


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(
        time=START, model="m", version=f"m@{step:012x}", lineage="main", step=step,
        manifest=BlobRef(uri="none", sha256="0" * 64, size=0),
    )  # fmt: skip


def test_a_reward_that_came_after_its_topic_was_read_is_waited_for() -> None:
    """Topics are read one after the other, so an experience may contain a reward that was not yet in the topic when
    it was read."""
    turn = ask([user("q")])
    run = closed(turn)
    experience = experience_of(run, turn, "function:a", "feedback")
    seen: list[Event] = [turn, feedback("s", turn), run, rewarded(run, "function:a"), experience]
    with pytest.raises(Missing, match="feedback"):
        follow(Log(seen), turn.turn_id)
    with pytest.raises(Missing, match="training-metrics"):
        follow(Log([*seen, rewarded(run, "feedback")]), turn.turn_id)


def test_a_batch_that_moved_no_weights_is_in_the_next_version() -> None:
    """In one of 35 walks, a batch has only equal rewards, so that no version is published after it."""
    turn = ask([user("q")])
    run = closed(turn)
    experience = experience_of(run, turn, "feedback")
    seen: list[Event] = [turn, feedback("s", turn), run, rewarded(run, "feedback"), experience, checkpoint(0)]
    seen.append(report(verdict(experience.experience_id, turn.turn_id)))
    with pytest.raises(Missing, match="checkpoints"):
        follow(Log(seen), turn.turn_id)
    with pytest.raises(Missing, match="model-events"):
        follow(Log([*seen, checkpoint(1)]), turn.turn_id)


def test_a_version_is_that_of_its_report() -> None:
    turn = ask([user("q")])
    run = closed(turn)
    experience = experience_of(run, turn, "feedback")
    reported = report(verdict(experience.experience_id, turn.turn_id), save=1)
    seen: list[Event] = [turn, feedback("s", turn), run, rewarded(run, "feedback"), experience, checkpoint(2)]
    seen.append(reported.model_copy(update={"version": checkpoint(1).version}))
    with pytest.raises(Missing, match="checkpoints"):
        follow(Log(seen), turn.turn_id)
    with pytest.raises(Missing, match="model-events"):
        follow(Log([*seen, checkpoint(1)]), turn.turn_id)
