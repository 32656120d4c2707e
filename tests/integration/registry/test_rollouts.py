"""Tests of rollouts over a real bus: killed processes, the time until gateways apply a decision, and a shadow."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headrace_schemas import Choice, Experience, Feedback, Message, Reward, Routing, Sampling, Trajectory, Turn, Usage
from headrace_schemas.events.routing import Arm, TrafficSplit
from headrace_schemas.rules.assignment import assign_unit
from headrace_schemas.values import ids
from headrace_schemas.values.base import utcnow
from tests.attack.stacks import beside
from tests.integration.conftest import RegistryRig, circle
from tests.support.fake_replica import Called, FakeReplica, Fault, Generation
from tests.support.gateway import routing
from tests.support.presence import draw_seed
from tests.support.service_process import BusView, GatewayProcess, ServiceProcess, bus_view, wait_healthy

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


@pytest.mark.long
@pytest.mark.timeout(480)
@pytest.mark.parametrize("better", [False, True])
async def test_a_rollout_outlives_kill_9_at_any_moment(module_bus: str, tmp_path: Path, better: bool) -> None:
    dice = random.Random(draw_seed())
    model = f"{MODEL}-{better}".lower()
    rig = RegistryRig(module_bus, tmp_path)
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
async def test_a_decision_reaches_every_gateway_within_a_second(module_bus: str, tmp_path: Path) -> None:
    """Measure the seconds from the decision's record to the first turn of the session with another version.

    The best of several measurements counts, because the machine may be busy.
    """
    async with circle(tmp_path, module_bus, FakeReplica()) as rig:
        old = f"{rig.model}@0123456789abcdef"
        new = f"{rig.model}@{'9' * 16}"
        rig.replicas[0].versions = (old, new)
        other = GatewayProcess(tmp_path / "other", module_bus)
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


SHADOWED = "shady"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("search", "pay")]
PROGRAM = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    open(sys.argv[1], "a").write(asked["name"] + "\\n")
    print(json.dumps({"id": asked["id"], "result": "found"}), flush=True)
"""
UNITS = 8


class Every(tuple[str, ...]):
    """Matches any prompt."""

    def __contains__(self, name: object) -> bool:
        return True


class Clerk(FakeReplica):
    """Model that looks something up and answers. On a request to write, only the candidate calls the paying tool."""

    candidate = ""

    def _work(self, body: dict[str, Any], fault: Fault) -> Generation:
        prompt = next(message["content"] for message in body["messages"] if message["role"] == "user")
        if body["messages"][-1]["role"] == "tool":
            answer: str | Called = "done "
        elif body["model"] == self.candidate and "write" in prompt:
            answer = Called("pay", {"sum": 1000})
        else:
            answer = Called("search", {"q": prompt})
        return Generation(body, body["model"], (), answer)


@contextlib.asynccontextmanager
async def stack(empty_bus: str, folder: Path, read_only: list[str]) -> AsyncIterator[tuple[RegistryRig, str, BusView]]:
    """Start the stack without an agent, and publish a second version, which enters the shadow."""
    replica = Clerk(versions=Every(), capacity=8)
    rig = RegistryRig(empty_bus, folder)
    gateway = GatewayProcess(folder / "data", empty_bus)
    (folder / "tools.py").write_text(PROGRAM)
    (folder / "rewards.py").write_text("def right(trajectory):\n    return float('done' in trajectory.final_answer)\n")
    shadow = {
        "tenants": [{"tenant": "default"}],
        "read_only_tools": read_only,
        "tools_command": ["{python}", str(folder / "tools.py"), str(folder / "called")],
        "prompts_per_minute": 600,
    }
    rollout = {
        "KIND": '"canary"',
        "GUARDRAILS": '[{metric = "reward", margin = 0.3, weight = 8}, {metric = "missing", margin = 0.3}]',
        "SUCCESSES": '[{metric = "reward", margin = 0.3}]',
        "MATURITY_S": "2.0",
        "CLOSING_S": "2.0",
        "SHADOW_UNITS": str(UNITS),
        "SHADOW": json.dumps(shadow).replace('": ', '" = '),
    }
    rig.set({f"HEADRACE_REGISTRY__ROLLOUT__{name}": value for name, value in rollout.items()})
    rig.set({"HEADRACE_REGISTRY__GATE__BASE_URL": json.dumps(f"{gateway.url}/v1")})
    scorer = {"SCORER__FUNCTIONS": [f"{folder / 'rewards.py'}:right"], "SCORER__EXPECTED": ["function:right"]}
    services = [
        ServiceProcess("collector", folder / "data", empty_bus),
        ServiceProcess("scorer", folder / "data", empty_bus, **scorer),
    ]
    async with contextlib.AsyncExitStack() as exits:
        await exits.enter_async_context(replica.running())
        rig.replica_url, rig.capacity = replica.url, 8
        await exits.enter_async_context(rig.open())
        view = await exits.enter_async_context(bus_view(empty_bus, folder / "data"))
        for service in services:
            exits.callback(service.stop)
            await asyncio.to_thread(service.start)
        exits.callback(gateway.stop)
        await asyncio.to_thread(gateway.start)
        rig.registry()
        first = await rig.publish(SHADOWED, 0)
        await rig.until(lambda: rig.champion(SHADOWED) == first, "the first champion")
        await asyncio.to_thread(wait_healthy, gateway.url)
        replica.candidate = await rig.publish(SHADOWED, 1, {"t": 0.75})
        await rig.until(lambda: "canary" in rig.routing.rows[SHADOWED].aliases, "the shadow")
        assert rig.routing.rows[SHADOWED].split is None
        yield rig, gateway.url, view


