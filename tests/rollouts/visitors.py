"""Users of a model: new sessions and regular ones, and their feedback, by the answering version."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import httpx2

from headrace_runtime.kafka.consumer import assign_all, consumer, record_of
from headrace_runtime.kafka.wire import decode
from headrace_schemas import Reward, Turn
from headrace_schemas.values import ids
from headrace_schemas.values.base import utcnow
from tests.rollouts.rig import RolloutRig

_USERS = 4
_REGULARS = 4
"""Sessions that begin in the rollout and come back again and again, so that some have had whatever is withdrawn."""
_PAUSE_S = 0.05
_AGAIN_S = 0.2
_PATIENCE_S = 120.0
"""Retries of a client after a refused or broken connection, as every client of such a gateway makes them."""


@dataclass(frozen=True, slots=True)
class Call:
    """One that was answered, by the clock `time.monotonic`."""

    session: str
    began_s: float
    ended_s: float
    version: str


class Visitors:
    """Use `visiting`. `rewards`: the share of sessions that are right, by version."""

    def __init__(self, rig: RolloutRig, model: str, rewards: Callable[[str], float]) -> None:
        self._rig = rig
        self._model = model
        self._rewards = rewards
        self._open = True
        self._begun = False
        self.calls: list[Call] = []
        self.failed: list[str] = []
        """Errors of failed calls."""
        self.tried_again = 0
        self.turns: dict[str, Turn] = {}
        """The first captured one of each session, shadows' as well."""

    @contextlib.asynccontextmanager
    async def visiting(self) -> AsyncIterator[None]:
        async with httpx2.AsyncClient(timeout=_PATIENCE_S) as http:
            tasks = [asyncio.create_task(self._regular(http, n)) for n in range(_REGULARS)]
            tasks += [asyncio.create_task(self._user(http, n)) for n in range(_USERS)]
            judge = asyncio.create_task(self._judge())
            try:
                yield
            finally:
                self._open = False
                await asyncio.gather(*tasks)
                judge.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await judge

    async def _user(self, http: httpx2.AsyncClient, number: int) -> None:
        count = 0
        while self._open:
            count += 1
            await self._call(http, f"{self._model}-{number}-{count}")
            await asyncio.sleep(_PAUSE_S)

    async def _regular(self, http: httpx2.AsyncClient, number: int) -> None:
        while self._open:
            routing = self._rig.routing(self._model)
            self._begun = self._begun or bool(routing and routing.split)
            if self._begun:
                await self._call(http, f"{self._model}-regular-{number}")
            await asyncio.sleep(4 * _PAUSE_S)

    async def _call(self, http: httpx2.AsyncClient, session: str) -> None:
        body = {"model": self._model, "messages": [{"role": "user", "content": f"hello from {session}"}]}
        url, headers = f"{self._rig.gateway.url}/v1/chat/completions", {"X-Session-Id": session}
        until_s = time.monotonic() + _PATIENCE_S
        while True:
            began_s = time.monotonic()
            try:
                answer = await http.post(url, json=body, headers=headers)
            except httpx2.TransportError as error:
                if began_s > until_s:
                    self.failed.append(f"{session}: {error!r}")
                    return
                self.tried_again += 1
                await asyncio.sleep(_AGAIN_S)
                continue
            if answer.status_code == 200:
                self.calls.append(Call(session, began_s, time.monotonic(), answer.json()["model"]))
            else:
                self.failed.append(f"{session}: {answer.status_code} {answer.text[:300]}")
            return

    async def _judge(self) -> None:
        """A verdict for each session, once its turn is on the bus."""
        reader = consumer(self._rig.common.bus, "test-turns")
        await reader.start()
        try:
            await reader.seek_to_end(*await assign_all(reader, Turn.topic))
            async for message in reader:
                event = (await decode(record_of(message), self._rig.blobs)).event
                if isinstance(event, Turn) and event.model == self._model and event.session_key not in self.turns:
                    self.turns[event.session_key] = event
                    await self._rig.producer.send(self._verdict(event))
        finally:
            await reader.stop()

    def _verdict(self, turn: Turn) -> Reward:
        dice = int.from_bytes(hashlib.sha256(turn.session_key.encode()).digest()[:4], "big") / 2**32
        value = float(dice < self._rewards(turn.version))
        about = {"trajectory_id": f"t-{turn.session_key}", "session_key": turn.session_key, "source": "function:f"}
        return Reward.model_validate({"time": utcnow(), "value": value, **about})


def key_of(session: str) -> str:
    """Session key, as the gateway names it."""
    return ids.session_key("default", session)
