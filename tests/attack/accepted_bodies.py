"""The largest bodies that each route accepts, sent to services that work: how long their event loops are blocked."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from headrace_schemas.values.arrays import MAX_LENGTH
from tests.attack import worst_bodies
from tests.attack.serving import beside, block_s
from tests.attack.small_stack import SmallStack, small_stack
from tests.support.fake_replica import LENGTH, VERSION, FakeReplica
from tests.support.gateway import routing
from tests.support.processes import wait_until
from tests.system.line import Line, at_most

_LIMIT_S = 0.1
_ATTEMPTS = 3
"""A body that blocks a loop does so every time. A busy machine delays a loop now and then, so a body is sent again."""
_SERVICES = ("gateway", "collector", "scorer")
_REWARDS = "def read(trajectory, feedback, context):\n    return 1.0\n"
_MODEL = "tiny"
_START_S = 300.0


@dataclass
class _Blocks:
    """The longest block of each service and kind, with the body that caused it."""

    urls: dict[str, str]
    longest: dict[tuple[str, str], tuple[float, str]] = field(default_factory=dict)

    def read(self) -> dict[tuple[str, str], float]:
        """Return the loop blocks that the services report for the last seconds."""
        kinds = ("busy", "late")
        return {(name, kind): blocked for kind in kinds for name, blocked in block_s(self.urls, kind).items()}

    def note(self, name: str, blocks: dict[tuple[str, str], float]) -> None:
        for loop, blocked in blocks.items():
            self.longest[loop] = max(self.longest.get(loop, (0.0, "")), (blocked, name))

    def lines(self) -> list[Line]:
        kinds = {"busy": "computed", "late": "stood still"}
        return [
            at_most(
                f"{service}, accepted bodies: longest that its loop {kinds[kind]} ({name})",
                round(1000 * blocked, 1),
                1000 * _LIMIT_S,
                " ms",
            )
            for (service, kind), (blocked, name) in sorted(self.longest.items())
        ]


async def accepted_bodies(folder: Path, rng: random.Random) -> list[Line]:
    """Send each body alone, and again where a loop was blocked for longer than the limit."""
    rewards = folder / "rewards.py"
    await asyncio.to_thread(folder.mkdir, parents=True)
    await asyncio.to_thread(rewards.write_text, _REWARDS)
    async with small_stack(folder) as stack, _replica().running() as replica, httpx.AsyncClient(timeout=120) as http:
        settings = {"SCORER__FUNCTIONS": [f"{rewards}:read"], "COLLECTOR__IDLE_S": 2}
        services = {
            name: stack.service(name, **{k: v for k, v in settings.items() if k.startswith(name.upper())})
            for name in _SERVICES
        }
        for service in services.values():
            service.start(ready=False)
        await stack.send(routing(replica.versions[0]))
        async with beside(_beat(stack, replica)):
            for name, service in services.items():
                await asyncio.to_thread(wait_until, service.healthy, _START_S, f"{name} is ready")
            turns = await _turns(http, services["gateway"].url)
            blocks = _Blocks({name: service.url for name, service in services.items()})
            order = _bodies(turns)
            rng.shuffle(order)
            refused = [text for path, name, body in order if (text := await _send(http, blocks, path, name, body))]
    summary = "; ".join(refused[:3]) or f"0 of {len(order)}"
    return [*blocks.lines(), Line("largest bodies that were not accepted", summary, "0", not refused)]


def _bodies(turns: list[str]) -> list[tuple[str, str, bytes]]:
    """Path, name and content of each body."""
    routes = {
        "/v1/chat/completions": worst_bodies.chat_bodies(_MODEL),
        "/v1/responses": worst_bodies.responses_bodies(_MODEL),
        "/v1/feedback": worst_bodies.feedback_bodies(turns),
        "/feedback": worst_bodies.trinity_bodies(turns),
        "/commit": worst_bodies.commit_bodies(),
        "/v1/trajectories": worst_bodies.trajectory_bodies(_MODEL, VERSION),
    }
    return [(path, name, body) for path, bodies in routes.items() for name, body in bodies.items()]


async def _send(http: httpx.AsyncClient, blocks: _Blocks, path: str, name: str, body: bytes) -> str | None:
    """Send a body until it has blocked no loop. Return the gateway's answer if the body was not accepted."""
    label = f"{path}: {name}"
    lowest: dict[tuple[str, str], float] = {}
    for attempt in range(_ATTEMPTS):
        before = await asyncio.to_thread(blocks.read)
        content = body.replace(b'"worst"', f'"worst-{name}-{attempt}"'.encode())
        answer = await http.post(f"{blocks.urls['gateway']}{path}", content=content, headers=_JSON)
        if answer.status_code not in (200, 202):
            return f"{label}: {answer.status_code} {answer.text[:200]}"
        await asyncio.sleep(1.5)  # the services behind the gateway read it within that time
        after = await asyncio.to_thread(blocks.read)
        longer = {loop: blocked for loop, blocked in after.items() if blocked > before[loop]}
        lowest = {loop: min(blocked, lowest.get(loop, blocked)) for loop, blocked in longer.items()}
        if max(longer.values(), default=0.0) <= _LIMIT_S:
            break
        await asyncio.to_thread(wait_until, lambda: max(blocks.read().values()) < _LIMIT_S, 120, "loops run freely")
    blocks.note(label, lowest)
    return None


_JSON = {"content-type": "application/json"}


def _replica() -> FakeReplica:
    """Start a replica whose prompts are as long as a turn allows."""
    return FakeReplica(prompt_tokens_max=MAX_LENGTH - LENGTH)


async def _turns(http: httpx.AsyncClient, url: str) -> list[str]:
    """Call the model in one session and return the ids of the responses."""
    body = {"model": _MODEL, "messages": [{"role": "user", "content": "hi"}]}
    turns = []
    for _ in range(3):
        answer = await http.post(f"{url}/v1/chat/completions", json=body, headers={"x-session-id": "worst"})
        answer.raise_for_status()
        turns.append(str(answer.json()["id"]))
    return turns


async def _beat(stack: SmallStack, replica: FakeReplica) -> None:
    while True:
        with contextlib.suppress(Exception):
            await stack.send(replica.heartbeat())
        await asyncio.sleep(1)