async def agent(url: str, number: int) -> tuple[str, list[str]]:
    """Run one session, which follows the model and may write. Return its id and the versions that answered."""
    session = f"user-{number}"
    headers = {"X-Session-Id": session, "X-Task-Id": f"task-{number % 3}"}
    text = f"please {'write' if number % 2 else 'read'} {number}"
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    versions = []
    async with httpx2.AsyncClient(timeout=30) as http:
        for _ in range(4):
            body = {"model": SHADOWED, "messages": messages, "tools": TOOLS}
            answer = (await http.post(f"{url}/v1/chat/completions", json=body, headers=headers)).json()
            versions.append(answer["model"])
            message = answer["choices"][0]["message"]
            messages.append({name: value for name, value in message.items() if value is not None})
            if not message.get("tool_calls"):
                break
            calls = message["tool_calls"]
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "a row"} for call in calls]
        await http.post(f"{url}/v1/sessions/{session}/end")
    return session, versions


async def play(rig: RegistryRig, url: str) -> dict[str, list[str]]:
    """Run users' sessions until the shadow has ended. Return the versions that answered, by session."""
    users: dict[str, list[str]] = {}
    numbers = itertools.count()

    def over() -> bool:
        return any(decision.rollout and decision.rollout.kind == "advance" for decision in rig.decisions)

    async with asyncio.timeout(180):
        while not over():
            if len(users) < 3 * UNITS:
                session, versions = await agent(url, next(numbers))
                users[session] = versions
            await asyncio.sleep(0.2)
    return users


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("planted", [False, True], ids=["sound", "planted: pay is marked read-only"])
async def test_a_shadow_is_never_trained_never_seen_and_writes_nothing(
    empty_bus: str, tmp_path: Path, planted: bool
) -> None:
    async with stack(empty_bus, tmp_path, ["search", "pay"] if planted else ["search"]) as (rig, url, view):
        users = await play(rig, url)
        champion = rig.champion(SHADOWED)
        turns = [turn for turn in await view.read(Turn) if turn.model == SHADOWED]
        shadows = {turn.session_key: turn for turn in turns if turn.shadow_of}
        await _events_about(view, {turn.session_key for turn in turns})
        called = (tmp_path / "called").read_text().split()

        # Never seen.
        before = [turn for turn in turns if turn.purpose == "train" and turn.assignment is None]
        assert {turn.version for turn in before} == {champion}
        assert {version for versions in users.values() for version in versions} >= {champion}
        assert {turn.shadow_of for turn in shadows.values()} <= {ids.session_key("default", item) for item in users}
        assert {turn.version for turn in shadows.values()} == {champion, *{item.version for item in shadows.values()}}
        assert len({turn.version for turn in shadows.values()}) == 2
        assert {turn.purpose for turn in shadows.values()} == {"eval"}

        # Never trained, although rewarded, and although somebody likes it.
        rewarded = {item.session_key for item in await view.read(Reward)}
        assert rewarded & set(shadows), "its answers are judged"
        liked = next(iter(shadows.values()))
        about = {"feedback_id": "f", "session_key": liked.session_key, "value": 1.0, "msg_ids": (liked.turn_id,)}
        await rig.producer.send(Feedback.model_validate({"time": utcnow(), **about}))
        trained = {item.session_key for item in await view.read(Experience)}
        assert trained & {ids.session_key("default", item) for item in users}, "users' sessions are"
        assert not trained & set(shadows)
        closed = [item for item in await view.read(Trajectory) if item.session_key in shadows]
        assert closed
        assert all(item.shadow_of and item.purpose == "eval" for item in closed)

        # Writes nothing; where somebody marks a tool that writes, this test would say so.
        assert "search" in called
        assert ("pay" in called) == planted
        step = next(item for item in rig.decisions if item.rollout and item.rollout.kind == "advance")
        assert step.statistics["shadow.prompts"] >= UNITS
        print(step.reason, step.statistics)


async def _events_about(view: BusView, sessions: set[str]) -> None:
    """Wait until every closed session has its reward. Training sessions have experiences by then, or soon after."""
    async with asyncio.timeout(60):
        while True:
            closed = {event.session_key for event in await view.read(Trajectory) if event.session_key in sessions}
            rewarded = {event.session_key for event in await view.read(Reward)}
            trained = {event.session_key for event in await view.read(Experience)}
            trained_sessions = {event.session_key for event in await view.read(Trajectory) if event.purpose == "train"}
            if closed and closed <= rewarded and trained_sessions & closed <= trained:
                return
            await asyncio.sleep(0.5)
