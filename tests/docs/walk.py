"""Claims of `docs/life-of-a-trajectory.md` about the code."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.docs.fences import ROOT

PAGE = ROOT / "docs" / "life-of-a-trajectory.md"
_STEP = re.compile(r"^## \d+\. (\w+): (.*)$", re.MULTILINE)
_POINT = re.compile(r"^- (.*?)(?=^- |^\n|\Z)", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"\[`([\w.]+)`\]\(([^)]+\.py)\)")
_TOPICS = re.compile(r"(Reads|Writes) ([^.]*)\.")


@dataclass(frozen=True)
class Name:
    """A function or class that the page links to."""

    qualified: str
    path: Path

    @property
    def simple(self) -> str:
        return self.qualified.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.qualified} in {self.path.relative_to(ROOT)}"


@dataclass(frozen=True)
class Step:
    """One section: the service it happens in, its topics, and its points, each the names of one bullet in order."""

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
    """Return all links of the page, including those outside bullets."""
    return list(dict.fromkeys(_names(PAGE.read_text(encoding="utf-8"))))


def definition(name: Name) -> ast.AST | None:
    """Return the definition of a name in the code, None when there is none."""
    node_found: ast.AST | None = _tree(name.path)
    for part in name.qualified.split("."):
        body = getattr(node_found, "body", [])
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        node_found = next((node for node in body if isinstance(node, kinds) and node.name == part), None)
    return node_found


def used_by(name: Name) -> set[str]:
    """The simple names that its definition mentions."""
    node = definition(name)
    assert node is not None, f"{name} does not exist"
    named = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    return named | {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
