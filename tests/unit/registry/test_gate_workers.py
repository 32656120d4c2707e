"""Plays that are dealt to workers: each is played once, whoever is lost, and nobody's failure becomes a score."""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections.abc import AsyncIterator

import pytest

from headrace_registry import gate
from headrace_registry.gate import Gate, GateFailed
from headrace_registry.gate_workers.__main__ import serve
from headrace_registry.gate_workers.dealing import Dealer, GateWorker, WorkerLost, places
from headrace_registry.settings import GateRaySettings, GateSettings
from headrace_runtime.errors import SettingError
from headrace_schemas.gate import Play, Tasks

TASKS = Tasks(gate=("a", "b"), audit=("c",))
PLAYS = [Play(version="m@0123456789ab", task="ab"[seed % 2], seed=seed) for seed in range(40)]


class Machine:
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


def dealer(*machines: GateWorker) -> Dealer:
    return Dealer({f"worker-{number}": machine for number, machine in enumerate(machines)})


async def test_plays_are_shared_equally() -> None:
    machines = [Machine() for _ in range(4)]
    dealing = dealer(*machines)
    assert await dealing.tasks() == TASKS
    assert await asyncio.gather(*map(dealing.play, PLAYS)) == [play.seed / 100 for play in PLAYS]
    assert [len(machine.played) for machine in machines] == [10] * 4


@pytest.mark.parametrize("seed", range(20))
async def test_plays_of_a_lost_worker_are_played_by_another_and_once(seed: int) -> None:
    draw = random.Random(seed)
    machines = [Machine(), *(Machine(lives=draw.randint(0, 12)) for _ in range(draw.randint(1, 5)))]
    draw.shuffle(machines)
    assert await asyncio.gather(*map(dealer(*machines).play, PLAYS)) == [play.seed / 100 for play in PLAYS], seed
    assert sorted(play.seed for machine in machines for play in machine.played) == list(range(40)), seed


async def test_without_a_worker_there_is_no_score() -> None:
    dealing = dealer(Machine(lives=1), Machine(lives=0))
    await dealing.play(PLAYS[0])
    with pytest.raises(GateFailed, match="every worker"):
        await dealing.play(PLAYS[1])


async def test_a_program_that_fails_is_not_asked_elsewhere() -> None:
    """Its machine is well, so the program is wrong: that is the run's failure, as on one machine."""

    class Broken(Machine):
        async def play(self, play: Play) -> float:
            raise GateFailed("it ended with status 3")

    other = Machine()
    with pytest.raises(GateFailed, match="status 3"):
        await dealer(Broken(), other).play(PLAYS[0])
    assert other.played == []


async def test_machines_with_other_tasks_are_refused() -> None:
    with pytest.raises(GateFailed, match="worker-0 and worker-1"):
        await dealer(Machine(), Machine(tasks=Tasks(gate=("a",), audit=("c",)))).tasks()


async def asked() -> AsyncIterator[str]:
    for play in PLAYS:
        yield play.model_dump_json() + "\n"


async def test_it_speaks_as_the_gates_program_does() -> None:
    out = io.StringIO()
    await serve(dealer(Machine(lives=7), Machine()), asked(), out, start_s=5)
    first, *told = map(json.loads, out.getvalue().splitlines())
    assert Tasks.model_validate(first) == TASKS
    assert sorted((one["seed"], one["score"]) for one in told) == [(seed, seed / 100) for seed in range(40)]


def test_no_more_workers_than_plays_at_a_time() -> None:
    assert len(places(64, 16)) == 16
    assert len(places(3, 16)) == 3


def test_the_registry_starts_it_only_where_workers_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("{python}", "gate.py")
    alone, spread = (GateSettings(command=command, ray=GateRaySettings(workers=number)) for number in (0, 2))
    assert Gate(alone)._command()[1] == "gate.py"
    module, settings = Gate(spread)._command()[2:]
    assert (module, GateSettings.model_validate_json(settings)) == ("headrace_registry.gate_workers", spread)
    assert Gate(alone).sha256 == Gate(spread).sha256, "the same plays, so the scores of the two are compared"
    monkeypatch.setattr(gate, "find_spec", lambda _: None)
    Gate(alone)
    with pytest.raises(SettingError, match=r"headrace-registry\[ray\]"):
        Gate(spread)
