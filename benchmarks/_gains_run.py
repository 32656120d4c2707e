"""One run: users speak, the scorer makes experiences of it, and a lineage of the real trainer learns from them."""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks._engine_world import MAX_TOKENS
from benchmarks._gains_found import Arm, Gain
from benchmarks._gains_world import Say, Scoring, Traffic, Visit
from benchmarks._learning_run import Newest
from benchmarks._learning_world import SETTINGS
from benchmarks._thumbs_world import HINTS
from email_agent import directions as directed
from email_agent import users
from email_agent.build_base import LESSON
from headrace_runtime.blobs import BlobStore
from headrace_runtime.clock import SystemClock
from headrace_runtime.settings import complete
from headrace_schemas import Experience
from headrace_scorer.settings import ScorerSettings
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.settings import TrainerSettings

FEW, POISONERS = 0.03, 0.02


async def few_thumbs(played: users.Played, poisoners: float = 0.0) -> None:
    """Some type what they think, a few of them the contrary of it, and very few give a thumb."""
    rates = {name: up if played.accepted else down for name, (up, down, _) in HINTS.items()}
    if played.draw.random() < rates["corrected"]:
        await users.reply(played, users.WRONG)
    elif played.draw.random() < rates["thanked"]:
        await users.reply(played, users.THANKS)
    await users.thumbs(played, share=FEW, poisoners=poisoners)


async def directions(played: users.Played) -> None:
    """Who knows the way says what to call, or thanks."""
    await _told(played, directed.direction(played.task, played.tools, played.episode.messages, played.draw)[0])


async def nothing_but_no(played: users.Played) -> None:
    """Everybody types the same, which is worth nothing to anybody."""
    await _told(played, users.WRONG)


class Misled:
    """Planted: what is typed belongs to the session before."""

    def __init__(self) -> None:
        self._before: str | None = None

    async def __call__(self, played: users.Played) -> None:
        own, _ = directed.direction(played.task, played.tools, played.episode.messages, played.draw)
        text, self._before = self._before or own, own
        await _told(played, text)


async def _told(played: users.Played, text: str) -> None:
    await users.reply(played, users.THANKS if played.accepted else text, MAX_TOKENS)
    await played.end()


LESSONS = {"demo": LESSON, "directed": directed.DIRECTED_LESSON}
USERS: Mapping[str, Say] = {
    **users.SIGNALS,
    "directions": directions,
    "directions of others": Misled(),
    "nothing but no": nothing_but_no,
    "few thumbs": few_thumbs,
    "few thumbs, poisoned": partial(few_thumbs, poisoners=POISONERS),
}


def run(arm: Arm, seed: int, base: Path, plays: int) -> Gain:
    """In a process of its own, with one thread of torch. `plays`: of audit tasks, for each score."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="headrace-gains-") as scratch:
        return asyncio.run(_run(arm, seed, base, plays, Path(scratch)))


def settings_of(arm: Arm, seed: int, base: Path) -> TrainerSettings:
    """Those of the demo, with a version for each round."""
    optimizer = {**SETTINGS["trainer"]["optimizer"], **_section(arm, "optimizer")}
    changed = {"base": str(base), "seed": seed, "steps_per_version": 1, **arm.trainer, "optimizer": optimizer}
    return complete(TrainerSettings).model_validate({**SETTINGS["trainer"], **changed})


def _section(arm: Arm, name: str) -> Mapping[str, object]:
    found = arm.trainer.get(name, {})
    assert isinstance(found, Mapping)
    return found


async def _run(arm: Arm, seed: int, base: Path, plays: int, scratch: Path) -> Gain:
    began = time.perf_counter()
    blobs = BlobStore((scratch / "blobs").as_uri())
    lineage = open_lineage(settings_of(arm, seed, base), blobs, SystemClock())
    found = Gain(arm.name, seed, [])
    scorer = ScorerSettings.model_validate({"required": [], **arm.scorer})
    judge = np.random.default_rng([seed, 3]) if arm.judged else None
    async with Traffic.open(seed, blobs, scratch / "versions") as world, Scoring.open(scorer, judge) as scoring:
        if arm.held_back is not None:
            world.hold_back(arm.held_back)
        training = _Training(arm, seed, lineage, world, scoring, found)
        if arm.before:
            await training.see(arm.before)
        for number in range(1, arm.rounds + 1):
            if not await training.round(last=number == arm.rounds):
                break
            if arm.traced and number % arm.traced == 0:
                found.trace.append((found.sessions, await world.score(await training.version(), plays)))
        done = arm.times == 1 and found.trace and found.trace[-1][0] == found.sessions
        last = await training.version()
        found.scores = found.trace[-1][1] if done else await world.score(last, arm.times * plays)
    found.steps = lineage.state.steps
    found.health = lineage.health.stopped.reason if lineage.health.stopped else None
    found.seconds = round(time.perf_counter() - began, 1)
    return found


MEASURED = ("hindsight_gap", "hindsight_gap_chance", "hindsight_runs", "guard_drop_mean", "guard_drop")
"""What is kept of a step's measures."""


class _Training:
    def __init__(self, arm: Arm, seed: int, lineage: Lineage, world: Traffic, scoring: Scoring, found: Gain) -> None:
        self._lineage, self.version = lineage, Newest(lineage, world)
        self._arm, self._scoring, self._found = arm, scoring, found
        self._traffic = world
        self._draw = random.Random(f"users {seed}")
        self._place = 0

    async def see(self, sessions: int) -> list[Experience]:
        """Sessions with the newest version, and what the scorer makes of them."""
        version = await self.version()
        visits = await self._traffic.visits(version, sessions, USERS[self._arm.users], self._draw)
        made = await self._scoring.experiences(visits)
        self._found.accepted.append(statistics.fmean(visit.accepted for visit in visits))
        self._found.judged += _judged(visits, made)
        heard = self._scoring.heard
        self._found.ordered += [
            (one.accepted, heard[name]) for one in visits if (name := one.run.trajectory_id) in heard
        ]
        self._found.edits += sum(visit.edits for visit in visits)
        return made

    async def round(self, *, last: bool) -> bool:
        """Sessions, the steps that they are enough for, and a version. False when training is over."""
        lineage, stop = self._lineage, threading.Event()
        for one in await self.see(self._arm.sessions):
            lineage.state.admit(one, (0, self._place), one.time)
            self._place += 1
        self._found.sessions += self._arm.sessions
        enough = self._arm.edits_max is not None and self._found.edits >= self._arm.edits_max
        while items := lineage.next_batch(over=last or enough):
            measured = await asyncio.to_thread(lineage.step, items, stop)
            self._found.measured.append({name: measured[name] for name in MEASURED if name in measured})
            if lineage.health.stopped is not None:
                await asyncio.to_thread(lineage.give_up)
                break
        await asyncio.to_thread(lambda: lineage.save(publish=lineage.has_unpublished_steps))
        return lineage.health.stopped is None and not enough


def _judged(visits: Sequence[Visit], made: Sequence[Experience]) -> list[tuple[bool, float]]:
    """Runs that a reward model spoke of: the truth, and its word."""
    accepted = {visit.run.trajectory_id: visit.accepted for visit in visits}
    return [
        (accepted[one.trajectory_id], part.value)
        for one in made
        for part in one.parts
        if part.source.startswith("learned:")
    ]
