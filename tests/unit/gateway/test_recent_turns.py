"""The answer to feedback says when it teaches nothing, by the rule with which the collector leaves turns out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_gateway import recent_turns
from headrace_schemas import Feedback, Trajectory
from headrace_schemas.events.trajectory import untrained_reason
from headrace_schemas.values import ids
from tests.support.fake_replica import FakeReplica
from tests.support.gateway import Gateway, gateway, until
from tests.support.turns import ask, user
from tests.unit.collector.conftest import collector, pass_time

FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "look"}}
ASKED: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"temperature": 0.7}, None),
    ({"temperature": 0}, "truncated_sampling"),
    ({"temperature": 1e-39}, "truncated_sampling"),
    ({"top_p": 0.9}, "truncated_sampling"),
    ({"top_k": 5}, "truncated_sampling"),
    ({"presence_penalty": 0.5}, "truncated_sampling"),
    ({"frequency_penalty": -1}, "truncated_sampling"),
    ({"response_format": FORMAT}, "truncated_sampling (grammar)"),
    ({"tools": [TOOL], "tool_choice": "required"}, "truncated_sampling (grammar)"),
    ({"metadata": {"purpose": "eval"}}, "eval"),
]


def replica() -> FakeReplica:
    return FakeReplica(grammars=("response_format", "tool_choice"))


async def asked(served: Gateway, **fields: Any) -> str:
    answer = await served.chat(str(fields), **fields)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def feedback(served: Gateway, **fields: Any) -> dict[str, Any]:
    await until(lambda: served.publisher.connected)
    answer = await served.client.post("/v1/feedback", json=fields)
    assert answer.status_code == 202, answer.text
    body: dict[str, Any] = answer.json()
    return {name: body[name] for name in ("teaches", "reason") if name in body}


@pytest.mark.parametrize(("fields", "reason"), ASKED, ids=lambda value: str(value)[:40])
async def test_feedback_on_a_turn_that_is_left_out_is_told_so_and_all_other_is_not(
    tmp_path: Path, fields: dict[str, Any], reason: str | None
) -> None:
    expected = {"teaches": True} if reason is None else {"teaches": False, "reason": reason}
    fake = replica()
    async with fake.running(), gateway(tmp_path, fake) as served:
        name = await asked(served, **fields)
        assert await feedback(served, response_id=name, value=1) == expected
        assert await feedback(served, response_id=name, edit="better") == expected
        assert await feedback(served, response_id=name, comment="only a fact") == {}
        other = await asked(served)
        preference = {"preference": {"chosen": name, "rejected": other}}
        assert await feedback(served, **preference) == expected
        assert await feedback(served, msg_ids=[name, other], value=0) == {"teaches": True}
        trinity = await served.client.post("/feedback", json={"msg_ids": [name], "reward": 1})
        assert trinity.json() == {"status": "success", **(expected if reason else {})}
        turns = served.turns
    async with collector("sqlite", tmp_path / "collector") as stream:
        await stream.deliver(turns[0])
        await pass_time(stream, 3000)
        (trajectory,) = stream.sent(Trajectory)
    left_out = [item.full_reason for item in trajectory.left_out]
    assert (left_out or [trajectory.purpose]) == [reason if reason not in (None, "eval") else trajectory.purpose]
    assert untrained_reason(turns[0]) == reason


async def test_what_the_gateway_does_not_know_it_does_not_say(tmp_path: Path) -> None:
    fake = replica()
    unknown = ids.response_id(ids.session_key("default", "s"))
    async with fake.running(), gateway(tmp_path, fake) as served:
        left_out, trained = await asked(served, temperature=0), await asked(served)
        assert await feedback(served, response_id=unknown, value=1) == {}
        assert await feedback(served, session_id="s", value=1) == {}
        assert await feedback(served, level="task", task_id="t", value=1) == {}
        assert await feedback(served, msg_ids=[unknown, left_out], value=1) == {}
        assert await feedback(served, msg_ids=[unknown, trained], value=1) == {"teaches": True}
        assert await feedback(served, preference={"chosen": unknown, "rejected": trained}) == {}
        no = {"teaches": False, "reason": "truncated_sampling"}
        assert await feedback(served, preference={"chosen": unknown, "rejected": left_out}) == no
        assert await feedback(served, response_id=left_out, withdrawn=True) == {}


def test_only_the_last_responses_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_turns, "TURNS_MAX", 3)
    recent = recent_turns.RecentTurns()
    key = ids.session_key("a", "s")
    names = [ids.response_id(key) for _ in range(5)]

    def teaching(name: str, tenant: str = "a") -> recent_turns.Teaching | None:
        event = Feedback.model_validate(
            {"time": "2026-01-01T00:00:00Z", "feedback_id": "f", "session_key": key, "tenant": tenant, "value": 1.0,
             "msg_ids": (name,)}
        )  # fmt: skip
        return recent.teaching([event])

    for name in names:
        recent.note("a", name, ask([user("q")], delivered=False, turn_id=name))
    told = [teaching(name) for name in names]
    assert [one is not None for one in told] == [False, False, True, True, True]
    assert told[-1] == recent_turns.Teaching(False, "undelivered")
    assert teaching(names[-1], "b") is None, "another tenant learns nothing about a response"
