"""Two ranks on Ray compared with one process, and kills of each process.

Ends of lineages, as an observer finds them afterwards.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from safetensors.numpy import load

from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import TrainingMetrics
from headrace_trainer.learner import WEIGHTS
from headrace_trainer.lineage.store import LineageStore
from headrace_trainer.ray_learner import RaySettings
from headrace_trainer.ray_learner.cluster import Cluster
from tests.ray.player import COUNTED, SENT
from tests.support import tiny_model
from tests.support.training_history import follow
from tests.system.program import Line, Program, Run, between

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


SAME = 1e-6
SAME_MUON = 1e-3
LOST_S_MAX = 30.0
"""Limit from a kill to the trainer's end, on a machine that others use."""
VICTIMS = ("rank0", "rank1", "raylet", "trainer")
KINDS: Mapping[str, Mapping[str, Any]] = {
    "AdamW": {"optimizer": {"learning_rate": 1e-3}},
    "AdamW on adapters, two updates a step": {
        "optimizer": {"learning_rate": 1e-3},
        "lora": {"rank": 4},
        "loss": {"updates_per_step": 2, "kl": 0.01},
    },
    "Muon": {"optimizer": {"learning_rate": 1e-3, "kind": "muon"}},
}
SHARDS = ("none", "full")


def line(name: str, value: float, high: float, low: float = 0.0) -> Line:
    """Return a line for a figure between `low` and `high`."""
    return between(name, float(value), low, high)


class Bench:
    """One process's ends, which others are compared with."""

    def __init__(self, folder: Path, points: int) -> None:
        self.folder = folder
        self.points = points
        self.base = tiny_model.build(folder / "base", layers=2)
        self._calm: dict[str, End] = {}

    def settings(self, kind: str, shard: str | None = None, **more: Any) -> dict[str, Any]:
        """`shard` None: one process."""
        table = {"base": str(self.base), **KINDS[kind], **more}
        return table if shard is None else {**table, "backend": "ray", "ray": {"shard": shard, "start_timeout_s": 280}}

    def one_process(self, kind: str) -> End:
        if kind not in self._calm:
            self._calm[kind] = live(self.folder / f"one {kind}", self.settings(kind))
        return self._calm[kind]


def contract(_: Bench) -> Iterator[Line]:
    """Run the contract tests of learners on two ranks. The figure is the exit status of pytest."""
    yield line("status of the learners' contract, asked of two ranks", _pytest("tests/ray/test_contract.py"), 0)


def gate(_: Bench) -> Iterator[Line]:
    """Run the tests of a gate program on two workers. The figure is the exit status of pytest."""
    yield line(
        "status of a gate's plays on two workers, one of them killed", _pytest("tests/ray/test_gate_workers.py"), 0
    )


def _pytest(path: str) -> float:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path]
    return float(subprocess.run(command, cwd=ROOT, check=False).returncode)


def equal(bench: Bench) -> Iterator[Line]:
    """Compare two ranks with one process."""
    for kind in KINDS:
        reference = bench.one_process(kind)
        for shard in SHARDS:
            two = live(bench.folder / f"{kind} {shard}", bench.settings(kind, shard))
            name = f"two ranks, shard {shard}, {kind}"
            yield line(
                f"{name}: weights from one process's", two.apart(reference), SAME_MUON if kind == "Muon" else SAME
            )
            yield _differing_reports(
                f"{name}: offsets, window, outcomes, versions and batches that differ", two, reference
            )


def repeated(bench: Bench) -> Iterator[Line]:
    """Compare two equal runs in different processes."""
    for shard in SHARDS:
        ends = [live(bench.folder / f"again {shard} {turn}", bench.settings("AdamW", shard)) for turn in range(2)]
        yield line(
            f"two runs on two ranks, shard {shard}, whose bytes differ", float(ends[0].digest != ends[1].digest), 0
        )


def moved(bench: Bench) -> Iterator[Line]:
    """Move one training from two ranks to one process, then to two ranks that hold parts, then to three."""
    folder, kind = bench.folder / "moved", "AdamW"
    lives: list[dict[str, Any]] = [
        bench.settings(kind, "none", max_steps=1),
        bench.settings(kind, max_steps=2),
        bench.settings(kind, "full", max_steps=3),
    ]
    last = bench.settings(kind, "full")
    last["ray"] = {**last["ray"], "ranks": 3}
    for table in lives:
        live(folder, table)
    end = live(folder, last)
    reference = bench.one_process(kind)
    yield line("begun on two ranks, then one process, then two, then three: weights", end.apart(reference), SAME)
    yield _differing_reports(
        "what else differs then, but for versions, which each end makes", end, reference, but="versions"
    )


