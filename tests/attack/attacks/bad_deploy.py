"""A release whose handler fails for every record: the consumer pauses before it empties its topic."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import httpx

from headrace.topics import connected
from headrace_operations import dead_letters
from headrace_operations.dead_letters import Selection
from headrace_schemas import DeadLetter, Trajectory
from tests.attack.stacks import SmallStack, small_stack
from tests.support.service_process import ServiceProcess
from tests.support.turns import ask, end, user
from tests.system.program import Line, at_most, none_of

TITLE = "a release that fails on every record"
TURNS = 300
RUN_MAX = 20
_BROKEN = """
import headrace_collector.handlers as handlers

async def fails(self, turn, handling):
    raise RuntimeError("a bug of this release")

handlers.Collector.on_turn = fails
"""


async def attack(folder: Path, rng: random.Random) -> list[Line]:
    del rng
    async with small_stack(folder) as stack:
        (folder / "broken").mkdir()
        (folder / "broken" / "sitecustomize.py").write_text(_BROKEN)
        settings = {"DEAD_LETTERS__RUN_MAX": RUN_MAX, "COLLECTOR__IDLE_S": 600}
        broken = stack.service("collector", **settings)
        broken._environ["PYTHONPATH"] = str(folder / "broken")
        broken.start()
        turns = [ask([user(f"question {n}")], session=f"s{n}", at=n) for n in range(TURNS)]
        for turn in turns:
            await stack.send(turn)
        pauses = await _pauses(broken)
        letters = await stack.events(DeadLetter)
        broken.stop()
        fixed = stack.service("collector", **settings)
        fixed.start()
        await _retry(stack, fixed)
        for number in range(TURNS):
            await stack.send(end(f"s{number}", at=TURNS + number))
        closed = await stack.until(Trajectory, lambda trajectories: len(trajectories) >= TURNS, 120)
        reached = {turn for trajectory in closed for turn in trajectory.turn_ids}
        lost = [turn.turn_id for turn in turns if turn.turn_id not in reached]
        return [
            Line("says that it has paused (health, metric, log)", pauses, "health, metric, log", pauses == _ALL),
            at_most("dead letters before the pause", len(letters), RUN_MAX),
            none_of("turns that were lost to the release", len(lost), TURNS),
        ]


_ALL = "health, metric, log"


async def _pauses(service: ServiceProcess) -> str:
    """Wait until the service reports that it has paused, and return the names of the reports that mention the pause."""
    deadline = time.monotonic() + 90
    paused: list[str] = []
    while time.monotonic() < deadline and len(paused) < 3:
        async with httpx.AsyncClient() as client:
            health = (await client.get(f"{service.url}/health")).json()
            metrics = (await client.get(f"{service.url}/metrics")).text
        reports = {
            "health": not health["checks"].get("consumer", True),
            "metric": 'headrace_consumer_paused{service="collector"} 1.0' in metrics,
            "log": "consumer_paused" in service.log,
        }
        paused = [name for name, reports_pause in reports.items() if reports_pause]
        await asyncio.sleep(0.5)
    return ", ".join(paused) or "nowhere"


async def _retry(stack: SmallStack, _fixed: ServiceProcess) -> None:
    """Retry the refused records after the repair, as docs/dead-letters.md describes."""
    async with connected(stack.bus) as topics:
        plan = await dead_letters.plan(topics, "retry", Selection(reasons=("handler_error",)))
    await dead_letters.retry(stack.bus, plan, "attack")
