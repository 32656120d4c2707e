"""Trinity's own bench as a gate: real Trinity, a gateway, and a replica with two versions of a tiny model."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

from headrace_registry.gate.gate import Gate, GateFailed
from headrace_registry.settings import GateSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Routing, Turn
from headrace_schemas.programs.models import Play
from headrace_schemas.values.base import utcnow
from tests.attack.stacks import MODEL, Serving, serving
from tests.support import tiny_model
from tests.support.gateway_process import BusView, bus_view
from tests.support.processes import wait_until
from tests.system.program import Line, at_most, equals
from tests.trinity.vowels import share_of_vowels

ROOT = Path(__file__).parents[2]
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


async def lines(folder: Path) -> list[Line]:
    """Return the lines of a bench of two versions, and of one with an unknown version."""
    os.environ.update(OPENAI_API_KEY=_KEY, PYTHONPATH=os.pathsep.join(map(str, (ROOT / "examples", ROOT))))
    with tempfile.TemporaryDirectory(prefix="hr-") as temporary:  # the path of a socket has 107 bytes
        return await _lines(folder, Path(temporary))


async def _lines(folder: Path, temporary: Path) -> list[Line]:
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
    return [*_compared(dict(zip(plays, scores, strict=True)), turns), _refusal(refused)]


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


def _compared(scores: Mapping[Play, float], turns: list[Turn]) -> Iterator[Line]:
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
