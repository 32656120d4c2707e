"""Lists of mutants: the core modules with their tests, the mutants that may survive, and the planted faults.

`modules.toml` lists the modules, `survivors.toml` the permitted survivors, and `planted.toml` faults that were written
by hand, with the tests that have to detect them.
"""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tests.mutants.trial import ROOT, Mutant

HERE = Path(__file__).parent
GENERATOR = ROOT / ".venv-mutants" / "bin" / "python"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Group(_Strict):
    """Modules of a package whose mutants are tried with the same tests."""

    package: str
    modules: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def files(self) -> list[str]:
        return [f"{self.package}/{module}" for module in self.modules]


class Survivor(_Strict):
    """A mutant that may survive, and the reason."""

    file: str
    original: str
    mutated: str
    reason: str


class _Groups(_Strict):
    group: tuple[Group, ...]


class _Survivors(_Strict):
    survivor: tuple[Survivor, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """One line that a mutant changes, without the content of the whole file."""

    file: str
    line: int
    operator: str
    original: str
    mutated: str

    @property
    def lines(self) -> tuple[str, str, str]:
        """Key of a mutant in the list of survivors.

        The line number is left out, because it changes with other edits.
        """
        return self.file, self.original, self.mutated


def groups() -> tuple[Group, ...]:
    return _Groups.model_validate(_toml("modules.toml")).group


def survivors() -> tuple[Survivor, ...]:
    return _Survivors.model_validate(_toml("survivors.toml")).survivor


def written(chosen: Sequence[Group]) -> list[tuple[Change, Mutant]]:
    """Return every mutant of the modules of `chosen`, as cosmic-ray generates them."""
    if not GENERATOR.exists():
        raise SystemExit(f"{GENERATOR} is not there; `make check NAME=mutants` makes it")
    tests = {file: group.tests for group in chosen for file in group.files}
    command = [GENERATOR, HERE / "generate.py"]
    process = subprocess.run(command, input="\n".join(tests), text=True, stdout=subprocess.PIPE, check=True, cwd=ROOT)
    pairs = []
    for entry in map(json.loads, process.stdout.splitlines()):
        text = entry.pop("text")
        change = Change(**entry)
        name = f"{change.file}:{change.line}: {change.original} -> {change.mutated}"
        pairs.append((change, Mutant(name, change.file, text, tests[change.file])))
    return pairs


def _toml(name: str) -> dict[str, object]:
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))


TABLE = Path(__file__).with_name("planted.toml")


class Planted(BaseModel):
    """One fault that was written by hand."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    file: str
    original: str
    mutated: str
    tests: tuple[str, ...]

    @property
    def stale(self) -> str | None:
        """Reason why the fault can no longer be planted, or None."""
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
