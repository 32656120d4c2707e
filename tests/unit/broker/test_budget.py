"""Shared memory: bounded use, first come first served, no loss by cancellation."""

from __future__ import annotations

import asyncio
import random

from headrace_broker.budget import MemoryBudget
from tests.support.seeds import draw_seed


async def test_who_comes_first_is_served_first() -> None:
    budget = MemoryBudget(10)
    assert await budget.take(8) == 8
    large, small = asyncio.create_task(budget.take(5)), asyncio.create_task(budget.take(1))
    await asyncio.sleep(0)
    assert not small.done()
    budget.give(8)
    assert await large == 5
    assert await small == 1
    assert budget.used == 6


async def test_more_than_everything_is_everything() -> None:
    budget = MemoryBudget(10)
    assert await budget.take(1_000) == 10
    budget.give(10)
    assert budget.used == 0


async def test_random_use_with_cancellations() -> None:
    seed = draw_seed()
    chance = random.Random(seed)
    budget = MemoryBudget(100)

    async def use() -> None:
        granted = await budget.take(chance.randrange(1, 120))
        assert budget.used <= 100
        try:
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)
        finally:
            budget.give(granted)

    tasks = [asyncio.create_task(use()) for _ in range(500)]
    for task in chance.sample(tasks, 200):
        await asyncio.sleep(0)
        task.cancel()
    async with asyncio.timeout(10):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert budget.used == 0
    assert await budget.take(100) == 100
