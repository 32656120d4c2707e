"""Training jobs from files that are killed again and again and must end with the same bytes."""

from __future__ import annotations

import argparse
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

from headrace_operations.jobs.job import JobJournal
from headrace_runtime.registries import Registry
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from tests.support import tiny_model
from tests.support.processes import wait_until
from tests.system.program import Program, Run, equals, no_problems

LINEAGE = "killed"
COMMAND = "from headrace_cli.app import main; main()"
ENDS_S_MAX = 3600.0
MANIFEST_BYTES_MAX = 100_000
DIGEST_LENGTH = 64
_LOOKED_AT: dict[Path, bytes | None] = {}

_OFTEN = {"trainer.batch_experiences": 64, "trainer.steps_per_version": 1}
"""A version each step, so that there is much to interrupt."""


@dataclass(frozen=True)
class Case:
    """Job of a test. `rows` are written into a file; `settings` go to the command."""

    kind: str
    rows: Sequence[Mapping[str, object]]
    settings: Mapping[str, object]
    epochs: int = 1


@dataclass(frozen=True)
class Workplace:
    """Folder of a job, with the same base and rows as the others."""

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


def begin(case: Case, work: Workplace) -> subprocess.Popen[bytes]:
    """The command, in a session of its own. Its output goes to `headrace.log`."""
    settings = [part for name, value in case.settings.items() for part in ("--set", f"{name}={value}")]
    arguments = [
        "train", case.kind, str(work.rows), "--base", str(work.base), "--lineage", LINEAGE, "--epochs",
        str(case.epochs), "--data-dir", str(work.folder), *settings,
    ]  # fmt: skip
    work.folder.mkdir(parents=True, exist_ok=True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    with (work.folder / "headrace.log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-c", COMMAND, *arguments], stdout=log, stderr=log, env=environ)


def to_the_end(case: Case, work: Workplace) -> JobJournal:
    """Run the job without disturbance. Raises `AssertionError` with the command's output."""
    process = begin(case, work)
    status = process.wait(ENDS_S_MAX)
    journal = work.journal()
    assert status == 0, f"status {status}: {(work.folder / 'headrace.log').read_text()[-3000:]}"
    assert journal is not None
    assert journal.version is not None
    return journal


def set_aside(work: Workplace, folder: Path) -> Workplace:
    """Move the job's results away. Manifests name paths of blobs, so compared jobs must run in one folder."""
    work.folder.rename(folder)
    return Workplace(folder, work.base, work.rows)


Moment = tuple[str, Callable[[Workplace], bool]]


def moments(draw: random.Random, kills: int, versions: int) -> list[Moment]:
    """When to kill: in each part of a job, and in training after as many of the `made` versions as are drawn."""
    parts: list[Moment] = [
        ("checking rows", lambda work: (work.jobs / f".{LINEAGE}.rows.draft").exists()),
        ("opening the lineage", lambda work: _has(work, "rows")),
        ("filling the topic", lambda work: _has(work, "base")),
        ("the topic is full", lambda work: _has(work, "experiences")),
    ]
    counts = sorted(draw.sample(range(2, versions - 1), max(0, kills - len(parts))))
    parts += [(f"{count} versions", _has_versions(count)) for count in counts]
    return parts[:kills]


def _has(work: Workplace, part: str) -> bool:
    journal = work.journal()
    return journal is not None and getattr(journal, part) is not None


def _has_versions(count: int) -> Callable[[Workplace], bool]:
    """Return a condition: the blob store has `count` versions, the first one included."""
    return lambda work: len(manifests(work)) >= count


def manifests(work: Workplace) -> dict[str, bytes]:
    """Every version of the lineage, by its digest, as its bytes. A blob never changes, so each is looked at once."""
    for path in (work.folder / "blobs").glob("sha256/*/*"):
        if path not in _LOOKED_AT and len(path.name) == DIGEST_LENGTH:  # others are drafts
            data = path.read_bytes()[:MANIFEST_BYTES_MAX]
            named = data.startswith(b"{") and f'"lineage":"{LINEAGE}"'.encode() in data and b'"fingerprint"' in data
            _LOOKED_AT[path] = data if named else None
    return {path.name: data for path, data in _LOOKED_AT.items() if data and path.is_relative_to(work.folder)}


