"""Verdicts of earlier runs, so that a run that was stopped goes on where it was, and one that follows is short."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

from tests.mutants.overlay import ROOT
from tests.mutants.trial import Mutant, Verdict


class Memory:
    """A file with a line for each verdict.

    The verdict of a killed mutant holds while the mutant and the file of the killing test are unchanged; any other
    verdict
    holds while none of its tests has changed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._verdicts: dict[str, dict[str, tuple[Verdict, list[str]]]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            entry = json.loads(line)
            self._remember(entry.pop("mutant"), entry.pop("digest"), entry.pop("tests"), Verdict(**entry))

    def of(self, mutant: Mutant) -> Verdict | None:
        for digest, (verdict, tests) in self._verdicts.get(_name(mutant), {}).items():
            if {*tests} <= {*mutant.tests} and digest == _digest(tests) and (verdict.by or tests == [*mutant.tests]):
                return verdict
        return None

    def keep(self, mutant: Mutant, verdict: Verdict) -> None:
        tests = [verdict.by] if verdict.by in mutant.tests else [*mutant.tests]
        digest = _digest(tests)
        self._remember(_name(mutant), digest, tests, verdict)
        line = {"mutant": _name(mutant), "digest": digest, "tests": tests, **asdict(verdict)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _remember(self, name: str, digest: str, tests: list[str], verdict: Verdict) -> None:
        self._verdicts.setdefault(name, {})[digest] = verdict, tests


def _name(mutant: Mutant) -> str:
    return hashlib.sha256(f"{mutant.file}\0{mutant.text}".encode()).hexdigest()


def _digest(tests: Sequence[str]) -> str:
    return hashlib.sha256(b"".join(_content(ROOT / test) for test in tests)).hexdigest()


@cache
def _content(path: Path) -> bytes:
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path, *sorted(path.parent.glob("conftest.py"))]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).digest()
