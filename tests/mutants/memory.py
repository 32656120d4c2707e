"""Verdicts of earlier runs, so that a run that was stopped goes on where it was, and one that follows is short."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from functools import cache
from pathlib import Path

from tests.mutants.overlay import ROOT
from tests.mutants.trial import Mutant, Verdict


class Memory:
    """A file with a line for each verdict. A verdict counts while the mutant and its tests are what they were."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Verdict] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            said = json.loads(line)
            self._known[said.pop("key")] = Verdict(**said)

    def of(self, mutant: Mutant) -> Verdict | None:
        return self._known.get(_key(mutant))

    def keep(self, mutant: Mutant, verdict: Verdict) -> None:
        self._known[_key(mutant)] = verdict
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": _key(mutant), **asdict(verdict)}) + "\n")


def _key(mutant: Mutant) -> str:
    digest = hashlib.sha256(f"{mutant.file}\0{mutant.text}".encode())
    for test in mutant.tests:
        digest.update(_digest(ROOT / test))
    return digest.hexdigest()


@cache
def _digest(path: Path) -> bytes:
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path, *sorted(path.parent.glob("conftest.py"))]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).digest()
