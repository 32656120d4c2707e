"""Finds the lists of names that the code closes: whoever adds one of the kind has to change the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"[a-z][a-z0-9_.+-]*")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class Closed:
    """A list of names, and where it stands."""

    place: str
    names: frozenset[str]


def closed_in(path: Path, place: str) -> Iterator[Closed]:
    """`Literal` types, constants that are collections of names, `in ("a", "b")`, and one value that is compared with
    several names in one function."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        for names in _lists(node):
            if len(names) > 1:
                yield Closed(f"{place}:{getattr(node, 'lineno', 0)}", frozenset(names))


def _lists(node: ast.AST) -> Iterator[set[str]]:
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal":
        yield _names(node.slice)
    elif isinstance(node, ast.Module | ast.ClassDef):
        for statement in node.body:
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                yield _assigned(statement)
    elif isinstance(node, ast.Compare) and any(isinstance(one, ast.In | ast.NotIn) for one in node.ops):
        yield _names(node.comparators[0])
    elif isinstance(node, _FUNCTIONS):
        compared: dict[str, set[str]] = {}
        for inner in ast.walk(node):
            if isinstance(inner, ast.Compare) and isinstance(inner.ops[0], ast.Eq | ast.NotEq):
                compared.setdefault(ast.dump(inner.left), set()).update(_names(inner.comparators[0]))
            elif isinstance(inner, ast.Match):
                patterns = [case.pattern for case in inner.cases]
                values = [one.value for one in patterns if isinstance(one, ast.MatchValue)]
                compared.setdefault(ast.dump(inner.subject), set()).update(*map(_names, values))
        yield from compared.values()


def _assigned(statement: ast.Assign | ast.AnnAssign) -> set[str]:
    """None for `COMMON`: there a section of settings says which of its own names users set, a package's section too."""
    target = statement.target if isinstance(statement, ast.AnnAssign) else None
    own = isinstance(target, ast.Name) and target.id == "COMMON"
    return set() if own or statement.value is None else _names(statement.value)


def _names(node: ast.expr) -> set[str]:
    """The names in a collection, or the one that a constant is; none when it holds anything else."""
    if isinstance(node, ast.Constant):
        return {node.value} if isinstance(node.value, str) and _NAME.fullmatch(node.value) else set()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "frozenset" and node.args:
        return _names(node.args[0])
    items = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else []
    if isinstance(node, ast.Dict):
        items = [key for key in node.keys if key is not None]
    found = [_names(item) if isinstance(item, ast.Constant) else set() for item in items]
    return set().union(*found) if all(found) else set()
