"""Queries have one right call, which finds exactly the mails that they are about; no two splits share a question."""

from __future__ import annotations

import itertools
import json
import random
from typing import get_args

import pytest

from email_agent import mailbox
from email_search.demonstrations import CONFUSED, FEW, INVENTED, MANY, NONE, Habits, demonstrate
from email_search.queries import RELEVANT, SPLITS, Kind, Query, queries, stream
from email_search.rewards import recall, score_calls
from email_search.tools import TOOLS, Searchtools, mails_in
from email_search.warm_up import HABITS, Schedule, conversations
from example_parts.tools import ERROR

BOX = mailbox.generate(3)
TOOLS_OF_BOX = Searchtools(BOX.open())
ALL = [query for split in SPLITS for query in queries(BOX, split)]
"""Thousands of queries, from all splits."""


def played(query: Query, habits: Habits, seed: int = 0) -> list[dict[str, object]]:
    """Return the demonstrated conversation, followed by the answer of the tool."""
    messages = demonstrate(query, random.Random(seed), habits)
    function = messages[-1]["tool_calls"][0]["function"]
    answer = TOOLS_OF_BOX.call(function["name"], function["arguments"])
    return [*messages, {"role": "tool", "tool_call_id": "call_1", "content": answer}]


def test_the_right_call_finds_the_newest_six_and_no_others() -> None:
    newest = {mail.number: mail for thread in BOX.threads for mail in thread.mails}
    for query in ALL:
        mail_numbers = mails_in(TOOLS_OF_BOX.call(query.tool, json.dumps(query.arguments)))
        assert mail_numbers == query.relevant
        assert len(mail_numbers) == RELEVANT
        assert mail_numbers <= newest.keys()


def test_splits_share_no_question_and_each_has_enough_of_every_kind() -> None:
    by_split = {split: {query.question for query in queries(BOX, split)} for split in SPLITS}
    for questions, other_questions in itertools.combinations(by_split.values(), 2):
        assert not questions & other_questions
    for split in SPLITS:
        kinds = [query.kind for query in queries(BOX, split)]
        assert min(map(kinds.count, get_args(Kind))) >= 40, "200 measured queries ask none twice"


def test_a_stream_has_the_kinds_in_turn_and_repeats_nothing_until_all_were_asked() -> None:
    first_queries = list(itertools.islice(stream(BOX, "audit", 1), 200))
    assert len({query.id for query in first_queries}) == 200
    assert all(len({query.kind for query in first_queries[at : at + 5]}) == 5 for at in range(0, 200, 5))
    assert first_queries == list(itertools.islice(stream(BOX, "audit", 1), 200))
    assert first_queries != list(itertools.islice(stream(BOX, "audit", 2), 200))


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("search_mail", '{"query": "budget", "limit": 6}', "no tool search_mail"),
        ("search_topic", '{"topic": "budget"}', "expected the argument topic and limit"),
        ("search_topic", '{"topic": "budget", "limit": 6, "order": "old"}', "expected the argument topic and limit"),
        ("search_topic", '{"topic": "budget", "limit": "6"}', "limit is a number from 1 to 20"),
        ("search_topic", '{"topic": "budget", "limit": true}', "limit is a number from 1 to 20"),
        ("search_topic", '{"topic": "budget", "limit": 21}', "limit is a number from 1 to 20"),
        ("search_topic", '{"topic": "harbor", "limit": 6}', "no such topic"),
        ("search_topic", '{"topic": "%", "limit": 6}', "no such topic"),
        ("search_meetings", '{"day": "Mon", "limit": 6}', "no such day"),
        ("search_files", '{"file": "", "limit": 6}', "no such file"),
        ("search_sender", '{"name": "Anna", "limit": 6}', "no such name"),
        ("search_folder", "[]", "expected the argument folder and limit"),
        ("search_folder", "{", "arguments are not JSON"),
    ],
)
def test_a_wrong_call_is_answered_with_what_is_wrong(name: str, arguments: str, why: str) -> None:
    assert TOOLS_OF_BOX.call(name, arguments) == f"{ERROR}{why}"


@pytest.mark.parametrize("habit", ["none", "invented", "confused", "insufficient", "excessive"])
def test_each_habit_is_what_it_says(habit: str) -> None:
    """Check tool, arguments, invalid calls and number of relevant mails in conversations with one habit."""
    habits = NONE if habit == "none" else Habits(**{habit: 1.0})
    for seed, query in enumerate(ALL[::97]):
        messages = played(query, habits, seed)
        score = score_calls(query, messages)
        wrong_tool = habit in ("invented", "confused")
        assert (score.tool, score.arguments) == (float(not wrong_tool), float(habit == "none"))
        assert score.invalid == float(habit == "invented")
        possible_recalls = {"none": [6], "excessive": [6], "insufficient": FEW}.get(habit, range(7))
        assert recall(query, messages) in possible_recalls


def test_what_is_confused_or_invented_is_never_the_right_tool() -> None:
    assert not INVENTED.keys() & TOOLS.keys()
    assert all({query.tool} & set(CONFUSED[query.kind]) == set() for query in ALL)
    assert MANY > RELEVANT > max(FEW)


def test_the_warm_up_shows_the_right_way_first_and_then_habits_as_often_as_it_says() -> None:
    schedule = Schedule(steps=100, batch=20, mailboxes=2)
    all_conversations = conversations(schedule, 1)
    assert len(all_conversations) == schedule.shown == 2000
    calls = [conversation[-1]["tool_calls"][0]["function"] for conversation in all_conversations]
    right = [json.loads(call["arguments"])["limit"] == RELEVANT and call["name"] in TOOLS for call in calls]
    assert all(right[: schedule.shown_right])
    invented = [call["name"] in INVENTED for call in calls[schedule.shown_right :]]
    assert abs(sum(invented) / len(invented) - HABITS.invented) < 0.04
    assert conversations(schedule, 1) == all_conversations != conversations(schedule, 2)
