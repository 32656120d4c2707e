"""One play: statements, a world that hears them in a random order, and what the oracle has against the result."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

from headrace_schemas import Experience
from headrace_schemas.replay import ClosedLine, FeedbackLine
from headrace_scorer.functions.pool import FunctionPool
from headrace_scorer.rescoring import Rescoring
from headrace_scorer.settings import ScorerSettings
from tests.feedback.comparing import WEIGHTS, differences, weight
from tests.feedback.oracle import Oracle
from tests.feedback.sayings import LABELS, Saying, Scene, Talk
from tests.feedback.world import Tick, events, partition_of, scenes, trajectory, world

PER_SCENE = 25


def talk(seed: int, count: int) -> tuple[list[Scene], list[Saying]]:
    told = scenes(max(4, count // PER_SCENE), seed)
    return told, Talk(told, seed).sayings(count)


async def differing(
    url: str,
    data_dir: Path,
    seed: int,
    count: int,
    combine: Literal["mean", "sum"] = "mean",
    tick: Tick | None = None,
) -> list[str]:
    """What is not as the oracle says, in sentences."""
    told, sayings = talk(seed, count)
    async with world(url, data_dir, weights=WEIGHTS, combine=combine) as made:
        await made.play(sayings, told, seed, tick)
        try:
            newest = made.newest()
        except AssertionError as error:
            return [str(error)]
        return differences(sayings, told, newest, Oracle(weight, combine))


async def replayed(seed: int, count: int) -> list[str]:
    """The same of a replay, which reads all that was said beforehand, in another order."""
    told, sayings = talk(seed, count)
    chosen = ScorerSettings.model_validate({"labels": LABELS, "weights": WEIGHTS})
    rescoring = Rescoring(chosen, FunctionPool(chosen))
    said = [(one, event) for one in sayings for event in events(one)]
    random.Random(seed).shuffle(said)
    for one, event in said:
        line = FeedbackLine(event=event.model_dump(mode="json"), place=one.place, turns_until=10**6)
        rescoring.know("feedback", line.model_dump_json().encode())
    newest: dict[str, Experience] = {}
    runs = [trajectory(scene) for scene in told]
    for number, run in enumerate(runs):
        closed = ClosedLine(
            trajectory_id=run.trajectory_id,
            session_key=run.session_key,
            tenant=run.tenant,
            time_ms=0,
            place=number,
            began=run.turns_from,
            partition=partition_of(run.session_key),
        )
        rescoring.know("closed", closed.model_dump_json().encode())
    for run in runs:
        found = rescoring.taken(await rescoring.score(run.to_json()))
        newest |= {one.experience_id: one for one in found}
    return differences(sayings, told, newest, Oracle(weight))
