"""Our rows in Trinity's own reader, our YAML in its own check, and its bench as a gate against our gateway."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from headrace_registry.gate.gate import Gate, GateFailed
from headrace_registry.settings import GateSettings
from headrace_runtime.settings.sections import complete
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Routing, Turn
from headrace_schemas.programs import Play
from headrace_schemas.values.base import utcnow
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.trinity_learner.configuration import TrinityJob, as_yaml, configuration
from headrace_trainer.trinity_learner.rows import Buffer, rows_of
from tests.attack.stacks import MODEL, Serving, serving
from tests.support import tiny_model
from tests.support.processes import wait_until
from tests.support.service_process import BusView, bus_view
from tests.system.program import Line, Program, Run, at_most, equals
from tests.trinity.vowels import share_of_vowels
from tests.unit.trainer.world import experience

ROOT = Path(__file__).parents[2]
_THEIRS = ROOT / ".venv-trinity/bin/python"
_IDLE = 3
_VERSION = "m@0123456789abcdef"
_KEY = "bench"
_NOBODY = f"{MODEL}@000000000000"
_SEED, _TURNS_MAX = 7, 1024
_START_S = 1800
_SETTINGS = f"""
workflow = "simple_workflow"
reward = "tests.trinity.bench_rewards.Vowels"
gate_tasks = "gate.jsonl"
audit_tasks = "audit.jsonl"
max_response_tokens = 24
max_model_len = 512
runners = 1
start_timeout_s = {_START_S}
"""


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
        weight = batch.with_token_weight(row).token_weight * tokens
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
    run.add(*asyncio.run(bench_lines(run.folder)))
    run.figures["seeds"] = run.options.seeds


def _missing() -> str | None:
    return None if _THEIRS.exists() else "there is no .venv-trinity"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=5, help="number of batches (default: %(default)s)")


PROGRAM = Program("Compare our rows and our YAML with Trinity's own reader and check.", play, _add_arguments, _missing)


async def bench_lines(folder: Path) -> list[Line]:
    """Return the lines of a bench of two versions, and of one with an unknown version."""
    os.environ.update(OPENAI_API_KEY=_KEY, PYTHONPATH=os.pathsep.join(map(str, (ROOT / "examples", ROOT))))
    with tempfile.TemporaryDirectory(prefix="hr-") as temporary:  # the path of a socket has 107 bytes
        return await _bench_lines(folder, Path(temporary))


async def _bench_lines(folder: Path, temporary: Path) -> list[Line]:
    settings = _written(folder, str(temporary))
    async with serving(folder / "stack", (_KEY,)) as stack, bus_view(stack.bus, stack.gateway.folder) as view:
        other = await _second(stack, view, folder)
        url = f"{stack.gateway.url}/v1"
        command = ("{python}", "-m", "trinity_bench.gate", "--settings", str(settings), "--base-url", "{base_url}")
        python = ("--python", str(ROOT / ".venv-trinity/bin/python"))
        environment = ("OPENAI_API_KEY",)
        gate = Gate(GateSettings(command=command + python, base_url=url, environment=environment, silence_s=_START_S))
        async with gate.session() as court:
            plays = [Play(version=v, task=t, seed=_SEED) for v in (stack.version, other) for t in court.tasks.gate]
            scores = await asyncio.gather(*(court.play(play.version, play.task, play.seed) for play in plays))
        turns = await view.read(Turn)
        try:
            async with gate.session() as court:
                refused = f"a score of {await court.play(_NOBODY, court.tasks.audit[0], _SEED)}"
        except GateFailed as error:
            refused = str(error)
    await asyncio.to_thread(wait_until, lambda: not list(temporary.iterdir()), 60, "folders of dead gates are removed")
    return [*_compared_scores(dict(zip(plays, scores, strict=True)), turns), _refusal(refused)]


def _written(folder: Path, temporary: str) -> Path:
    """The settings."""
    (folder / "gate.jsonl").write_text(_row("Who wrote?") + _row("And when?"), encoding="utf-8")
    (folder / "audit.jsonl").write_text(_row("Why?"), encoding="utf-8")
    settings = folder / "bench.toml"
    settings.write_text(f'python = "python"\nname_key = "prompt"\nfolder = "{temporary}"{_SETTINGS}', encoding="utf-8")
    return settings


def _row(question: str) -> str:
    return json.dumps({"prompt": question, "response": "nothing"}) + "\n"


async def _second(stack: Serving, view: BusView, folder: Path) -> str:
    """Register another version of the same model, which the replica serves together with the champion."""
    blobs = BlobStore(f"file://{stack.gateway.folder}/blobs")
    path = tiny_model.perturbed(folder / "stack/tiny", folder / "second", seed=1)
    second = tiny_model.publish(blobs, path, parent=stack.version)
    (first,) = (await view.read(Routing))[-1].serve
    serve = {"aliases": {"champion": stack.version}, "serve": [first, second]}
    await view.producer.send(Routing.model_validate({"time": utcnow(), "model": MODEL, "revision": 1, **serve}))

    def listed() -> bool:
        models = httpx.get(f"{stack.replica.url}/v1/models", timeout=60).json()["data"]
        return second.version in {entry["id"] for entry in models}

    await asyncio.to_thread(wait_until, listed, 300, "both versions are loaded")
    return second.version


def _compared_scores(scores: Mapping[Play, float], turns: list[Turn]) -> Iterator[Line]:
    """Compare the scores with the captured turns. Each play has one turn, since the workflow sends one request."""
    turns_by_prompt = {(turn.version, turn.messages[-1].text): turn for turn in turns}
    pairs = [(score, turns_by_prompt.get((play.version, play.task))) for play, score in scores.items()]
    wrong = sum(turn is None or score != share_of_vowels(turn.choices[0].message.text) for score, turn in pairs)
    yield at_most(f"bench: scores of {len(scores)} plays that are not those of their exact version's answers", wrong, 0)
    foreign = len(turns) - len(scores) + sum(turn.purpose != "eval" for turn in turns)
    yield at_most("bench: turns that no play requested, or that training would take", foreign, 0)
    other_seeds = sum(turn.sampling.seed != _SEED * _TURNS_MAX for turn in turns)
    yield at_most("bench: turns with another seed", other_seeds, 0)
    texts = {turn.choices[0].message.text for turn in turns}
    yield at_most("bench: pairs of versions whose answers are equal throughout", int(len(texts) < len(scores)), 0)


def _refusal(refused: str) -> Line:
    named = _NOBODY in refused and "NotFoundError" in refused
    return equals(f"bench: an unserved version is an error by name ({refused[:300]})", bool(named), expected=True)
