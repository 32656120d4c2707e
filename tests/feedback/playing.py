"""One play: feedback, a world that receives it in a random order, and the comparison with the oracle."""

from __future__ import annotations

import random
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from headrace_schemas import Experience
from headrace_schemas.programs.replay import ClosedLine, FeedbackLine
from headrace_scorer.functions.pool import FunctionPool
from headrace_scorer.rescoring import Rescoring
from headrace_scorer.settings import ScorerSettings
from tests.feedback.comparing import WEIGHTS, differences, weight
from tests.feedback.oracle import Oracle
from tests.feedback.sayings import LABELS, Saying, Scene, Talk
from tests.feedback.training import training_differences
from tests.feedback.world import Tick, events, partition_of, scenes, trajectory, world

PER_SCENE = 25


def talk(seed: int, count: int) -> tuple[list[Scene], list[Saying]]:
    all_scenes = scenes(max(4, count // PER_SCENE), seed)
    return all_scenes, Talk(all_scenes, seed).sayings(count)


async def differing(
    url: str,
    data_dir: Path,
    seed: int,
    count: int,
    combine: Literal["mean", "sum"] = "mean",
    tick: Tick | None = None,
    algorithms: Collection[str] = (),
) -> list[str]:
    """Return the differences from the oracle, in sentences: of the experiences, and of the training by `algorithms`."""
    played_scenes, sayings = talk(seed, count)
    async with world(url, data_dir, weights=WEIGHTS, combine=combine) as running_world:
        await running_world.play(sayings, played_scenes, seed, tick)
        try:
            newest = running_world.newest()
        except AssertionError as error:
            return [str(error)]
        oracle, sent = Oracle(weight, combine), list(running_world.stream.sent(Experience))
    problems = differences(sayings, played_scenes, newest, oracle)
    for algorithm in algorithms:
        problems += training_differences(algorithm, sent, sayings, played_scenes, oracle, data_dir)
    return problems


async def replayed(seed: int, count: int) -> list[str]:
    """Return the same differences of a replay, which reads all feedback beforehand, in another order."""
    played_scenes, sayings = talk(seed, count)
    chosen = ScorerSettings.model_validate({"labels": LABELS, "weights": WEIGHTS})
    rescoring = Rescoring(chosen, FunctionPool(chosen))
    sent = [(saying, event) for saying in sayings for event in events(saying)]
    random.Random(seed).shuffle(sent)
    for saying, event in sent:
        line = FeedbackLine(event=event.model_dump(mode="json"), place=saying.number, turns_until=10**6)
        rescoring.add_line("feedback", line.model_dump_json().encode())
    newest: dict[str, Experience] = {}
    runs = [trajectory(scene) for scene in played_scenes]
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
        rescoring.add_line("closed", closed.model_dump_json().encode())
    for run in runs:
        result = rescoring.accept(await rescoring.score(run.to_json()))
        newest |= {saying.experience_id: saying for saying in result}
    return differences(sayings, played_scenes, newest, Oracle(weight))
