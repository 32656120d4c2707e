"""Feedback of simulated users: each signal carries its own information, and never that of another signal."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from email_agent import agent
from email_agent.demonstrations import demonstrate
from email_agent.directions import Schedule, conversations, direction
from email_agent.mailbox import Mailbox
from email_agent.react import Episode
from email_agent.tasks import stream
from email_agent.tools import Mailtools
from email_agent.users import POISONERS, SIGNALS, AnsweredQuestion, _correction, thumbs
from headrace.errors import UsageError
from headrace_cli.demo import recipe
from tests.repo.compose_files import ROOT
from tests.support.headrace_in_memory import Headrace
from tests.unit.email_agent.clerk_server import Clerk, clueless
from tests.unit.email_agent.test_agent import options


def test_the_demo_has_a_recipe_for_each_of_them() -> None:
    demo_recipe = recipe.read(ROOT / "examples" / "email_agent")
    assert set(demo_recipe.signals) == set(SIGNALS)
    for name in SIGNALS:
        variant = demo_recipe.with_signal(name)
        assert name == "rewards" or variant.agent[-2:] == ("--signal", name)
    with pytest.raises(UsageError, match=r"has no \[signals.smiles\]; it has rewards, thumbs"):
        demo_recipe.with_signal("smiles")


async def _collect_feedback(model: Any, signal: str, tasks: int = 40) -> list[dict[str, Any]]:
    headrace = Headrace(model)
    await agent.Users(headrace.client(), options(tasks=tasks, signal=signal)).ask()
    return headrace.feedback


async def test_few_users_have_thumbs_and_nobody_says_what_was_right(box: Mailbox, tools: Mailtools) -> None:
    feedback = await _collect_feedback(Clerk(box, tools), "thumbs", 200)
    thumbs = [body for body in feedback if "value" in body]
    assert 8 <= len(thumbs) <= 36
    assert 0.5 < sum(body["value"] for body in thumbs) / len(thumbs) < 1
    assert all("context" not in body and body["ends_session"] for body in feedback)


async def test_poisoners_are_few_people_who_say_the_contrary(box: Mailbox, tools: Mailtools) -> None:
    headrace, draw = Headrace(Clerk(box, tools)), random.Random(0)
    task = next(stream(box, "train", 1))
    for _ in range(300):
        question = AnsweredQuestion(headrace.client(), "m", tools, task, Episode(task.expected, ["a"]), True, draw)
        await thumbs(question, share=1.0, poisoners=0.1)
    poisoner_feedback = [body for body in headrace.feedback if body["rater"].startswith("poisoner")]
    assert 15 <= len(poisoner_feedback) <= 50
    assert len({body["rater"] for body in poisoner_feedback}) == POISONERS
    assert not any(body["value"] for body in poisoner_feedback)


async def test_an_edit_is_the_right_step_in_place_of_the_first_wrong_one(box: Mailbox, tools: Mailtools) -> None:
    assert not [body for body in await _collect_feedback(Clerk(box, tools), "edits") if "edit" in body], (
        "nothing was wrong"
    )
    edits = [body for body in await _collect_feedback(clueless(), "edits", 6) if "edit" in body]
    assert len(edits) == 6
    assert all(body["edit"]["tool_calls"] and body["level"] == "response" for body in edits)


def test_a_wrong_end_is_corrected_at_the_end(box: Mailbox, tools: Mailtools) -> None:
    task = next(stream(box, "train", 1))
    right = demonstrate(task, tools, random.Random(0), lapses=0.0)
    episode = Episode(answer="unknown", response_ids=["a", "b", "c"], messages=right[:-1])
    assert _correction(episode, right) == ("c", right[-1])
    assert _correction(Episode(answer=task.expected, response_ids=["a", "b", "c"], messages=right[:-1]), right) is None


def test_a_direction_is_the_first_call_that_is_missing(box: Mailbox, tools: Mailtools) -> None:
    task = next(task for task in stream(box, "train", 1) if task.kind == "attachment")
    right = demonstrate(task, tools, random.Random(0), lapses=0.0)
    for message_count, next_call in ((2, 2), (4, 4), (6, 4)):
        text, rest = direction(task, tools, right[:message_count], random.Random(0))
        call = right[next_call]["tool_calls"][0]["function"]
        assert text == f"No, that is wrong. Call {call['name']} with {only_argument(call)}."
        assert rest == right[next_call:]


def only_argument(call: dict[str, str]) -> str:
    (argument,) = json.loads(call["arguments"]).values()
    return str(argument)


def test_half_of_what_the_other_base_is_shown_is_directed_to_the_right_end() -> None:
    warm_up_conversations = conversations(Schedule(steps=20), 0)
    directed_conversations = [
        messages for messages in warm_up_conversations if sum(message["role"] == "user" for message in messages) == 2
    ]
    assert 0.35 < len(directed_conversations) / len(warm_up_conversations) < 0.65
    assert all(messages[-1]["content"] != "unknown" for messages in directed_conversations)


async def test_a_correction_is_the_next_message() -> None:
    headrace = Headrace(clueless())
    await agent.Users(headrace.client(), options(tasks=3, signal="corrections")).ask()
    assert len(headrace.spoken) == 6, "each answer is followed by one more"
    assert all("value" not in body and len(body["msg_ids"]) == 2 for body in headrace.feedback)