def killed(case: Case, work: Workplace, plan: Sequence[Moment], draw: random.Random) -> list[dict[str, Any]]:
    """Start and kill the job once for each moment, then let it end. Return the kills."""
    log: list[dict[str, Any]] = []
    for name, reached in plan:
        process = begin(case, work)

        def over(process: subprocess.Popen[bytes] = process, reached: Callable[[Workplace], bool] = reached) -> bool:
            return process.poll() is not None or reached(work)

        wait_until(over, ENDS_S_MAX, name)
        pause_s = draw.random() * 1.5
        time.sleep(pause_s)  # somewhere behind the moment, not to wait for something
        alive = process.poll() is None
        if alive:
            process.send_signal(signal.SIGKILL)
        process.wait()
        journal = work.journal()
        log.append({"moment": name, "pause_s": round(pause_s, 2), "killed": alive, "versions": len(manifests(work)),
                    "done": journal is not None and journal.version is not None})  # fmt: skip
    to_the_end(case, work)
    return log


def differences(left: Workplace, right: Workplace) -> list[str]:
    """Return the differences of two jobs, byte for byte; an empty list means equal results."""
    left_journal, right_journal = left.journal(), right.journal()
    assert left_journal is not None
    assert right_journal is not None
    compared = ("base", "version", "experiences", "trained", "dropped", "waiting", "batches")
    pairs = {name: (getattr(left_journal, name), getattr(right_journal, name)) for name in compared}
    problems = [
        f"{name}: {left_value} and {right_value}"[:300]
        for name, (left_value, right_value) in pairs.items()
        if left_value != right_value
    ]
    if (left_value := manifests(left)) != (right_value := manifests(right)):
        problems.append(
            f"versions: {len(left_value)} and {len(right_value)}, "
            f"{len(left_value.keys() & right_value.keys())} the same"
        )
    weights = [_weights(work, journal) for work, journal in ((left, left_journal), (right, right_journal))]
    if weights[0] != weights[1]:
        problems.append("the bytes of the last version's weights")
    return problems


def _weights(work: Workplace, journal: JobJournal) -> bytes:
    assert journal.manifest is not None
    blobs = BlobStore((work.folder / "blobs").as_uri())
    manifest = versions.read_manifest(blobs, journal.manifest)
    return b"".join(blobs.get(file.blob) for file in manifest.files if versions.is_weights(file.path))


def written(case: Case, path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in case.rows), encoding="utf-8")
    return path


def play(run: Run) -> None:
    options = run.options
    folder = options.keep or run.folder
    began_s = time.monotonic()
    with run.progress(3, "parts") as progress:
        case = case_of(options.rows, run.seed, options.algorithm)
        base, rows = tiny_model.build(folder / "base", layers=1), written(case, folder / "rows.jsonl")
        disturbed = Workplace(folder / "work", base, rows)
        progress.update(0, activity="undisturbed")
        journal = to_the_end(case, disturbed)
        calm = set_aside(disturbed, folder / "quiet")
        undisturbed_s = time.monotonic() - began_s
        versions = len(manifests(calm))
        progress.update(1, activity=f"killed {options.kills} times")
        kills = killed(case, disturbed, moments(run.draw, options.kills, versions), run.draw)
        progress.update(2, activity="comparing")
        run.add(
            equals("kills", sum(kill["killed"] for kill in kills), options.kills),
            equals("rows trained", journal.trained, options.rows),
            no_problems("differences from the undisturbed run", differences(calm, disturbed)),
        )
    run.figures |= {
        "algorithm": case.kind,
        "rows": options.rows,
        "kills": kills,
        "versions_and_trained": [versions, journal.trained],
        "version": journal.version,
        "undisturbed_s": round(undisturbed_s, 1),
    }


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=2000, help="rows of the file (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=10, help="number of kills (default: %(default)s)")
    parser.add_argument("--algorithm", default="sft", help="algorithm of the job (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="a new folder that stays after the run")


PROGRAM = Program("Kill training jobs and compare the bytes of their versions.", play, _add_arguments)
