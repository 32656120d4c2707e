"""One rollout from its checkpoint to its end, in each state of which one process is killed."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.rollouts import checks
from tests.rollouts.checks import Visitors
from tests.rollouts.mortal import MOMENTS, sentence, sentenced
from tests.rollouts.replica import LOADING
from tests.rollouts.rig import WAIT_S, KeptProcess, RolloutRig

BETTER, WORSE, CHAMPION = 0.95, 0.02, 0.6
"""Shares of successful sessions of a better and of a worse candidate, and of the champion."""
STEPS = ["begin 0", "advance 0", "advance 1", "promote 1"]
"""Steps of a better version without faults. A worse version may be detected at any time, so only its last step is
fixed.
"""
_AGREE_S = 15.0
"""Seconds within which bus and database must agree; a registry that sees a difference waits for five seconds."""
_PAUSE_S_MAX = 0.3
_EXPERIENCES = 4


@dataclass(frozen=True, slots=True)
class Cell:
    """Parameters of a run: the database, the killed process, and whether the candidate is better or worse."""

    database: str
    victim: str
    end: str

    @property
    def name(self) -> str:
        return f"{self.database}/{self.victim}/{self.end}"


@dataclass(slots=True)
class Played:
    """Result of a run."""

    kills: list[dict[str, object]] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    """Deaths of registries within a step: the step, and the point in the step."""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    calls: int = 0
    tried_again: int = 0
    steps: list[str] = field(default_factory=list)


class Story:
    """Run of one rollout. Call `play` once. The process named by the cell's `victim` is killed."""

    def __init__(self, rig: RolloutRig, cell: Cell, draw: random.Random, base: Path | None, end_wait_s: float) -> None:
        self._rig = rig
        self._cell = cell
        self._draw = draw
        self._base = base
        self._end_wait_s = end_wait_s
        self._model = f"{cell.victim}-{cell.end}"
        self._out = Played()
        self._first = self._second = ""
        self._count = 0
        self._arms: dict[str, str] = {}
        """Version that answered each experience of the trainer."""

    async def play(self) -> Played:
        began_s = time.monotonic()
        visitors = Visitors(self._rig, self._model, self._right)
        try:
            await self._check_contradictions(visitors)
        except TimeoutError as error:
            self._out.problems.append(str(error))
        finally:
            self._out.deaths = self._out.deaths[: len(self._out.deaths) - len(self._deaths)]
            sentence(self._rig.folder, ())
            for name in (LOADING, "hold"):
                (self._rig.folder / name).unlink(missing_ok=True)
            await asyncio.to_thread(self._rig.stop_trainer)
        self._out.problems += [f"a call failed: {item}" for item in visitors.failed]
        seen = [item for item in self._rig.routings if item.model == self._model]
        decisions = self._rig.decisions_about(self._model)
        self._out.problems += [*checks.in_a_row(seen), *checks.repeated_decisions(decisions), *await self._apart()]
        self._out.steps = self._rig.steps(self._second)
        self._out.seconds = round(time.monotonic() - began_s, 1)
        self._out.calls, self._out.tried_again = len(visitors.calls), visitors.tried_again
        return self._out

    async def _apart(self) -> list[str]:
        """Return the differences between bus and database that remain after the wait."""
        deadline = time.monotonic() + _AGREE_S
        while True:
            decisions, routing = self._rig.decisions_about(self._model), self._rig.routing(self._model)
            problems = await checks.as_stored(self._rig.database, self._model, self._second, routing, decisions)
            if not problems or time.monotonic() > deadline:
                return problems
            await asyncio.sleep(0.2)

    def _right(self, version: str) -> float:
        if version != self._second:
            return CHAMPION
        return BETTER if self._cell.end == "better" else WORSE

    async def _check_contradictions(self, visitors: Visitors) -> None:
        folder = self._rig.folder
        self._first = await self._champion()
        async with visitors.visiting():
            await self._until(lambda: visitors.calls, "the first call")
            await self._until(lambda: self._measured, "the champion's audit")
            (folder / LOADING).write_text(self._first, encoding="utf-8")
            (folder / "hold").touch()
            self._second = await self._candidate()
            await self._until(lambda: self._served(self._second), "the probe")
            await self._kill("probing")
            (folder / LOADING).unlink()
            await self._until(lambda: self._plays(self._second), "the gate's trial")
            await self._kill("gate")
            self._sentence()
            (folder / "hold").unlink()
            await self._on_trial()
            await self._ended(visitors)

    async def _champion(self) -> str:
        if self._cell.victim == "trainer":
            assert self._base is not None
            trainer = await asyncio.to_thread(self._rig.start_trainer, self._model, self._base)
            await self._until(lambda: self._rig.champion(self._model), "the trainer's first champion")
            assert trainer.pid
        else:
            await self._rig.publish(self._model, 0)
            await self._until(lambda: self._rig.champion(self._model), "the first champion")
        champion = self._rig.champion(self._model)
        assert champion
        return champion

    async def _candidate(self) -> str:
        if self._cell.victim != "trainer":
            return await self._rig.publish(self._model, 1, self._first)
        await self._learn(self._first)
        await self._until(lambda: len(self._registered()) > 1, "the trainer's second version")
        return self._registered()[1]

    async def _learn(self, version: str) -> None:
        """Send the trainer experiences answered by the version, enough for one more version."""
        from tests.unit.trainer.world import experience  # brings the trainer along

        for _ in range(_EXPERIENCES):
            self._count += 1
            self._arms[f"e{self._count}"] = version
            await self._rig.producer.send(experience(self._count, version, float(self._count % 3), model=self._model))

    def _children(self, version: str) -> set[str]:
        decisions = self._rig.decisions_about(self._model)
        return {
            decision.version
            for decision in decisions
            if decision.decision == "registered" and decision.previous == version
        }

    def _learned_of(self, version: str) -> list[str]:
        """Return the experiences answered by the version that the trainer's saved weights contain."""
        from headrace_trainer.experiences.history import History
        from headrace_trainer.lineage.store import LineageStore

        saved = LineageStore(self._rig.blobs, "main").read()
        if saved is None:
            return ["the lineage is not there"]
        entries = {name: saved.window.get(name) for name, answered in self._arms.items() if answered == version}
        history = History(saved.versions, saved.head, saved.head_step)
        return [
            name for name, entry in entries.items() if entry is not None and entry.affects_weights(history, saved.steps)
        ]

    def _registered(self) -> list[str]:
        return [
            decision.version for decision in self._rig.decisions_about(self._model) if decision.decision == "registered"
        ]

    async def _on_trial(self) -> None:
        """Follow the rollout to its last step, and kill the victim once in each state."""
        states = ("shadow", "canary, first share", "canary, last share")
        for number, state in enumerate(states):
            await self._until(lambda number=number: len(self._steps) > number or self._over, state)  # type: ignore[misc]
            if self._over:
                return
            if self._cell.victim == "trainer":
                await self._learn(self._second)  # its children go on being published
            await self._kill(state)
        await self._until(lambda: self._over, "the end of the rollout")

    async def _ended(self, visitors: Visitors) -> None:
        last = "promote" if self._cell.end == "better" else "roll_back"
        if self._steps[-1].split()[0] != last:
            self._out.problems.append(f"it ended with {self._steps[-1]}: {self._reason()}")
            return
        await self._kill({"promote": "promotion", "roll_back": "rollback"}[last])
        champion = self._second if last == "promote" else self._first
        await self._until(
            lambda: self._rig.champion(self._model) == champion and self._shown_ended,
            "the end on the bus",
            self._end_wait_s,
        )
        told_s = time.monotonic()
        await self._until(lambda: not self._deaths, "every death of a registry")
        if last == "promote":
            await self._answers(visitors, champion)
            if self._steps != STEPS:
                self._out.problems.append(f"its steps were {self._steps}")
        else:
            await self._out_for_good(visitors, told_s)

    async def _answers(self, visitors: Visitors, champion: str) -> None:
        count = len(visitors.calls)
        await self._until(
            lambda: any(call.version == champion for call in visitors.calls[count:]), "the champion's first answer"
        )

    async def _out_for_good(self, visitors: Visitors, told_s: float) -> None:
        """Check that the version answers no call once the gateway has the decision, and that its children are never
        served.
        """
        splits = [item.split for item in self._rig.routings if item.model == self._model and item.split]
        if splits:
            arguments = (splits[-1], self._first, self._second, told_s)
            await self._until(lambda: checks.heard_by(visitors.calls, *arguments), "a call that shows the decision")
            heard_s = checks.heard_by(visitors.calls, *arguments)
            assert heard_s is not None
            count = len(visitors.calls)
            await self._until(lambda: len(visitors.calls) > count + 20, "calls after it")
            self._out.problems += checks.answered_by(visitors.calls, self._second, min(heard_s, told_s + checks.SOON_S))
        if self._cell.victim == "trainer":
            children = self._children(self._second)
            await self._until(lambda: children <= self._withdrawn, f"{children} barred")
            await self._learn(self._first)
            await self._until(lambda: self._children(self._first) - {self._second}, "a version without it")
            await self._until(lambda: not self._learned_of(self._second), "what it taught is taken back")
        else:
            child = await self._rig.publish(self._model, 2, self._second)
            await self._until(lambda: child in self._withdrawn, "its child barred")
        answered = {item.version for item in visitors.calls} & self._children(self._second)
        self._out.problems += [f"{item} answered, a child of what was taken back" for item in sorted(answered)]

    # What is seen

    @property
    def _steps(self) -> list[str]:
        return self._rig.steps(self._second)

    @property
    def _over(self) -> bool:
        return bool(self._steps) and self._steps[-1].split()[0] in ("promote", "hold", "roll_back")

    @property
    def _measured(self) -> bool:
        decisions = self._rig.decisions_about(self._model)
        return any(decision.decision == "evaluated" and decision.version == self._first for decision in decisions)

    @property
    def _shown_ended(self) -> bool:
        routing = self._rig.routing(self._model)
        return routing is not None and routing.split is None and "canary" not in routing.aliases

    @property
    def _withdrawn(self) -> set[str]:
        routing = self._rig.routing(self._model)
        return set(routing.withdrawn) if routing else set()

    @property
    def _deaths(self) -> list[str]:
        return sentenced(self._rig.folder)

    def _served(self, version: str) -> bool:
        routing = self._rig.routing(self._model)
        return routing is not None and version in {served.version for served in routing.serve}

    def _plays(self, version: str) -> bool:
        path = self._rig.folder / "runs"
        return path.exists() and version in path.read_text(encoding="utf-8").split()

    def _reason(self) -> str:
        decisions = [
            decision
            for decision in self._rig.decisions_about(self._model)
            if decision.version == self._second and decision.rollout
        ]
        return json.dumps([decisions[-1].reason, decisions[-1].statistics]) if decisions else ""

    async def _until(self, condition: Callable[[], object], label: str, wait_s: float = WAIT_S) -> None:
        await self._rig.until(condition, f"{self._cell.name}: {label}", wait_s)

    # Who dies

    def _sentence(self) -> None:
        """Schedule deaths of registries within the steps themselves, each at another point."""
        if self._cell.victim != "registry":
            return
        last = "promote" if self._cell.end == "better" else "roll_back"
        deaths = ["begin half sent", *(f"{last} {point}" for point in MOMENTS)]
        sentence(self._rig.folder, deaths)
        self._out.deaths = deaths

    async def _kill(self, state: str) -> None:
        """Kill the victim at a random time within the state, and wait for its successor."""
        if self._cell.victim == "nobody":
            return
        await asyncio.sleep(self._draw.random() * _PAUSE_S_MAX)
        before = len(self._steps)
        killed = [process.name for process in await self._dying()]
        self._out.kills.append({"state": state, "killed": killed, "steps": before})
        await self._until(self._all_alive, f"{killed} back")

    async def _dying(self) -> list[KeptProcess]:
        processes_of: dict[str, list[KeptProcess | None]] = {
            "gateway": [self._rig.gateway],
            "replica": [self._rig.replica],
            "trainer": [self._rig.trainer],
            "registries": [*self._rig.registries],
        }
        dying = processes_of.get(self._cell.victim) or [await self._rig.leader()]
        victims = [process for process in dying if process is not None]
        for process in victims:
            await asyncio.to_thread(process.kill)
        return victims

    def _all_alive(self) -> bool:
        return all(process.running() for process in self._rig.processes)
