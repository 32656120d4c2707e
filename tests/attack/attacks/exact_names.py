"""Two hundred session ids that are easily confused with each other, sent over raw sockets and `http.client`.

A key that is bound to some sessions must not reach the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import httpx2

from headrace_operations.supervisor.overrides import toml
from headrace_schemas import Feedback, SessionEnd, Turn
from headrace_schemas.values import ids
from tests.support import hostile_json
from tests.support.fake_replica import VERSION, FakeReplica
from tests.support.gateway import routing
from tests.support.servers import BrokerProcess
from tests.support.service_process import BusView, GatewayProcess, bus_view, wait_healthy
from tests.system.program import Line, none_of

TITLE = "names that look alike stay different sessions, each with its own feedback"
COUNT = 200
_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
_BEAT_S = 1.0
_WAIT_S = 30.0


async def attack(folder: Path, rng: random.Random) -> list[Line]:
    """Send a call, a feedback and an end for each name, then read the owners of these events from the topics."""
    sessions = hostile_json.draw(rng, COUNT)
    broker = BrokerProcess(folder / "broker")
    await asyncio.to_thread(broker.start)
    keys = toml([_key("open"), _key("bound", session_id="own")])
    gateway = GatewayProcess(folder / "data", broker.address, GATEWAY__KEYS=keys)
    replica = FakeReplica()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(broker.stop)
        await stack.enter_async_context(replica.running())
        view = await stack.enter_async_context(bus_view(broker.address, folder / "data"))
        await view.producer.send(routing(VERSION))
        await stack.enter_async_context(_beating(view, replica))
        stack.callback(gateway.stop)
        await asyncio.to_thread(gateway.start)
        await asyncio.to_thread(wait_healthy, gateway.url)
        refused = await _send_all(gateway.url, sessions)
        reached = await _reach_others(gateway.url, [session.name for session in sessions[:20]])
        turns, feedback, ends = await _events(view)
    expected = {session.name: ids.session_key("acme", session.name) for session in sessions}
    values = {event.session_key: event.value for event in feedback}
    correct = sum(values.get(expected[session.name]) == number for number, session in enumerate(sessions))
    return [
        none_of("requests with a lookalike name that were refused", refused, 3 * COUNT),
        _all("sessions of the calls", len({turn.session_key for turn in turns} & set(expected.values()))),
        _all("sessions that keep their name exactly", len({turn.session_id for turn in turns} & set(expected))),
        _all("sessions with their own feedback alone", correct if len(values) == COUNT else 0),
        _all("sessions that were ended", len({end.session_key for end in ends} & set(expected.values()))),
        none_of("requests of a bound key that reached another session", reached, 60),
    ]


def _all(name: str, count: int) -> Line:
    return Line(name, f"{count} of {COUNT}", f"{COUNT}", count == COUNT)


def _key(name: str, **fields: str) -> dict[str, object]:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return {"name": name, "sha256": digest, "tenant": "acme", "scopes": ["chat", "feedback"], **fields}


async def _send_all(url: str, sessions: list[hostile_json.NamedSession]) -> int:
    """Send all requests of the sessions. Return how many were refused."""
    refused = 0
    async with httpx2.AsyncClient(base_url=url, headers={"authorization": "Bearer open"}, timeout=60) as client:
        for number, session in enumerate(sessions):
            status, _ = await asyncio.to_thread(hostile_json.post, url, session, "/v1/chat/completions", _CHAT, "open")
            body = {"session_id": session.name, "value": number}
            judged = await client.post("/v1/feedback", json=body)
            ended = await client.post(f"/v1/sessions/{quote(session.name, safe='')}/end")
            refused += (status != 200) + (judged.status_code != 202) + (ended.status_code != 202)
    return refused


async def _reach_others(url: str, names: list[str]) -> int:
    """Send requests about other sessions with the bound key. Return how many were not refused with 403."""
    reached = 0
    async with httpx2.AsyncClient(base_url=url, headers={"authorization": "Bearer bound"}, timeout=60) as client:
        for name in names:
            answers = [
                await client.post("/v1/chat/completions", json=_CHAT, headers={b"x-session-id": name.encode()}),
                await client.post("/v1/feedback", json={"session_id": name, "value": -1}),
                await client.post(f"/v1/sessions/{quote(name, safe='')}/end"),
            ]
            reached += sum(answer.status_code != 403 for answer in answers)
    return reached


async def _events(view: BusView) -> tuple[list[Turn], list[Feedback], list[SessionEnd]]:
    """Wait until all events have arrived or the time is over, and return the events on the topics."""
    async with asyncio.timeout(_WAIT_S * 2):
        for _ in range(int(_WAIT_S)):
            turns, feedback, ends = await view.read(Turn), await view.read(Feedback), await view.read(SessionEnd)
            if min(len(turns), len(feedback), len(ends)) >= COUNT:
                break
            await asyncio.sleep(1)
    return turns, feedback, ends


@contextlib.asynccontextmanager
async def _beating(view: BusView, replica: FakeReplica) -> AsyncIterator[None]:
    async def beat() -> None:
        while True:
            await view.producer.send(replica.heartbeat())
            await asyncio.sleep(_BEAT_S)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
