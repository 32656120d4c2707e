"""Faults planted by hand: `planted.toml` lists them, with the tests that have to notice."""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tests.mutants.overlay import ROOT
from tests.mutants.trial import Mutant

TABLE = Path(__file__).with_name("planted.toml")


class Planted(BaseModel):
    """One fault."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    file: str
    original: str
    mutated: str
    tests: tuple[str, ...]

    @property
    def stale(self) -> str | None:
        """Why it can no longer be planted, None when it can."""
        path = ROOT / self.file
        if not path.exists():
            return f"{self.name}: {self.file} is not there; name the file where it is now"
        count = path.read_text(encoding="utf-8").count(self.original)
        if count != 1:
            return f"{self.name}: {self.original!r} stands {count} times in {self.file}, and once is needed"
        missing = [test for test in self.tests if not (ROOT / test).exists()]
        return f"{self.name}: {missing[0]} is not there" if missing else None

    def mutant(self) -> Mutant:
        text = (ROOT / self.file).read_text(encoding="utf-8").replace(self.original, self.mutated)
        return Mutant(f"planted: {self.name}", self.file, text, self.tests)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid")

    planted: tuple[Planted, ...]


def planted() -> tuple[Planted, ...]:
    return _Table.model_validate(tomllib.loads(TABLE.read_text(encoding="utf-8"))).planted
