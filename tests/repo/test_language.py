"""Tests that all code stays within the limits of plain language, and that the glossary and the pitfalls name existing
code.

The measures are names without a noun, docstring sentences without a head noun, and pronouns in docstrings. The rules
are in CONTRIBUTING.md. The measures are only indicators: replacing one vague word by another lowers the figure and
helps no reader.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.repo.deployments import ROOT

_EMPTY = """
found one ones said say says made given gives known told held kept taken asked asks wanted shown own
place places room many whole theirs ours others anew there here gone due doubt taught fate
whereabouts moment lead standing patience aside demands door book situation so_far thing things what
who whose done tried spoken heard meant all_of part_of it them
"""
EMPTY_NAMES = frozenset(_EMPTY.split())
"""Names that state neither what a value holds nor what it is for."""
_NO_HEAD = re.compile(
    r"^(What|Who|Whoever|Whom|Whose|Which|Where|Nobody|Nothing|Somebody|Everybody|Everything|It|They|Those|These|That|Of|"
    r"The same|As|So|Not|In what|By what|From what|To what|With what|How much|How many|All that|None)\b"
)
_PRONOUNS = re.compile(
    r"\b(what|who|whoever|whom|whose|nobody|somebody|everybody|nothing|says?|said|tells?|told|asks?|asked|speaks?|spoke|"
    r"spoken|anew|beside|theirs|ours|thing|things)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Measures:
    """Vague names per 1,000 lines, headless docstring sentences in percent, and pronouns per 1,000 words of
    docstrings."""

    names: float
    headless: float
    pronouns: float

    def within(self, limits: Measures) -> bool:
        return self.names <= limits.names and self.headless <= limits.headless and self.pronouns <= limits.pronouns


LIMITS = Measures(names=1.0, headless=4.0, pronouns=3.0)


def measure(paths: Iterable[Path]) -> Measures:
    """Return the measures of all files together."""
    lines = names = words = pronouns = sentences = headless = 0
    for path in paths:
        text = path.read_text(encoding="utf-8")
        nodes = [*ast.walk(ast.parse(text))]
        lines += text.count("\n")
        names += sum(name.strip("_").rstrip("0123456789").strip("_") in EMPTY_NAMES for name in _bound_names(nodes))
        for docstring in _docstrings(nodes):
            words += len(docstring.split())
            pronouns += len(_PRONOUNS.findall(docstring))
            parts = [part for part in re.split(r"(?<=[.:;!?])\s+|\n\s*\n", docstring) if part.strip()]
            sentences += len(parts)
            headless += sum(bool(_NO_HEAD.match(part.strip())) for part in parts)
    return Measures(
        names=1000 * names / max(lines, 1),
        headless=100 * headless / max(sentences, 1),
        pronouns=1000 * pronouns / max(words, 1),
    )


def _bound_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names of variables, parameters, assigned attributes, functions and classes."""
    for node in nodes:
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                yield node.id
        elif isinstance(node, ast.Attribute):
            if isinstance(node.ctx, ast.Store):
                yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield node.name.lower()


def _docstrings(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the docstring of every module, class, function and attribute."""
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for child in node.body:
                match child:
                    case ast.Expr(value=ast.Constant(value=str() as text)):
                        yield text


GROUPS = {
    "source": ("packages", "schemas", "gateway", "services"),
    "tests": ("tests",),
    "benchmarks": ("benchmarks",),
    "examples": ("examples",),
    "docs": ("docs",),
}


def _files(folders: tuple[str, ...]) -> list[Path]:
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py") if "build" not in path.parts]


@pytest.mark.parametrize("group", GROUPS)
def test_names_and_docstrings_are_plain(group: str) -> None:
    measured = measure(_files(GROUPS[group]))
    assert measured.within(LIMITS), f"{group}: {measured}, limit {LIMITS}; CONTRIBUTING.md has the rules"


def test_measures_count_what_the_rules_forbid(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('def due(found):\n    """What is left. Return it."""\n    one = found\n', encoding="utf-8")
    assert measure([module]) == Measures(names=1000.0, headless=50.0, pronouns=200.0)


TEXT = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([\w -]+) \| `(\w+)(?:\.(\w+))?` \| (.+) \|$", TEXT, re.MULTILINE)

Defined = Mapping[str, Sequence[tuple[str, str, set[str]]]]
"""All classes by name, each as its package, its file, and its fields and methods."""


def _sources() -> Iterable[tuple[str, Path]]:
    """Yield the import package and the path of each source file of the project."""
    for init in sorted(
        [
            *ROOT.glob("*/src/*/__init__.py"),
            *ROOT.glob("packages/*/src/*/__init__.py"),
            *ROOT.glob("services/*/src/*/__init__.py"),
        ]
    ):
        yield from ((init.parent.name, path) for path in sorted(init.parent.rglob("*.py")))


def _classes() -> Defined:
    classes: dict[str, list[tuple[str, str, set[str]]]] = defaultdict(list)
    for package, path in _sources():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                names = {
                    statement.target.id
                    for statement in node.body
                    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
                }
                names |= {
                    statement.name
                    for statement in node.body
                    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
                }
                classes[node.name].append((package, str(path.relative_to(ROOT)), names))
    return classes


def test_no_word_is_listed_twice() -> None:
    words = [word for word, *_ in ROWS]
    assert len(words) > 60
    assert len(set(words)) == len(words)


def test_a_word_is_what_the_code_calls_it() -> None:
    classes = _classes()
    undefined = [
        (word, name, member)
        for word, name, member, *_ in ROWS
        if not any(not member or member in members for _, _, members in classes.get(name, ()))
    ]
    assert undefined == []


PAGE = (ROOT / "docs" / "pitfalls.md").read_text(encoding="utf-8")


def test_every_pitfall_names_tests_that_exist() -> None:
    entries = re.split(r"(?m)^\d+\. \*\*", PAGE)[1:]
    assert len(entries) == 29
    for entry in entries:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", entry)
        assert named, entry
        for path, function in named:
            text = (ROOT / path).read_text(encoding="utf-8")
            assert not function or f"def {function}(" in text, f"{path} has no {function}"
