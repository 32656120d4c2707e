"""Our rows in Trinity's own reader, our YAML in its own check, its bench against our gateway."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headrace_runtime.settings.sections import complete
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.trinity_learner.configuration import TrinityJob, as_yaml, configuration
from headrace_trainer.trinity_learner.rows import Buffer, rows_of
from tests.support import tiny_model
from tests.system.program import Line, Program, Run, at_most
from tests.trinity import bench
from tests.unit.trainer.world import experience

ROOT = Path(__file__).parents[2]
_THEIRS = ROOT / ".venv-trinity/bin/python"
_IDLE = 3
_VERSION = "m@0123456789abcdef"


def batch_of(draw: random.Random) -> Batch:
    """Rows of every form: one span and several, corrections, long observations after the last trained token."""
    rows = []
    for number in range(draw.randint(1, 40)):
        length, spans = draw.randint(12, 400), draw.randint(1, 4)
        drawn = experience(number, _VERSION, length=length, prompt=draw.randint(1, 8), versions=[_VERSION] * spans)
        weight = draw.uniform(1e-4, 1) if draw.random() < 0.3 else None
        rows.append(Row.of(drawn, draw.uniform(-9, 9), _VERSION, weight))
    return Batch(tuple(rows), full_rows=draw.randint(1, 64))


def lines(folder: Path, base: Path, seed: int) -> Iterator[Line]:
    batch = batch_of(random.Random(seed))
    size = len(batch.rows) + _IDLE
    job = TrinityJob(folder / "jobs", f"j{seed:012x}", base, size)
    job.root.mkdir(parents=True)
    settings = complete(TrainerSettings).model_validate(
        {"base": str(base), "backend": "trinity", "trinity": {"folder": str(folder)}, "batch_experiences": size}
    )
    yaml = job.root / "trainer.yaml"
    yaml.write_text(as_yaml(configuration(settings, job, 1e-6, 2048)), encoding="utf-8")
    handed, _ = rows_of(batch, 1.0, size, seed)
    database = job.root / f"{job.name}.db"
    buffer = Buffer(f"sqlite:///{database}", job.buffer_name)
    buffer.hand_over(handed)
    again = buffer.hand_over(handed)
    yield at_most(f"seed {seed}: rows that a second hand-over has added", int(again), 0)
    command = [str(_THEIRS), str(ROOT / "tests/trinity/reads.py"), str(database), job.buffer_name, str(size), str(yaml)]
    process = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False, cwd=folder)
    if process.returncode:
        print(process.stderr[-3000:], file=sys.stderr)
        yield at_most(f"seed {seed}: Trinity's reader and its check of our YAML end with {process.returncode}", 1, 0)
        return
    about = json.loads((folder / "read.json").read_text())
    with np.load(folder / "read.npz") as arrays:
        yield from _compared(seed, batch, handed, about, dict(arrays))


def _compared(seed: int, batch: Batch, handed: list[Any], about: Any, arrays: dict[str, Any]) -> Iterator[Line]:
    """Its reader is newest first: each row is found by its name."""
    positions = {entry["suffix"]: number for number, entry in enumerate(about["rows"])}
    missing = [entry for entry in handed if entry.msg_id not in positions]
    yield at_most(f"seed {seed}: rows of {len(handed)} that Trinity's reader has not", len(missing), 0)
    differing = loss = 0
    tokens = sum(int(arrays[f"{number}:action_mask"].sum()) for number in range(len(handed)))
    for row, sent in zip(batch.rows, handed, strict=False):
        number = positions[sent.msg_id]
        entry = about["rows"][number]
        prompt = entry["prompt_length"]
        weight = batch.weighted(row).token_weight * tokens
        expected = np.where(row.loss_mask_T[prompt:], np.float32(float(row.advantage) * weight), np.float32(0))
        same = (
            arrays[f"{number}:tokens"].tobytes() == row.token_ids_T.tobytes()
            and arrays[f"{number}:logprobs"].tobytes() == row.behaviour_T[prompt:].tobytes()
            and arrays[f"{number}:action_mask"].tobytes() == row.loss_mask_T[prompt:].tobytes()
            and arrays[f"{number}:advantages"].tobytes() == expected.tobytes()
            and entry["task"] == row.experience_id
            and entry["kind"] == "multi_turn"
            and entry["version"] == seed
        )
        differing += not same
        mask = arrays["proto:loss"][number].astype(bool)
        trained = arrays["proto:ids"][number][mask]
        loss += trained.tolist() != row.token_ids_T[row.loss_mask_T].tolist()
    yield at_most(f"seed {seed}: rows whose tokens, masks, logprobs or advantages are other bits", differing, 0)
    yield at_most(f"seed {seed}: rows whose trained tokens are others, as its trainer sees them", loss, 0)
    config = about["config"]
    unchanged = config["mode"] == "train" and config["save_interval"] == 1 and config["train_batch_size"] == len(handed)
    yield at_most(f"seed {seed}: Trinity's own check has changed what our YAML says", int(not unchanged), 0)


def play(run: Run) -> None:
    base = tiny_model.build(run.folder / "base", layers=1)
    for seed in range(run.options.seeds):
        run.add_all(lines(run.folder / str(seed), base, seed))
    run.add(*asyncio.run(bench.lines(run.folder)))
    run.figures["seeds"] = run.options.seeds


def _missing() -> str | None:
    return None if _THEIRS.exists() else "there is no .venv-trinity"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=5, help="number of batches (default: %(default)s)")


PROGRAM = Program("Compare our rows and our YAML with Trinity's own reader and check.", play, _add_arguments, _missing)
