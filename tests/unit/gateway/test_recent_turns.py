"""Answers to feedback report that it causes no training, by the algorithm and by the sampling of each turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_gateway import recent_turns
from headrace_schemas import Feedback, Trajectory
from headrace_schemas.events.checkpoint import LearnedSignals
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
    ({"min_p": 0.1}, "truncated_sampling"),
    ({"presence_penalty": 0.5}, None),
    ({"frequency_penalty": -1, "logit_bias": {"5": 2}}, None),
    ({"frequency_penalty": -1, "top_p": 0.9}, "truncated_sampling"),
    ({"response_format": FORMAT}, "truncated_sampling (grammar)"),
    ({"tools": [TOOL], "tool_choice": "required"}, "truncated_sampling (grammar)"),
]
KINDS: dict[str, tuple[bool, bool, bool, bool]] = {
    "reinforce++": (True, False, False, True),
    "mix": (True, True, False, True),
    "on_policy_distill": (False, False, False, True),
    "sft": (False, True, False, False),
    "dpo": (False, True, True, False),
    "kto": (True, True, True, False),
    "rft": (True, False, False, False),
}
"""Whether each algorithm trains rewards, edits and preferences, and needs logprobs."""


def signals(algorithm: str) -> LearnedSignals:
    names = "rewards", "edits", "preferences", "logprobs"
    return LearnedSignals.model_validate({"algorithm": algorithm, **dict(zip(names, KINDS[algorithm], strict=True))})


def replica() -> FakeReplica:
    return FakeReplica(grammars=("response_format", "tool_choice"))


async def chat_id(served: Gateway, **fields: Any) -> str:
    answer = await served.chat(str(fields), **fields)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def feedback(served: Gateway, **fields: Any) -> dict[str, Any]:
    await until(lambda: served.publisher.connected)
    answer = await served.client.post("/v1/feedback", json=fields)
    assert answer.status_code == 202, answer.text
    body: dict[str, Any] = answer.json()
    return {name: body[name] for name in ("teaches", "reason") if name in body}


def expected_fields(reason: str | None) -> dict[str, Any]:
    return {"teaches": True} if reason is None else {"teaches": False, "reason": reason}


@pytest.mark.parametrize(("fields", "reason"), ASKED, ids=lambda value: str(value)[:40])
async def test_feedback_on_a_turn_without_logprobs_reports_that_it_trains_no_policy_gradient(
    tmp_path: Path, fields: dict[str, Any], reason: str | None
) -> None:
    fake = replica()
    async with fake.running(), gateway(tmp_path, fake, learns=signals("mix")) as served:
        name = await chat_id(served, **fields)
        assert await feedback(served, response_id=name, value=1) == expected_fields(reason)
        assert await feedback(served, response_id=name, edit="better") == expected_fields(None), (
            "an edit needs no logprobs"
        )
        assert await feedback(served, response_id=name, comment="only a fact") == {}
        other = await chat_id(served)
        assert await feedback(served, msg_ids=[name, other], value=0) == expected_fields(None)
        trinity = await served.client.post("/feedback", json={"msg_ids": [name], "reward": 1})
        assert trinity.json() == {"status": "success", **(expected_fields(reason) if reason else {})}
        turns = served.turns
    async with collector("sqlite", tmp_path / "collector") as stream:
        await stream.deliver(turns[0])
        await pass_time(stream, 3000)
        (trajectory,) = stream.sent(Trajectory)
    assert [span.no_logprobs for branch in trajectory.branches for span in branch.spans] == [reason], "the same rule"


@pytest.mark.parametrize("algorithm", KINDS)
async def test_the_answer_is_that_of_the_algorithm(tmp_path: Path, algorithm: str) -> None:
    fake, learns = replica(), signals(algorithm)
    async with fake.running(), gateway(tmp_path, fake, learns=learns) as served:
        free, greedy = await chat_id(served), await chat_id(served, temperature=0)
        lacking = "truncated_sampling" if learns.logprobs else None
        rewards, edits, preferences = (None if kind else "no_signal" for kind in KINDS[algorithm][:3])
        assert await feedback(served, response_id=free, value=1) == expected_fields(rewards)
        assert await feedback(served, response_id=greedy, value=1) == expected_fields(rewards or lacking)
        assert await feedback(served, response_id=greedy, edit="better") == expected_fields(edits)
        pair = {"preference": {"chosen": free, "rejected": greedy}}
        assert await feedback(served, **pair) == expected_fields(preferences or lacking)
        evaluated = await chat_id(served, metadata={"purpose": "eval"})
        assert await feedback(served, response_id=evaluated, edit="better") == expected_fields("eval")


async def test_a_value_may_train_the_other_turns_of_its_run(tmp_path: Path) -> None:
    fake = replica()
    async with fake.running(), gateway(tmp_path, fake, learns=signals("reinforce++")) as served:
        session = {"metadata": {"session_id": "one"}}
        greedy = await chat_id(served, temperature=0, **session)
        assert await feedback(served, response_id=greedy, value=1) == expected_fields("truncated_sampling")
        await chat_id(served, **session)
        assert await feedback(served, response_id=greedy, value=1) == {}, "their branch is not known here"


async def test_what_the_gateway_does_not_know_it_does_not_say(tmp_path: Path) -> None:
    fake = replica()
    unknown = ids.response_id(ids.session_key("default", "s"))
    async with fake.running(), gateway(tmp_path, fake, learns=signals("kto")) as served:
        evaluated, trained = await chat_id(served, metadata={"purpose": "eval"}), await chat_id(served)
        assert await feedback(served, response_id=unknown, value=1) == {}
        assert await feedback(served, session_id="s", value=1) == {}
        assert await feedback(served, level="task", task_id="t", value=1) == {}
        assert await feedback(served, msg_ids=[unknown, evaluated], value=1) == {}
        assert await feedback(served, msg_ids=[unknown, trained], value=1) == {"teaches": True}
        assert await feedback(served, preference={"chosen": unknown, "rejected": trained}) == {}
        assert await feedback(served, preference={"chosen": unknown, "rejected": evaluated}) == expected_fields("eval")
        assert await feedback(served, response_id=evaluated, withdrawn=True) == {}


async def test_without_an_announced_algorithm_only_untrained_turns_are_reported(tmp_path: Path) -> None:
    fake = replica()
    async with fake.running(), gateway(tmp_path, fake) as served:
        free, greedy = await chat_id(served), await chat_id(served, temperature=0)
        evaluated = await chat_id(served, metadata={"purpose": "eval"})
        answers = [await feedback(served, response_id=name, value=1) for name in (free, greedy, evaluated)]
        assert answers == [{}, {}, expected_fields("eval")]


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
    outcomes = [teaching(name) for name in names]
    assert [outcome is not None for outcome in outcomes] == [False, False, True, True, True]
    assert outcomes[-1] == recent_turns.Teaching(False, "undelivered")
    assert teaching(names[-1], "b") is None, "another tenant learns nothing about a response"
