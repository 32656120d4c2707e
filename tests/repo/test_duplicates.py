"""Command, SDK and runtime have one copy of everything: a second one would not learn what the first has learnt."""

from __future__ import annotations

import re
from pathlib import Path

from tests.repo.compose_files import ROOT
from tests.repo.duplicates import LINES, blocks

MEMBERS = sorted(path.parent for path in (ROOT / "packages").glob("*/src"))
MIRRORED = {frozenset({"async_client.py", "client.py"})}
"""What a caller passes to a client is spelt out in both, with and without asyncio, for whoever reads its signature."""


def sources() -> list[Path]:
    return sorted(path for member in MEMBERS for path in (member / "src").rglob("*.py"))


def test_no_block_stands_twice() -> None:
    found = [
        f"{one.path.relative_to(ROOT)}:{one.line} and {other.path.relative_to(ROOT)}:{other.line}"
        for one, other in blocks(sources())
        if frozenset({one.path.name, other.path.name}) not in MIRRORED
    ]
    assert not found, "\n".join(found)


def test_a_planted_duplicate_is_found(tmp_path: Path) -> None:
    body = "\n".join(f"    a{number} = {number}  # of no importance" for number in range(LINES))
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text(f'def first() -> None:\n    """Says this."""\n{body}\n')
    indented = body.replace("    ", "        ").replace("  # of no importance", "").replace("\n", "\n\n")
    other.write_text(f"class C:\n    def second(self) -> None:\n        import os\n{indented}\n")
    assert [(a.line, b.line) for a, b in blocks([one, other])] == [(3, 4)]
    other.write_text(other.read_text().replace("a3 = 3", "a3 = 4"))
    assert blocks([one, other]) == []


def test_one_module_computes_quantiles_of_student() -> None:
    """The coefficients of the expansion, and quantiles for 1 to 4 degrees of freedom, appear in no source."""
    written = re.compile(r"92_?160|\b12\.706|\b4\.302\d|\b3\.182\d|\b2\.776\d")
    sources = [
        path
        for root in ("schemas", "packages", "gateway", "services", "benchmarks", "examples")
        for path in (ROOT / root).rglob("*.py")
    ]
    assert len(sources) > 300
    assert [str(path) for path in sources if written.search(path.read_text(encoding="utf-8"))] == []
