"""`docs/glossary.md` names what exists, each word once, and each class is the only one of its name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

import pytest

from tests.repo.compose_files import ROOT

ROW = re.compile(r"^\| ([\w ]+) \| `(\w+)(?:\.(\w+))?` \| (.+) \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"))


def _classes() -> dict[str, list[tuple[str, set[str]]]]:
    """Name to each class of it: its file, and its fields and methods."""
    found: dict[str, list[tuple[str, set[str]]]] = defaultdict(list)
    for folder in ("schemas/src", "runtime/src", "sdk/src", "cli/src", "gateway/src", "services"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    names = {
                        one.target.id
                        for one in node.body
                        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
                    }
                    names |= {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                    found[node.name].append((str(path.relative_to(ROOT)), names))
    return found


CLASSES = _classes()


def test_no_word_has_two_meanings() -> None:
    words = [word for word, *_ in ROWS]
    assert len(words) > 40
    assert len(set(words)) == len(words)


@pytest.mark.parametrize(("word", "name", "member"), [row[:3] for row in ROWS], ids=[row[0] for row in ROWS])
def test_a_word_is_what_the_code_calls_it(word: str, name: str, member: str) -> None:
    defined = CLASSES[name]
    assert len(defined) == 1, f"{word}: {name} is defined in {[path for path, _ in defined] or 'no file'}"
    assert not member or member in defined[0][1], f"{word}: {name} has no {member}"
