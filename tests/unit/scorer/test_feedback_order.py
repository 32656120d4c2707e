"""Feedback of every kind in any order: the experiences are those of an oracle that hears it in order (P10)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.feedback.comparing import WEIGHTS, differences, weight
from tests.feedback.oracle import Oracle
from tests.feedback.sayings import Talk
from tests.feedback.world import scenes, world


async def played(url: str, data_dir: Path, seed: int, count: int, **settings: Any) -> list[str]:
    told = scenes(max(4, count // 25), seed)
    sayings = Talk(told, seed).sayings(count)
    combine = settings.get("combine", "mean")
    async with world(url, data_dir, weights=WEIGHTS, **settings) as made:
        await made.play(sayings, told, seed)
        return differences(sayings, told, made.newest(), Oracle(weight, combine))


@pytest.mark.parametrize(("seed", "combine"), [(1, "mean"), (2, "sum"), (3, "mean")])
async def test_any_order_ends_as_the_order_of_the_log(
    database_url: str, data_dir: Path, seed: int, combine: str
) -> None:
    assert await played(database_url, data_dir, seed, 200, combine=combine) == []
