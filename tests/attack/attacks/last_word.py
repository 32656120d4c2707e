"""Wrong and jumping clocks in two gateways, the collector and the scorer: the client's last value must count."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx2

from headrace_schemas import Reward, Trajectory, Turn
from tests.support import machine
from tests.support.servers import BrokerProcess
from tests.support.service_process import BusView, GatewayProcess, ServiceProcess, bus_view
from tests.support.turns import ask, user
from tests.system.program import Line, none_of

TITLE = "clocks that are wrong decide nothing"
_SESSIONS = 40
_AT_ONCE = 4
_SKEW_MAX_S = 5.0
_SETTLES_S = 90.0
_PLACES = ("gateway-1", "gateway-2", "collector", "scorer")
Words = dict[str, list[tuple[str, float]]]
"""Sent feedback by session, in order: the id of the turn that was acknowledged last, and the value."""


async def attack(folder: Path, rng: random.Random) -> list[Line]:
    if reason := machine.missing_compiler():
        raise RuntimeError(reason)
    clocks = [folder / f"{name}.clock" for name in _PLACES]
    environs = [machine.clock_environ(folder, clock) for clock in clocks]
    for clock in clocks:
        _step(clock, rng)
    broker = BrokerProcess(folder / "bus")
    broker.start()
    gateways = [GatewayProcess(folder / f"g{n}", broker.address, environ) for n, environ in enumerate(environs[:2])]
    services: list[ServiceProcess] = [
        ServiceProcess(name, folder / "services", broker.address, environ)
        for name, environ in zip(_PLACES[2:], environs[2:], strict=True)
    ]
    try:
        async with bus_view(broker.address, folder / "services") as view:
            starts = [process.start for process in gateways] + [process.start for process in services]
            await asyncio.gather(*(asyncio.to_thread(start) for start in starts))
            words = await _talk([gateway.url for gateway in gateways], view, clocks, rng)
            return await _judged(view, words)
    finally:
        for stop in [process.stop for process in gateways] + [process.stop for process in services]:
            await asyncio.to_thread(stop)
        await asyncio.to_thread(broker.stop)


def _step(clock: Path, rng: random.Random) -> None:
    machine.step_clock(clock, rng.uniform(-_SKEW_MAX_S, _SKEW_MAX_S))


async def _talk(urls: list[str], view: BusView, clocks: list[Path], rng: random.Random) -> Words:
    words: Words = {}
    slots = asyncio.Semaphore(_AT_ONCE)
    async with httpx2.AsyncClient(timeout=60) as client:

        async def session(name: str, draw: random.Random) -> None:
            async with slots:
                words[name] = await _session(name, client, urls, view, clocks, draw)

        for url in urls:
            await _bus_is_there(client, url)
        async with asyncio.TaskGroup() as group:
            for number in range(_SESSIONS):
                group.create_task(session(f"s{number}", random.Random(rng.getrandbits(64))))
    return words


async def _bus_is_there(client: httpx2.AsyncClient, url: str) -> None:
    """Wait until the gateway is connected to the bus, so that it does not spool acknowledged events."""
    async with asyncio.timeout(60):
        while True:
            await client.post(f"{url}/v1/feedback", json={"session_id": "nobody", "value": 0})
            if 'topic="feedback",where="bus"' in (await client.get(f"{url}/metrics")).text.replace(", ", ","):
                return
            await asyncio.sleep(0.2)


async def _session(
    name: str, client: httpx2.AsyncClient, urls: list[str], view: BusView, clocks: list[Path], draw: random.Random
) -> list[tuple[str, float]]:
    """Play one or two runs with the session id `name`. Each gets several values through both gateways, before and after
    its end.

    Returns:
        The turn id and the value of each acknowledged feedback, in order.
    """
    values = []
    for run in range(draw.choice([1, 2])):
        created = datetime.now(UTC) + timedelta(seconds=draw.uniform(-_SKEW_MAX_S, _SKEW_MAX_S))
        turn = ask([user(f"{name} {run}")], session=name, time=created, started_at=created - timedelta(milliseconds=50))
        await view.producer.send(turn)
        ends_at = draw.randrange(4)
        for number in range(4):
            if number == ends_at:
                await _accepted(client.post(f"{draw.choice(urls)}/v1/sessions/{name}/end"))
                await _closed(view, turn)
            _step(draw.choice(clocks), draw)
            value = float(draw.randrange(1000))
            body = {"session_id": name, "value": value}
            await _accepted(client.post(f"{draw.choice(urls)}/v1/feedback", json=body))
            values.append((turn.turn_id, value))
    return values


async def _closed(view: BusView, turn: Turn) -> None:
    """Wait until the turn is in a trajectory, because an end that is read late would include later turns.

    Raises:
        TimeoutError: there is no such trajectory in time.
    """
    async with asyncio.timeout(_SETTLES_S):
        while not any(turn.turn_id in trajectory.turn_ids for trajectory in await view.read(Trajectory)):  # noqa: ASYNC110
            await asyncio.sleep(0.5)


async def _accepted(request: object) -> None:
    answer = await request  # type: ignore[misc]
    assert answer.status_code == 202, answer.text


async def _judged(view: BusView, words: Words) -> list[Line]:
    """Wait until every reward has the last value or the time is over, and return the result lines."""
    deadline = asyncio.get_running_loop().time() + _SETTLES_S
    while True:
        wrong, stray, of = await _compare(view, words)
        if not (wrong or stray) or asyncio.get_running_loop().time() > deadline:
            values_sent = sum(len(values) for values in words.values())
            return [
                none_of(f"wrong last words, of {values_sent} said in {len(words)} sessions", wrong, of),
                none_of("verdicts on the wrong run", stray, of),
            ]
        await asyncio.sleep(2)


async def _compare(view: BusView, words: Words) -> tuple[int, int, int]:
    """Return the number of trajectories with an outdated value, of those with another run's value, and of all."""
    home = {
        turn: trajectory.trajectory_id for trajectory in await view.read(Trajectory) for turn in trajectory.turn_ids
    }
    counted: dict[str, list[float]] = {}
    for sent in words.values():
        for turn, value in sent:
            counted.setdefault(home.get(turn, turn), []).append(value)
    last: dict[str, Reward] = {}
    for reward in await view.read(Reward):
        if reward.source == "feedback" and reward.revision >= last.get(reward.trajectory_id, reward).revision:
            last[reward.trajectory_id] = reward
    wrong = stray = 0
    for name, values in counted.items():
        last_value = last[name].value if name in last else None
        wrong += last_value != values[-1] and last_value in values
        stray += last_value not in values
    return wrong, stray, len(counted)
