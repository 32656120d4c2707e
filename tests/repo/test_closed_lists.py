"""Each list of names that the code closes is in `closed_lists.toml`, with the reason why a package cannot add to it."""

from __future__ import annotations

import ast
import tomllib

import pytest

from headrace_runtime.services import installed
from tests.repo.closed_lists import closed_in
from tests.repo.compose_files import ROOT

LISTED = tomllib.loads((ROOT / "tests/repo/closed_lists.toml").read_text(encoding="utf-8"))
KEPT = [frozenset(names) for group in LISTED["kept"] for names in group["lists"]]
MEMBERS = ("schemas", "runtime", "sdk", "cli", "gateway", "services")
FILES = sorted(path for member in MEMBERS for path in (ROOT / member).glob("**/src/headrace*/**/*.py"))
FOUND = [one for path in FILES for one in closed_in(path, str(path.relative_to(ROOT)))]


def test_there_is_something_to_find() -> None:
    assert len(FOUND) > 100


def test_each_closed_list_has_its_reason() -> None:
    unlisted = [f"{one.place} {sorted(one.names)}" for one in FOUND if not any(one.names <= kept for kept in KEPT)]
    assert unlisted == [], "open it (docs/add/README.md), or say in tests/repo/closed_lists.toml why it stays closed"


@pytest.mark.parametrize("names", KEPT, ids=lambda names: " ".join(sorted(names))[:60])
def test_each_reason_has_its_list(names: frozenset[str]) -> None:
    assert any(one.names == names for one in FOUND), "nothing in the code is this list any more; take its line away"


def test_services_are_known_by_name_only_where_it_is_said() -> None:
    services = set(installed())
    named = set()
    for path in FILES:
        package = next(part for part in path.parts if part.startswith("headrace"))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        known = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value in services}
        if package in ("headrace", "headrace_cli", "headrace_runtime") and known:
            named.add(path.name)
    assert named == set(LISTED["named"])
