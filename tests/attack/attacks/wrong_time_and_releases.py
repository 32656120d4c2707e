"""Wrong clocks, failing releases and withdrawn versions: state that must not be decided wrongly."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import httpx2

from headrace.topics import connected
from headrace_operations import dead_letters
from headrace_operations.dead_letters import Selection
from headrace_schemas import DeadLetter, Reward, Routing, Trajectory, Turn
from tests.attack.program import attack
from tests.attack.stacks import SmallStack, small_stack
from tests.integration.conftest import RegistryRig
from tests.support import machine
from tests.support.servers import BrokerProcess
from tests.support.service_process import BusView, GatewayProcess, ServiceProcess, bus_view
from tests.support.turns import ask, end, user
from tests.system.program import Line, at_most, none_of

_SESSIONS = 40
_AT_ONCE = 4
_SKEW_MAX_S = 5.0
_SETTLES_S = 90.0
_PLACES = ("gateway-1", "gateway-2", "collector", "scorer")
Words = dict[str, list[tuple[str, float]]]
"""Sent feedback by session, in order: the id of the turn that was acknowledged last, and the value."""


@attack("clocks that are wrong decide nothing")
async def last_word(folder: Path, rng: random.Random) -> list[Line]:
    """Set wrong clocks in two gateways, the collector and the scorer: the client's last value must count."""
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


ROUNDS = 12
LATER_S = 5.0
"""Seconds to wait for a promotion of a descendant, which must not happen; five were enough for the bug to show."""
MODEL = "rolled"


@attack("descendants of a withdrawn version never serve")
async def rollback_stays(folder: Path, rng: random.Random) -> list[Line]:
    """Roll back while a trainer continues from the withdrawn weights and the registry dies: it must be final."""
    broker = BrokerProcess(folder / "broker")
    broker.start()
    try:
        return await _play(RegistryRig(broker.address, folder), rng)
    finally:
        broker.stop()


async def _play(rig: RegistryRig, rng: random.Random) -> list[Line]:
    served: list[Routing] = []
    parents: dict[str, str | None] = {}
    barred: set[str] = set()

    def all_taken_back() -> bool:
        return all(_taken_back(rig, name) for name in barred)

    async with rig.open(), httpx2.AsyncClient(timeout=20) as http:
        watching = asyncio.create_task(_watch(rig, served))
        process, url = rig.registry()
        champion = await rig.publish(MODEL, 0)
        parents[champion] = None
        await rig.until(lambda: rig.champion(MODEL) == champion, "the first champion")
        for turn in range(ROUNDS):
            bad = await _promoted(rig, parents, champion)
            early = [await _publish(rig, parents, bad)] if rng.random() < 0.7 else []
            await asyncio.sleep(rng.random() * 0.5)
            answer = await http.post(f"{url}/v1/models/{MODEL}/rollback", json={"reason": "worse"})
            answer.raise_for_status()
            champion = answer.json()["champion"]
            if turn % 4 == 3:
                process.kill()
                process.wait()
                process, url = rig.registry()
            withdrawn = [
                version for version in (bad, *early) if version != champion
            ]  # `bad` serves if its child was promoted first
            barred |= {*withdrawn, *[await _publish(rig, parents, parent) for parent in withdrawn]}
            await rig.until(all_taken_back, "the children are withdrawn")
        await asyncio.sleep(LATER_S)
        watching.cancel()
    wrong = [version for version in served if set(version.aliases.values()) & _barred_then(version, parents)]
    return [
        none_of("routings that name a descendant of a withdrawn version", len(wrong), len(served)),
        none_of("barred versions that were promoted", sum(_after(rig, name) for name in barred), len(barred)),
    ]


async def _promoted(rig: RegistryRig, parents: dict[str, str | None], champion: str) -> str:
    version = await _publish(rig, parents, champion, score=1.0)
    await rig.until(lambda: rig.champion(MODEL) == version, f"{version} is champion")
    return version


async def _publish(rig: RegistryRig, parents: dict[str, str | None], parent: str, score: float = 1.0) -> str:
    version = await rig.publish(MODEL, len(parents), {"t": score}, parent)
    parents[version] = parent
    return version


def _descends(version: str, ancestor: str, parents: dict[str, str | None]) -> bool:
    name: str | None = version
    while name is not None and name != ancestor:
        name = parents.get(name)
    return name == ancestor


def _barred_then(routing: Routing, parents: dict[str, str | None]) -> set[str]:
    """Return the versions that `routing` withdraws, and their descendants."""
    return {name for name in parents if any(_descends(name, version, parents) for version in routing.withdrawn)}


def _taken_back(rig: RegistryRig, version: str) -> bool:
    return not {"rolled_back", "withdrawn"}.isdisjoint(rig.decisions_about(version))


def _after(rig: RegistryRig, version: str) -> bool:
    """Return whether the version was promoted after its rollback or withdrawal."""
    answer = rig.decisions_about(version)
    return "promoted" in answer[min(answer.index(word) for word in ("rolled_back", "withdrawn") if word in answer) :]


async def _watch(rig: RegistryRig, served: list[Routing]) -> None:
    while True:
        routing = rig.routing.rows.get(MODEL)
        if routing is not None and (not served or served[-1] != routing):
            served.append(routing)
        await asyncio.sleep(0.005)


TURNS = 300
RUN_MAX = 20
_BROKEN = """
import headrace_collector.handlers as handlers

async def fails(self, turn, handling):
    raise RuntimeError("a bug of this release")

handlers.Collector.on_turn = fails
"""


@attack("a release that fails on every record")
async def bad_deploy(folder: Path, rng: random.Random) -> list[Line]:
    """Release a handler that fails for every record: the consumer must pause before it empties its topic."""
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
