"""Users that arrive independently of the stack's progress: sessions at random moments, with a mean number of turns."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

from tests.chaos.client import Client

TURNS_MAX = 5
TASKS = 24
VALUES = (0.0, 0.25, 0.5, 0.75, 1.0)
_REVISED_SHARE = 0.25
"""Share of the verdicts that are revised."""
_MEAN_TURNS = (1 + TURNS_MAX) / 2
_SESSIONS_MAX = 240
"""Sessions that are open at one time; the gateway admits 256 requests of one key."""
_TOPICS = ("invoice", "meeting", "report", "flight", "contract")


@dataclass(slots=True)
class Load:
    """`run` until `stop` is set; then the sessions that have begun go on to their ends."""

    client: Client
    choose: random.Random
    rate: float
    """Turns per second."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    sessions: int = 0
    seconds: float = 0.0
    """How long users arrived."""

    async def run(self) -> None:
        slots = asyncio.Semaphore(_SESSIONS_MAX)
        began = next_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while not self.stop.is_set():
                next_s += self.choose.expovariate(self.rate / _MEAN_TURNS)
                await self._until(next_s)
                await slots.acquire()
                self.sessions += 1
                session = group.create_task(self._session(self.sessions, self.choose.randrange(2**32)))
                session.add_done_callback(lambda _: slots.release())
            self.seconds = time.monotonic() - began

    async def _until(self, moment_s: float) -> None:
        """Wait until the moment. Sessions that were late for want of a slot start at once."""
        if (pause_s := moment_s - time.monotonic()) > 0:
            await asyncio.sleep(pause_s)

    async def _session(self, number: int, seed: int) -> None:
        choose = random.Random(seed)
        session_id = f"chaos-{seed:08x}-{number}"
        messages: list[dict[str, str]] = []
        for turn in range(choose.randint(1, TURNS_MAX)):
            if turn:
                await asyncio.sleep(choose.expovariate(10))  # what an agent does with an answer
            question = f"Who sent the {choose.choice(_TOPICS)} of case {choose.randrange(10**6)}?"
            messages.append({"role": "user", "content": question})
            answer = await self.client.ask(
                session_id, list(messages), max_tokens=choose.randint(4, 12), stream=choose.random() < 0.4
            )
            if answer is None and turn == 0:
                return  # nothing to judge
            messages.append({"role": "assistant", "content": answer or ""})
        await self._judge(session_id, choose)

    async def _judge(self, session_id: str, choose: random.Random) -> None:
        """Play a session. Its last verdict comes before the end or after it."""
        task = {"task_id": f"task-{choose.randrange(TASKS)}"}
        ends = choose.random() < 0.5
        await self.client.feedback(session_id, choose.choice(VALUES), ends_session=ends, **task)
        while choose.random() < _REVISED_SHARE:
            await asyncio.sleep(choose.expovariate(2))
            await self.client.feedback(session_id, choose.choice(VALUES), **task)
        if not ends:
            await self.client.end(session_id)
