"""What simulated users say: each signal says what it may, and never what another one would give away."""

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
    found = recipe.read(ROOT / "examples" / "email_agent")
    assert set(found.signals) == set(SIGNALS)
    for name in SIGNALS:
        chosen = found.with_signal(name)
        assert name == "rewards" or chosen.agent[-2:] == ("--signal", name)
    with pytest.raises(UsageError, match=r"has no \[signals.smiles\]; it has rewards, thumbs"):
        found.with_signal("smiles")


async def _said(model: Any, signal: str, tasks: int = 40) -> list[dict[str, Any]]:
    headrace = Headrace(model)
    await agent.Users(headrace.client(), options(tasks=tasks, signal=signal)).ask()
    return headrace.feedback


async def test_few_users_have_thumbs_and_nobody_says_what_was_right(box: Mailbox, tools: Mailtools) -> None:
    said = await _said(Clerk(box, tools), "thumbs", 200)
    thumbs = [one for one in said if "value" in one]
    assert 8 <= len(thumbs) <= 36
    assert 0.5 < sum(one["value"] for one in thumbs) / len(thumbs) < 1
    assert all("context" not in one and one["ends_session"] for one in said)


async def test_poisoners_are_few_people_who_say_the_contrary(box: Mailbox, tools: Mailtools) -> None:
    headrace, draw = Headrace(Clerk(box, tools)), random.Random(0)
    task = next(stream(box, "train", 1))
    for _ in range(300):
        played = AnsweredQuestion(headrace.client(), "m", tools, task, Episode(task.expected, ["a"]), True, draw)
        await thumbs(played, share=1.0, poisoners=0.1)
    poisoned = [one for one in headrace.feedback if one["rater"].startswith("poisoner")]
    assert 15 <= len(poisoned) <= 50
    assert len({one["rater"] for one in poisoned}) == POISONERS
    assert not any(one["value"] for one in poisoned)


async def test_an_edit_is_the_right_step_in_place_of_the_first_wrong_one(box: Mailbox, tools: Mailtools) -> None:
    assert not [one for one in await _said(Clerk(box, tools), "edits") if "edit" in one], "nothing was wrong"
    edits = [one for one in await _said(clueless(), "edits", 6) if "edit" in one]
    assert len(edits) == 6
    assert all(one["edit"]["tool_calls"] and one["level"] == "response" for one in edits)


def test_a_wrong_end_is_corrected_at_the_end(box: Mailbox, tools: Mailtools) -> None:
    task = next(stream(box, "train", 1))
    right = demonstrate(task, tools, random.Random(0), lapses=0.0)
    episode = Episode(answer="unknown", response_ids=["a", "b", "c"], messages=right[:-1])
    assert _correction(episode, right) == ("c", right[-1])
    assert _correction(Episode(answer=task.expected, response_ids=["a", "b", "c"], messages=right[:-1]), right) is None


def test_a_direction_is_the_first_call_that_is_missing(box: Mailbox, tools: Mailtools) -> None:
    task = next(one for one in stream(box, "train", 1) if one.kind == "attachment")
    right = demonstrate(task, tools, random.Random(0), lapses=0.0)
    for known, place in ((2, 2), (4, 4), (6, 4)):
        text, rest = direction(task, tools, right[:known], random.Random(0))
        call = right[place]["tool_calls"][0]["function"]
        assert text == f"No, that is wrong. Call {call['name']} with {only_argument(call)}."
        assert rest == right[place:]


def only_argument(call: dict[str, str]) -> str:
    (argument,) = json.loads(call["arguments"]).values()
    return str(argument)


def test_half_of_what_the_other_base_is_shown_is_directed_to_the_right_end() -> None:
    shown = conversations(Schedule(steps=20), 0)
    told = [one for one in shown if sum(message["role"] == "user" for message in one) == 2]
    assert 0.35 < len(told) / len(shown) < 0.65
    assert all(one[-1]["content"] != "unknown" for one in told)


async def test_a_correction_is_the_next_message() -> None:
    headrace = Headrace(clueless())
    await agent.Users(headrace.client(), options(tasks=3, signal="corrections")).ask()
    assert len(headrace.spoken) == 6, "each answer is followed by one more"
    assert all("value" not in one and len(one["msg_ids"]) == 2 for one in headrace.feedback)
