"""A task that is cancelled in the middle of a transaction must not leave the database locked behind it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from sqlalchemy import text

from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.database import Database


async def test_cancelling_anywhere_leaves_no_lock_and_no_half_transaction(data_dir: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    database = Database.open("x", Common(data_dir=data_dir))
    async with database.transaction() as tx:
        await tx.execute(text("CREATE TABLE pairs (a INTEGER)"))

    async def work() -> None:
        while True:
            async with database.transaction() as tx:
                await tx.execute(text("INSERT INTO pairs VALUES (1)"))
                await tx.execute(text("SELECT count(*) FROM pairs"))
                await tx.execute(text("INSERT INTO pairs VALUES (1)"))

    for _ in range(30):
        task = asyncio.create_task(work())
        await asyncio.sleep(chance.random() * 0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(5), database.transaction() as tx:
            assert (await tx.scalar(text("SELECT count(*) FROM pairs"))) % 2 == 0
    await database.close()
