"""A reader of the console's topics that is killed within its batches again and again until it has read everything.

`python -m tests.console.killed_reader < task.json` prints the number of kills, and the counts after each complete
reading. The task has `bus`, `data_dir`, `kills` and `seed`. Each reader is a fork, so that its start takes no time.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import shutil
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace_console.read_model import follower, queries
from headrace_console.settings import Scope
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.database import Database, migrate
from tests.integration.console.test_follower import follow

_BATCH = 10
_BATCHES_MAX = 4
"""Maximum number of batches that a reader applies before it is killed within the next batch."""
_WITHIN_S = 0.05
"""Maximum time between the end of a batch and the kill, in seconds."""
_QUIET_S = 60.0


async def _make_tables(common: Common) -> None:
    database = Database.open("console", common)
    await migrate(database, "headrace_console")
    await database.close()


async def _read(common: Common, applied: int) -> None:
    """Read to the end of all topics, and write one byte to the descriptor `applied` after each batch."""
    database = Database.open("console", common)
    await follow(common, database, lambda: os.write(applied, b"."))
    await database.close()


async def _counts(common: Common) -> dict[str, Any]:
    database = Database.open("console", common)
    async with database.transaction() as tx:
        counts = await queries.counts(tx, Scope(None))
    await database.close()
    return asdict(counts)


def _kill_one(common: Common, draw: random.Random) -> bool:
    """Start a reader and kill it after some batches. Return False if the reader had read everything before the kill."""
    applied, writes = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(applied)
        asyncio.run(_read(common, writes))
        os._exit(0)
    os.close(writes)
    try:
        for _ in range(draw.randint(0, _BATCHES_MAX)):
            if not select.select([applied], [], [], _QUIET_S)[0]:
                raise TimeoutError(f"reader {pid} has applied no batch for {_QUIET_S:g} s")
            if not os.read(applied, 1):
                break
        time.sleep(draw.uniform(0, _WITHIN_S))
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return True
    finally:
        os.close(applied)


def main() -> None:
    task = json.load(sys.stdin)
    common = Common.model_validate({"data_dir": task["data_dir"], "bus": {"address": task["bus"]}})
    draw, follower._BATCH_MAX = random.Random(task["seed"]), _BATCH
    kills, counts = 0, list[dict[str, Any]]()
    while kills < task["kills"]:
        shutil.rmtree(Path(task["data_dir"]) / "db", ignore_errors=True)
        asyncio.run(_make_tables(common))
        while kills < task["kills"] and _kill_one(common, draw):
            kills += 1
        devnull = os.open(os.devnull, os.O_WRONLY)
        asyncio.run(_read(common, devnull))
        os.close(devnull)
        counts.append(asyncio.run(_counts(common)))
    print(json.dumps({"kills": kills, "counts": counts}))


if __name__ == "__main__":
    main()
