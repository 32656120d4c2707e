"""The role of a call in its session: side calls, sub-agents, and requests that come again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace_gateway.repeated_requests import RepeatedRequests
from headrace_schemas import SubAgent
from headrace_schemas.events.trajectory import NO_TOOLS
from tests.support.fake_replica import FakeReplica
from tests.support.gateway import gateway, until

CLAUDE = {"x-claude-code-session-id": "s"}
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("headers", "fields", "kind"),
    [
        ({}, {}, None),
        ({}, {"tools": TOOLS}, None),
        (CLAUDE, {"tools": TOOLS}, None),
        (CLAUDE, {}, NO_TOOLS),
        ({"session-id": "s"}, {}, NO_TOOLS),
        ({"x-session-id": "s"}, {}, None),
        ({**CLAUDE, "x-headrace-side-call": "no"}, {}, None),
        ({"x-headrace-side-call": "title"}, {"tools": TOOLS}, "title"),
        ({"x-openai-subagent": "memory_consolidation"}, {"tools": TOOLS}, "memory_consolidation"),
        ({"x-openai-subagent": "review", "session-id": "s"}, {"tools": TOOLS}, None),
        ({"x-openai-memgen-request": "true"}, {}, "memory"),
        ({}, {"text": "Please write a title for: hello"}, "title"),
    ],
)
async def test_turn_names_the_kind_of_a_side_call(
    tmp_path: Path, headers: dict[str, str], fields: dict[str, Any], kind: str | None
) -> None:
    replica = FakeReplica(grammars=("tool_choice",))
    async with replica.running(), gateway(tmp_path, replica, side_calls={"title": "write a title"}) as served:
        assert (await served.chat(headers=headers, **fields)).status_code == 200
        assert served.turns[0].side_call == kind


async def test_kind_of_a_side_call_is_a_name(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        served.route()
        answer = await served.chat(headers={"x-headrace-side-call": ""})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Headrace-Side-Call")


@pytest.mark.parametrize(
    ("headers", "sub_agent"),
    [
        ({**CLAUDE}, None),
        ({**CLAUDE, "x-claude-code-agent-id": "a1"}, SubAgent(agent="a1")),
        (
            {**CLAUDE, "x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"},
            SubAgent(agent="a2", parent="a1"),
        ),
        ({"session-id": "s", "thread-id": "s"}, None),
        ({"session-id": "s", "thread-id": "t", "x-codex-parent-thread-id": "s"}, SubAgent(agent="t")),
        ({"session-id": "s", "thread-id": "u", "x-codex-parent-thread-id": "t"}, SubAgent(agent="u", parent="t")),
        ({"x-headrace-agent-id": "a", "x-headrace-parent-agent-id": "p"}, SubAgent(agent="a", parent="p")),
        ({"x-headrace-agent-id": ""}, None),
    ],
)
async def test_turn_names_its_sub_agent(tmp_path: Path, headers: dict[str, str], sub_agent: SubAgent | None) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        assert (await served.chat(headers=headers)).status_code == 200
        assert served.turns[0].sub_agent == sub_agent


class StoppedClock:
    """A clock that a test advances."""

    now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s


async def test_request_repeats_one_that_was_lost_or_has_just_ended(tmp_path: Path) -> None:
    replica = FakeReplica(token_delay_s=0.05)
    async with replica.running(), gateway(tmp_path, replica) as served:
        for _ in range(2):
            await served.chat("equal", headers={"x-session-id": "s"})
        await served.chat("other", headers={"x-session-id": "s"})
        await served.chat("equal", headers={"x-session-id": "t"})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await served.chat("lost", headers={"x-session-id": "s"})
        await until(lambda: len(served.turns) == 5)
        await served.chat("lost", headers={"x-session-id": "s"})
        first, again, other, elsewhere, lost, retry = served.turns
    assert [turn.repeats for turn in (first, again, other, elsewhere, lost)] == [None, first.turn_id, None, None, None]
    assert (lost.delivered, retry.repeats) == (False, lost.turn_id)


async def test_requests_under_way_and_long_after_are_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StoppedClock()
    replica = FakeReplica()
    begin = RepeatedRequests.begin
    monkeypatch.setattr(RepeatedRequests, "begin", lambda repeated, call: begin(_with(repeated, clock), call))
    async with replica.running(), gateway(tmp_path, replica) as served:
        await asyncio.gather(*(served.chat("equal", headers={"x-session-id": "s"}) for _ in range(3)))
        clock.now_s += 11
        await served.chat("equal", headers={"x-session-id": "s"})
        assert [turn.repeats for turn in served.turns] == [None] * 4


def _with(repeated: RepeatedRequests, clock: Any) -> RepeatedRequests:
    repeated._clock = clock
    return repeated
