"""Plays on several workers: each is played once, also when workers are lost, and a failure is never a score."""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections.abc import AsyncIterator

import pytest

from headrace_registry.gate import gate as gate_module
from headrace_registry.gate.gate import Gate, GateFailed
from headrace_registry.gate_workers.__main__ import serve
from headrace_registry.gate_workers.dispatcher import GateWorker, PlayDispatcher, WorkerLost, worker_names
from headrace_registry.settings import GateRaySettings, GateSettings
from headrace_runtime.errors import SettingError
from headrace_schemas.programs.gate import Play, Tasks

TASKS = Tasks(gate=("a", "b"), audit=("c",))
PLAYS = [Play(version="m@0123456789ab", task="ab"[seed % 2], seed=seed) for seed in range(40)]


class FakeWorker:
    """A worker that plays so many and is lost then."""

    def __init__(self, lives: float = float("inf"), tasks: Tasks = TASKS) -> None:
        self.lives = lives
        self.played: list[Play] = []
        self._tasks = tasks

    async def tasks(self) -> Tasks:
        return self._tasks

    async def play(self, play: Play) -> float:
        await asyncio.sleep(0)
        if len(self.played) >= self.lives:
            raise WorkerLost("its machine is away")
        self.played.append(play)
        return play.seed / 100


def dispatcher(*machines: GateWorker) -> PlayDispatcher:
    return PlayDispatcher({f"worker-{number}": machine for number, machine in enumerate(machines)})


async def test_dispatcher_shares_plays_equally() -> None:
    machines = [FakeWorker() for _ in range(4)]
    dealing = dispatcher(*machines)
    assert await dealing.tasks() == TASKS
    assert await asyncio.gather(*map(dealing.play, PLAYS)) == [play.seed / 100 for play in PLAYS]
    assert [len(machine.played) for machine in machines] == [10] * 4


@pytest.mark.parametrize("seed", range(20))
async def test_dispatcher_moves_plays_of_a_lost_worker(seed: int) -> None:
    draw = random.Random(seed)
    machines = [FakeWorker(), *(FakeWorker(lives=draw.randint(0, 12)) for _ in range(draw.randint(1, 5)))]
    draw.shuffle(machines)
    assert await asyncio.gather(*map(dispatcher(*machines).play, PLAYS)) == [play.seed / 100 for play in PLAYS], seed
    assert sorted(play.seed for machine in machines for play in machine.played) == list(range(40)), seed


async def test_dispatcher_fails_without_workers() -> None:
    dealing = dispatcher(FakeWorker(lives=1), FakeWorker(lives=0))
    await dealing.play(PLAYS[0])
    with pytest.raises(GateFailed, match="every worker"):
        await dealing.play(PLAYS[1])


async def test_dispatcher_does_not_retry_a_failed_program() -> None:
    """Its machine is well, so the program is wrong: that is the run's failure, as on one machine."""

    class Broken(FakeWorker):
        async def play(self, play: Play) -> float:
            raise GateFailed("it ended with status 3")

    other = FakeWorker()
    with pytest.raises(GateFailed, match="status 3"):
        await dispatcher(Broken(), other).play(PLAYS[0])
    assert other.played == []


async def test_dispatcher_refuses_workers_with_different_tasks() -> None:
    with pytest.raises(GateFailed, match="worker-0 and worker-1"):
        await dispatcher(FakeWorker(), FakeWorker(tasks=Tasks(gate=("a",), audit=("c",)))).tasks()


async def input_lines() -> AsyncIterator[str]:
    for play in PLAYS:
        yield play.model_dump_json() + "\n"


async def test_gate_workers_follow_the_protocol_of_the_gate() -> None:
    out = io.StringIO()
    await serve(dispatcher(FakeWorker(lives=7), FakeWorker()), input_lines(), out, start_s=5)
    first, *played = map(json.loads, out.getvalue().splitlines())
    assert Tasks.model_validate(first) == TASKS
    assert sorted((decision["seed"], decision["score"]) for decision in played) == [
        (seed, seed / 100) for seed in range(40)
    ]


def test_worker_names_are_limited_by_concurrency() -> None:
    assert len(worker_names(64, 16)) == 16
    assert len(worker_names(3, 16)) == 3


def test_gate_starts_gate_workers_only_when_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("{python}", "gate.py")
    alone, spread = (GateSettings(command=command, ray=GateRaySettings(workers=number)) for number in (0, 2))
    assert Gate(alone)._command()[1] == "gate.py"
    module, settings = Gate(spread)._command()[2:]
    assert (module, GateSettings.model_validate_json(settings)) == ("headrace_registry.gate_workers", spread)
    assert Gate(alone).sha256 == Gate(spread).sha256, "the same plays, so the scores of the two are compared"
    monkeypatch.setattr(gate_module, "find_spec", lambda _: None)
    Gate(alone)
    with pytest.raises(SettingError, match=r"headrace-registry\[ray\]"):
        Gate(spread)
