"""A session of 500 calls with 100k tokens of context survives kill -9 of every service as one branch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from benchmarks import _sessions_replica
from benchmarks.sessions import Conversation, Stack, end_session, running, wait_for_experiences
from headrace_schemas import DeadLetter, Experience, Trajectory, Turn
from tests.support.gateway_process import wait_healthy

TURNS = 500
OPENING_BYTES = 60_000
MESSAGE_BYTES = 56
CONTEXT_TOKENS = 100_000


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_long_session_is_trained_whole_after_each_service_was_killed(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, aiohttp.ClientSession() as http:
        kills = {TURNS * (at + 1) // 6: kill for at, kill in enumerate(_kills(stack))}
        agent = Conversation(stack, http, "coding", OPENING_BYTES, MESSAGE_BYTES)
        for number in range(TURNS):
            if number in kills:
                await asyncio.to_thread(kills[number])
            await agent.call(attempts=60)
        await end_session(stack, http, "coding")
        await wait_for_experiences(stack, ["coding"])
        (trajectory,) = await stack.events(Trajectory.topic, ["coding"])
        (experience,) = await stack.events(Experience.topic, ["coding"])
        turns: list[Turn] = await stack.events(Turn.topic, ["coding"])
        letters = await stack.view.read(DeadLetter)
    assert letters == []
    (branch,) = trajectory.branches
    assert [span.turn_id for span in branch.spans] == agent.response_ids, "each answer once, in one branch"
    assert {len(span.logprobs) for span in branch.spans} == {_sessions_replica.ANSWER_TOKENS}
    prompt = _sessions_replica.prompt_of(agent.messages[:-1])
    assert list(branch.token_ids) == prompt + _sessions_replica.answer_of(prompt)
    assert len(branch.token_ids) > CONTEXT_TOKENS
    assert experience.branch == branch, "the trainer reads the same tokens"
    whole_turns = [turn for turn in turns if turn.extends is None]
    assert len(whole_turns) < TURNS / 20, (
        "whole are the first turn, the first one after the gateway's death, and key frames"
    )


def _kills(stack: Stack) -> list[Callable[[], None]]:
    """Return functions that kill a process and start it again on the same data."""

    def gateway() -> None:
        stack.gateway.kill()
        stack.gateway.start()
        wait_healthy(stack.gateway.url)

    def broker() -> None:
        stack.broker.kill()
        stack.broker.start()

    def service(name: str) -> Callable[[], None]:
        def restart() -> None:
            stack.services[name].kill()
            stack.services[name].start(ready=False)

        return restart

    return [service("collector"), gateway, broker, service("scorer")]
