"""Runs `headrace train` as a user does, kills it at moments that are chosen beforehand, and says what came of it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_operations.jobs.journal import JobJournal
from headrace_runtime import versions
from headrace_runtime.blobs import BlobStore
from headrace_runtime.registries import Registry
from tests.support.processes import wait_until

LINEAGE = "killed"
PROGRAM = "from headrace_cli.app import main; main()"
ENDS_S_MAX = 3600.0
MANIFEST_BYTES_MAX = 100_000
DIGEST_LENGTH = 64
_LOOKED_AT: dict[Path, bytes | None] = {}


_OFTEN = {"trainer.batch_experiences": 64, "trainer.steps_per_version": 1}
"""A version each step, so that there is much to interrupt."""


@dataclass(frozen=True)
class Case:
    """What is trained. `rows` are written into a file; `settings` go to the command."""

    kind: str
    rows: Sequence[Mapping[str, object]]
    settings: Mapping[str, object]
    epochs: int = 1


@dataclass(frozen=True)
class Place:
    """Where a job runs: a folder of its own, with the same base and rows as the others."""

    folder: Path
    base: Path
    rows: Path

    @property
    def jobs(self) -> Path:
        return self.folder / "jobs"

    def journal(self) -> JobJournal | None:
        return JobJournal.read(self.jobs / f"{LINEAGE}.json")


def case_of(count: int, seed: int, kind: str = "sft") -> Case:
    """Sums to learn. Without the algorithm, written rows are trained by their rewards, which goes the same way."""
    draw = random.Random(f"rows {seed}")
    rows = []
    for number in range(count):
        a, b = draw.randrange(1000), draw.randrange(1000)
        rows.append({"prompt": f"Row {number}: what is {a} + {b}?", "completion": str(a + b)})
    if kind in Registry("algorithms", object, "algorithm").names():
        return Case(kind, rows, _OFTEN)
    by_reward = {
        **_OFTEN,
        "trainer.max_staleness": 10_000,
        "trainer.health.mismatch_max": 0,
        "trainer.health.effective_sample_min": 0,
    }
    return Case("reinforce++", [{**row, "reward": draw.random()} for row in rows], by_reward)


def begin(case: Case, place: Place) -> subprocess.Popen[bytes]:
    """The command, in a session of its own. Its output goes to `headrace.log`."""
    settings = [part for name, value in case.settings.items() for part in ("--set", f"{name}={value}")]
    arguments = [
        "train", case.kind, str(place.rows), "--base", str(place.base), "--lineage", LINEAGE, "--epochs",
        str(case.epochs), "--data-dir", str(place.folder), *settings,
    ]  # fmt: skip
    place.folder.mkdir(parents=True, exist_ok=True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    with (place.folder / "headrace.log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stdout=log, stderr=log, env=environ)


def to_the_end(case: Case, place: Place) -> JobJournal:
    """Undisturbed. Raises `AssertionError` with what the command said."""
    process = begin(case, place)
    status = process.wait(ENDS_S_MAX)
    journal = place.journal()
    assert status == 0, f"status {status}: {(place.folder / 'headrace.log').read_text()[-3000:]}"
    assert journal is not None
    assert journal.version is not None
    return journal


def set_aside(place: Place, folder: Path) -> Place:
    """Move what came of a job. Manifests name where blobs lie, so what is compared has been made in one place."""
    place.folder.rename(folder)
    return Place(folder, place.base, place.rows)


Moment = tuple[str, Callable[[Place], bool]]


def moments(draw: random.Random, kills: int, made: int) -> list[Moment]:
    """When to kill: in each part of a job, and in training after as many of the `made` versions as are drawn."""
    parts: list[Moment] = [
        ("checking rows", lambda place: (place.jobs / f".{LINEAGE}.rows.draft").exists()),
        ("opening the lineage", lambda place: _has(place, "rows")),
        ("filling the topic", lambda place: _has(place, "base")),
        ("the topic is full", lambda place: _has(place, "experiences")),
    ]
    counts = sorted(draw.sample(range(2, made - 1), max(0, kills - len(parts))))
    parts += [(f"{count} versions", _made(count)) for count in counts]
    return parts[:kills]


def _has(place: Place, part: str) -> bool:
    journal = place.journal()
    return journal is not None and getattr(journal, part) is not None


def _made(count: int) -> Callable[[Place], bool]:
    """So many versions are in the blob store, with the one that the lineage begins with."""
    return lambda place: len(manifests(place)) >= count


def manifests(place: Place) -> dict[str, bytes]:
    """Every version of the lineage, by its digest, as its bytes. A blob never changes, so each is looked at once."""
    for path in (place.folder / "blobs").glob("sha256/*/*"):
        if path not in _LOOKED_AT and len(path.name) == DIGEST_LENGTH:  # others are drafts
            data = path.read_bytes()[:MANIFEST_BYTES_MAX]
            named = data.startswith(b"{") and f'"lineage":"{LINEAGE}"'.encode() in data and b'"fingerprint"' in data
            _LOOKED_AT[path] = data if named else None
    return {path.name: data for path, data in _LOOKED_AT.items() if data and path.is_relative_to(place.folder)}


def killed(case: Case, place: Place, plan: Sequence[Moment], draw: random.Random) -> list[dict[str, Any]]:
    """Start and kill once for each moment, then let it end. Returns what was done when."""
    log: list[dict[str, Any]] = []
    for name, reached in plan:
        process = begin(case, place)

        def over(process: subprocess.Popen[bytes] = process, reached: Callable[[Place], bool] = reached) -> bool:
            return process.poll() is not None or reached(place)

        wait_until(over, ENDS_S_MAX, name)
        pause_s = draw.random() * 1.5
        time.sleep(pause_s)  # somewhere behind the moment, not to wait for something
        alive = process.poll() is None
        if alive:
            process.send_signal(signal.SIGKILL)
        process.wait()
        journal = place.journal()
        log.append({"moment": name, "pause_s": round(pause_s, 2), "killed": alive, "versions": len(manifests(place)),
                    "done": journal is not None and journal.version is not None})  # fmt: skip
    to_the_end(case, place)
    return log


def differences(one: Place, other: Place) -> list[str]:
    """What is not the same, byte for byte; empty when two jobs made the same."""
    mine, theirs = one.journal(), other.journal()
    assert mine is not None
    assert theirs is not None
    compared = ("base", "version", "experiences", "trained", "dropped", "waiting", "batches")
    pairs = {name: (getattr(mine, name), getattr(theirs, name)) for name in compared}
    found = [f"{name}: {ours} and {others}"[:300] for name, (ours, others) in pairs.items() if ours != others]
    if (ours := manifests(one)) != (others := manifests(other)):
        found.append(f"versions: {len(ours)} and {len(others)}, {len(ours.keys() & others.keys())} the same")
    weights = [_weights(place, journal) for place, journal in ((one, mine), (other, theirs))]
    if weights[0] != weights[1]:
        found.append("the bytes of the last version's weights")
    return found


def _weights(place: Place, journal: JobJournal) -> bytes:
    assert journal.manifest is not None
    blobs = BlobStore((place.folder / "blobs").as_uri())
    manifest = versions.read_manifest(blobs, journal.manifest)
    return b"".join(blobs.get(file.blob) for file in manifest.files if versions.is_weights(file.path))


def written(case: Case, path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in case.rows), encoding="utf-8")
    return path
