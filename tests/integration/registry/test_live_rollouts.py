"""Tests of a rollout over a real bus: killed processes, and the time until gateways apply a decision."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from headrace_schemas import Choice, Message, Reward, Routing, Sampling, Turn, Usage
from headrace_schemas.events.routing import Arm, TrafficSplit
from headrace_schemas.rules.assignment import assign_unit
from headrace_schemas.values import ids
from headrace_schemas.values.base import utcnow
from tests.attack.stacks import beside
from tests.integration.conftest import circle
from tests.integration.registry.rig import RegistryRig
from tests.support.fake_replica import FakeReplica
from tests.support.gateway import routing
from tests.support.servers import BrokerProcess
from tests.support.service_process import GatewayProcess, wait_healthy

MODEL = "street"
ROLLOUT = {
    "KIND": '"canary"',
    "STAGES": '[{share = "1/4", units_min = 10}, {share = "1/2"}]',
    "EXPOSURE_MAX": "1/4",
    "GUARDRAILS": '[{metric = "reward", margin = 0.3, weight = 8}, {metric = "missing", margin = 0.3}]',
    "SUCCESSES": '[{metric = "reward", margin = 0.3}]',
    "UNEVEN": "0.5",
    "MATURITY_S": "0.5",
    "CLOSING_S": "1.0",
}


@pytest.fixture(scope="module")
def own_bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    broker = BrokerProcess(tmp_path_factory.mktemp("broker"))
    broker.start()
    yield broker.address
    broker.stop()


@pytest.mark.long
@pytest.mark.timeout(480)
@pytest.mark.parametrize("better", [False, True])
async def test_a_rollout_outlives_kill_9_at_any_moment(own_bus: str, tmp_path: Path, better: bool) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    model = f"{MODEL}-{better}".lower()
    rig = RegistryRig(own_bus, tmp_path)
    rig.set({f"HEADRACE_REGISTRY__ROLLOUT__{name}": value for name, value in ROLLOUT.items()})
    async with rig.open():
        process, _ = rig.registry()
        first = await rig.publish(model, 0)
        await rig.until(lambda: rig.champion(model) == first, "the first champion")
        second = await rig.publish(model, 1, {"t": 0.75 if better else 0.5})
        async with beside(_traffic(rig, model, {first: 0.5, second: 0.95 if better else 0.05}, dice)):
            for _ in range(4):
                await asyncio.sleep(dice.uniform(0.5, 2.5))
                process.kill()
                process.wait()
                process, _ = rig.registry()
            over = ("promoted",) if better else ("withdrawn",)
            await rig.until(
                lambda: set(over) & set(rig.decisions_about(second)), "the end of the rollout", timeout_s=300
            )
            champion = second if better else first
            await rig.until(lambda: rig.champion(model) == champion, "the champion on the bus")
            await rig.until(lambda: rig.routing.rows[model].split is None, "that nobody has the other one on the bus")
        steps = [decision.rollout.kind for decision in rig.decisions if decision.rollout and decision.version == second]
        assert steps[0] == "begin"
        assert steps[-1] == ("promote" if better else "roll_back")
        assert len(steps) == len(set(steps)), "each step once"
        final_routing = rig.routing.rows[model]
        assert final_routing.split is None
        if not better:
            assert second in final_routing.withdrawn
            child = await rig.publish(model, 2, {"t": 1.0}, parent=second)
            await rig.until(lambda: "withdrawn" in rig.decisions_about(child), "the child is barred")
    _each_unit_once(tmp_path / "data" / "db" / "registry.sqlite")


def _each_unit_once(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        read = database.execute("SELECT rollout_id, look, unit FROM rollout_readings").fetchall()
    assert read
    assert len(set(read)) == len(read)


async def _traffic(rig: RegistryRig, model: str, rewards: dict[str, float], dice: random.Random) -> None:
    """Send sessions as a gateway captures them, assigned by the current routing, each with a reward, until
    cancelled."""
    count = 0
    while True:
        routed = rig.routing.rows[model]
        for _ in range(4):
            count += 1
            key = ids.session_key("default", f"{model} {count}")
            assert routed.champion
            version, assignment = (routed.champion, None)
            if routed.split is not None:
                version, assignment = assign_unit(routed.split, routed.champion, key)
            turn = _turn(key, model, version).model_copy(update={"assignment": assignment})
            await rig.producer.send(turn)
            value = float(dice.random() < rewards[version])
            about = {"trajectory_id": f"t-{key}", "session_key": key, "source": "function:f", "value": value}
            await rig.producer.send(Reward.model_validate({"time": utcnow(), **about}))
        await asyncio.sleep(0.05)


def _turn(key: str, model: str, version: str) -> Turn:
    message = Message(role="assistant", content="hi")
    choice = Choice(index=0, token_ids=(2,), logprobs=(-0.5,), finish_reason="stop", message=message)
    return Turn(
        time=utcnow(),
        turn_id=ids.response_id(key),
        session_key=key,
        session_id=key,
        session_source="header",
        model=model,
        version=version,
        replica_id="replica-1",
        request_digest="0" * 64,
        messages=(Message(role="user", content="hello"),),
        sampling=Sampling(),
        prompt_token_ids=(1,),
        choices=(choice,),
        usage=Usage(prompt_tokens=1, completion_tokens=1),
        started_at=utcnow(),
    )


@pytest.mark.long
async def test_a_decision_reaches_every_gateway_within_a_second(own_bus: str, tmp_path: Path) -> None:
    """Measure the seconds from the decision's record to the first turn of the session with another version.

    The best of several measurements counts, because the machine may be busy.
    """
    async with circle(tmp_path, own_bus, FakeReplica()) as rig:
        old = f"{rig.model}@0123456789abcdef"
        new = f"{rig.model}@{'9' * 16}"
        rig.replicas[0].versions = (old, new)
        other = GatewayProcess(tmp_path / "other", own_bus)
        await asyncio.to_thread(other.start)
        took: list[float] = []
        try:
            await asyncio.to_thread(wait_healthy, other.url)
            async with httpx2.AsyncClient(timeout=10) as http:
                for attempt in range(3):
                    split = _half(new, f"salt {attempt}")
                    session = next(
                        f"{attempt}-{number}"
                        for number in range(100)
                        if assign_unit(split, old, ids.session_key("default", f"{attempt}-{number}"))[0] == new
                    )
                    revision = 10 + 2 * attempt
                    await _route(rig.bus.producer, routing(old, (old, new), revision, split=split))
                    for url in (rig.gateway.url, other.url):
                        await _until_served(http, url, new, "by name", new)  # else the session would have begun before
                        await _until_served(http, url, rig.model, session, new)
                    began = time.monotonic()
                    withdrawn = routing(old, (old,), revision + 1, withdrawn=(new,))
                    await _route(rig.bus.producer, withdrawn)
                    for url in (rig.gateway.url, other.url):
                        await _until_served(http, url, rig.model, session, old)
                    took.append(time.monotonic() - began)
        finally:
            other.stop()
        print(f"seconds until both gateways had moved the session: {json.dumps(took)}")
        assert min(took) < 1.0


def _half(version: str, salt: str) -> TrafficSplit:
    arm = Arm(rollout_id="rollout-1", version=version, slot=0, share="1/2")
    return TrafficSplit(unit="session", salt=salt, slots=1, arms=(arm,))


async def _route(producer: object, event: Routing) -> None:
    await producer.send(event)  # type: ignore[attr-defined]


async def _until_served(http: httpx2.AsyncClient, url: str, model: str, session: str, version: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    async with asyncio.timeout(20):
        while True:
            answer = await http.post(f"{url}/v1/chat/completions", json=body, headers={"X-Session-Id": session})
            if answer.json().get("model") == version:
                return
            await asyncio.sleep(0.01)
