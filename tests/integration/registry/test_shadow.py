"""Test of a shadow on a small real stack.

The bus, gateway, registry, collector and scorer are processes, with an agent that uses tools and a replica that loads
routed versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headrace_schemas import Experience, Feedback, Reward, Trajectory, Turn
from headrace_schemas.values import ids
from headrace_schemas.values.base import utcnow
from tests.integration.registry.rig import RegistryRig
from tests.support.fake_replica import Called, FakeReplica, Fault, Generation
from tests.support.service_process import BusView, GatewayProcess, ServiceProcess, bus_view, wait_healthy

MODEL = "shady"
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
        first = await rig.publish(MODEL, 0)
        await rig.until(lambda: rig.champion(MODEL) == first, "the first champion")
        await asyncio.to_thread(wait_healthy, gateway.url)
        replica.candidate = await rig.publish(MODEL, 1, {"t": 0.75})
        await rig.until(lambda: "canary" in rig.routing.rows[MODEL].aliases, "the shadow")
        assert rig.routing.rows[MODEL].split is None
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
            body = {"model": MODEL, "messages": messages, "tools": TOOLS}
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
        champion = rig.champion(MODEL)
        turns = [turn for turn in await view.read(Turn) if turn.model == MODEL]
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
