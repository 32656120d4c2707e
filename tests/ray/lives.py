"""Ends of lineages, as an observer finds them afterwards."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load

from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import TrainingMetrics
from headrace_trainer.learner import WEIGHTS
from headrace_trainer.lineage.store import LineageStore
from tests.ray.player import COUNTED, SENT
from tests.support.fates import follow

ROOT = Path(__file__).parents[2]
_LIFE_S = 600
_STARTS_MAX = 3


@dataclass(frozen=True)
class End:
    """End of a lineage."""

    reports: Mapping[str, Any]
    """Facts that must be equal however the weights were computed."""
    weights: Mapping[str, Any]
    digest: str
    """Weights and optimizer, as saved."""
    wrong: tuple[str, ...]
    """Contradictions in the accounts."""
    calls: tuple[str, ...] = ()
    lost_after_s: float = 0.0
    """From a kill to the end of the trainer that noticed."""
    starts: int = 1

    def apart(self, other: End) -> float:
        """The largest difference of a weight."""
        assert self.weights.keys() == other.weights.keys()
        return max(float(np.abs(self.weights[name] - other.weights[name]).max()) for name in self.weights)


def live(folder: Path, settings: Mapping[str, Any], *, victim: str | None = None, point: int = 0) -> End:
    """From wherever the lineage in `folder` is to its end; after a death, another process goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    lost_after_s, starts = 0.0, 0
    kill = [victim, str(point)] if victim else []
    while True:
        starts += 1
        process, seconds = _process(folder, settings, kill)
        if process.returncode == 0 and not (kill and not (folder / "killed").exists()):
            break
        if not kill or not (folder / "killed").exists() or starts == _STARTS_MAX:
            raise AssertionError(
                f"a trainer ended with {process.returncode}: {process.stdout[-2000:]}\n{process.stderr[-4000:]}"
            )
        lost_after_s, kill = seconds, []
    return _end(folder, str(settings.get("lineage", "main")), lost_after_s, starts)


def _process(
    folder: Path, settings: Mapping[str, Any], kill: list[str]
) -> tuple[subprocess.CompletedProcess[str], float]:
    """How it ended, and how long after the kill."""
    command = [sys.executable, "-m", "tests.ray.player", str(folder), json.dumps(settings), *kill]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=_LIFE_S)
    killed = folder / "killed"
    return process, time.time() - killed.stat().st_mtime if kill and killed.exists() else 0.0


def _end(folder: Path, lineage: str, lost_after_s: float, starts: int) -> End:
    blobs = BlobStore((folder / "blobs").as_uri())
    store = LineageStore(blobs, lineage)
    saved = store.read()
    assert saved is not None
    with store.open_tensors(saved.present) as unpacked:
        weights = (unpacked / WEIGHTS).read_bytes()
    lines = (folder / SENT).read_text(encoding="utf-8").splitlines()
    accounts = list({metrics.event_id: metrics for metrics in map(TrainingMetrics.model_validate_json, lines)}.values())
    fates, wrong = follow(accounts)
    numbers = {published.version: published.number for published in saved.versions}
    # What a replay trains was sampled by versions of another lineage.
    window = re.sub(r"m@[0-9a-f]{16}", lambda match: f"v{numbers.get(match[0], '?')}", repr(_window(saved.window)))
    reports = {
        "steps": saved.steps,
        "offsets": saved.offsets,
        "fates": fates,
        "window": window,
        "versions": [published.number for published in saved.versions],
        "waiting": [item.experience.experience_id for item in saved.waiting],
        "batches": [batch.digest for account in accounts for batch in account.batches],
    }
    calls = json.loads((folder / COUNTED).read_text(encoding="utf-8"))
    digest = f"{saved.present.weights.sha256} {saved.present.optimizer.sha256}"
    return End(reports, load(weights), digest, tuple(wrong), tuple(calls), lost_after_s, starts)


def _window(window: Mapping[str, Any]) -> dict[str, Any]:
    """Without the time, and without numbers that rounding reaches."""
    entries = {}
    for name, entry in window.items():
        fields = entry.model_dump(exclude={"touched_ms", "contributions"})
        parts = [contribution.model_dump(exclude={"token_weight"}) for contribution in entry.contributions]
        entries[name] = (sorted(fields.items()), parts)
    return entries
