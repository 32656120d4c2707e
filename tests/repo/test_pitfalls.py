"""`docs/pitfalls.md` names real tests, and the code says what it does instead of citing a number."""

from __future__ import annotations

import re

from tests.repo.compose_files import ROOT

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


def test_only_tests_cite_a_pitfall_by_its_number() -> None:
    citing = []
    for folder in ("schemas", "packages", "gateway", "services", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".md", ".json", ".toml"} and "build" not in path.parts:
                text = path.read_text(encoding="utf-8")
                citing += [f"{path.relative_to(ROOT)}: {found}" for found in re.findall(r"(?i)pitfalls? \d+", text)]
    assert citing == []
