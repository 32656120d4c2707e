"""Measures of plain language: names without a noun, docstring sentences without a head noun, pronouns in docstrings.

The rules are in CONTRIBUTING.md. The measures are a thermometer: replacing one empty word by another lowers the figure
and helps no reader.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

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
    """Empty names per 1,000 lines, headless docstring sentences in percent, pronouns per 1,000 words of docstrings."""

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
        tree = ast.parse(text)
        lines += text.count("\n")
        names += sum(name.strip("_").rstrip("0123456789").strip("_") in EMPTY_NAMES for name in _bound_names(tree))
        for docstring in _docstrings(tree):
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


def _bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names of variables, parameters, assigned attributes, functions and classes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name.lower()


def _docstrings(tree: ast.AST) -> Iterator[str]:
    """Yield every string that stands as a statement of a module, class or function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for child in node.body:
                match child:
                    case ast.Expr(value=ast.Constant(value=str() as text)):
                        yield text
