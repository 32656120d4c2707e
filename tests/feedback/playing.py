"""One play: statements, a world that hears them in a random order, and what the oracle has against the result."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tests.feedback.comparing import WEIGHTS, differences, weight
from tests.feedback.oracle import Oracle
from tests.feedback.sayings import Saying, Scene, Talk
from tests.feedback.world import Tick, scenes, world

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
