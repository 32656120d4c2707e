"""`docs/glossary.md` names classes that exist, and retired words do not come back."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.repo.compose_files import ROOT

TEXT = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([\w -]+) \| `(\w+)(?:\.(\w+))?` \| (.+) \|$", TEXT, re.MULTILINE)
RETIRED = dict(re.findall(r"^\| (\w+) \| ([^|`]+) \|$", TEXT.partition("## Words that name nothing")[2], re.MULTILINE))
RETIRED.pop("not", None)

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


CLASSES = _classes()
STEMS = sorted({(package, path.stem) for package, path in _sources()})


def retired(names: Iterable[str]) -> list[str]:
    """Return a message for each class name or file name that contains a retired word."""
    names_and_parts = [(name, {part.lower() for part in _parts(name)}) for name in names]
    return [
        f"{name}: say {instead} instead of {word}"
        for name, parts in names_and_parts
        for word, instead in RETIRED.items()
        if not parts.isdisjoint({word, f"{word}s"})
    ]


def _parts(name: str) -> list[str]:
    """Return the words of a name in CamelCase or snake_case, and the singular of each plural."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)
    return [*parts, *(part.removesuffix("s") for part in parts)]


def test_no_word_is_listed_twice() -> None:
    words = [word for word, *_ in ROWS]
    assert len(words) > 60
    assert len(set(words)) == len(words)
    assert not set(words) & set(RETIRED), "a retired word is not in the glossary"


def test_a_word_is_what_the_code_calls_it() -> None:
    undefined = [
        (word, name, member)
        for word, name, member, *_ in ROWS
        if not any(not member or member in members for _, _, members in CLASSES.get(name, ()))
    ]
    assert undefined == []


def test_retired_words_do_not_come_back() -> None:
    assert len(RETIRED) > 5
    assert retired([*CLASSES, *(stem for _, stem in STEMS)]) == []


def test_a_planted_retired_word_is_caught() -> None:
    assert retired(["Rehearsal", "said_about", "ReplicaSet"]) == [
        "Rehearsal: say dry run instead of rehearsal",
        "said_about: say feedback set (scorer), request metadata (gateway) instead of said",
    ]