def beside(bench: Bench) -> Iterator[Line]:
    """Steps that go on while ranks write, and a rank that dies then."""
    settings = bench.settings("AdamW", "full", save_beside=True)
    calm = live(bench.folder / "beside", settings)
    reference = bench.one_process("AdamW")
    yield line("saved beside steps: weights from one process's", calm.apart(reference), SAME)
    yield _differing_reports("saved beside steps: what else differs", calm, reference)
    point = calm.calls.index("write_copy", len(calm.calls) // 2) + 1
    killed = live(bench.folder / "beside, killed", settings, victim="rank1", point=point)
    yield line("a rank dies while it writes: weights from the calm run's", killed.apart(calm), SAME)
    yield _differing_reports("a rank dies while it writes: what else differs", killed, calm)


def replays(bench: Bench) -> Iterator[Line]:
    """Two replays of a lineage of one process, at the same time, on one cluster."""
    original = bench.folder / "replayed"
    reference = live(original, bench.settings("AdamW"))
    cluster = Cluster(RaySettings(start_timeout_s=280), 2)
    try:
        cluster_settings = {"address": str(ray.get_runtime_context().gcs_address), "ranks": 1, "start_timeout_s": 280}

        def replay(number: int) -> End:
            folder = bench.folder / f"replay {number}"
            shutil.copytree(original / "blobs", folder / "blobs")  # two trainers in one folder would share `SENT`
            more: dict[str, Any] = {"lineage": f"again-{number}", "replays": "main", "until_end": True}
            return live(folder, bench.settings("AdamW") | more | {"backend": "ray", "ray": cluster_settings})

        with ThreadPoolExecutor(2) as both:
            ends = list(both.map(replay, range(2)))
    finally:
        cluster.leave()
    for number, end in enumerate(ends):
        same = end.reports["batches"] == reference.reports["batches"] and not end.wrong
        yield line(f"replay {number} of two on a cluster: batches are the original's", float(same), 1, 1)
        yield line(f"replay {number} of two on a cluster: weights from the original's", end.apart(reference), SAME)


def kills(bench: Bench) -> Iterator[Line]:
    """kill -9 of each process, while the ranks answer a call. Points are spread over all calls of a life."""
    kind = "AdamW"
    calm = live(bench.folder / "calm", bench.settings(kind, "none"))
    total = len(calm.calls)
    for victim in VICTIMS:
        worst, slowest, differing, wrong = 0.0, 0.0, 0, 0
        points = sorted({1 + total * index // bench.points for index in range(bench.points)})
        for point in points:
            folder = bench.folder / f"{victim} {point}"
            end = live(folder, bench.settings(kind, "none"), victim=victim, point=point)
            assert (folder / "killed").exists(), f"nothing was killed at point {point}"
            worst, slowest = max(worst, end.apart(calm)), max(slowest, end.lost_after_s)
            differing += end.reports != calm.reports
            wrong += len(end.wrong)
        name = f"kill -9 of {victim} at {len(points)} points of {total}"
        yield line(f"{name}: weights from the calm run's", worst, SAME)
        yield line(f"{name}: ends whose offsets, window, outcomes or batches differ", float(differing), 0)
        yield line(f"{name}: experiences trained twice", float(wrong), 0)
        yield line(f"{name}: seconds until the trainer has ended", slowest, LOST_S_MAX)


def planted(bench: Bench) -> Iterator[Line]:
    """The comparison can fail: another seed of adapters, and a step that never was."""
    kind = "AdamW"
    fewer = live(bench.folder / "fewer", bench.settings(kind, max_steps=2))
    reference = bench.one_process(kind)
    yield line("a lineage that lacks steps: weights from one process's", fewer.apart(reference), 1e9, 100 * SAME)
    yield line("and what it tells differs", float(fewer.reports != reference.reports), 1, 1)


def _differing_reports(name: str, end: End, other: End, but: str = "") -> Line:
    differing = [label for label in other.reports if label != but and end.reports[label] != other.reports[label]]
    return line(f"{name}{': ' if differing else ''}{', '.join(differing)}", float(len(differing) + len(end.wrong)), 0)


PARTS: Mapping[str, Callable[[Bench], Iterator[Line]]] = {
    "contract": contract, "gate": gate, "equal": equal, "repeated": repeated, "moved": moved, "beside": beside,
    "replays": replays, "kills": kills, "planted": planted,
}  # fmt: skip


def play(run: Run) -> None:
    bench = Bench(run.folder, run.options.points)
    with run.progress(len(run.options.only), "parts") as progress:
        for name in run.options.only:
            run.add_all(PARTS[name](bench))
            progress.advance(activity=f"after: {name}")
    run.figures["points"] = run.options.points


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--points", type=int, default=10, help="points of a life at which each process is killed (default: %(default)s)"
    )
    parser.add_argument("--only", nargs="*", choices=tuple(PARTS), default=tuple(PARTS), help="parts (default: all)")


PROGRAM = Program("Compare two ranks with one process, and kill them.", play, _add_arguments)
