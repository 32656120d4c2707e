"""Tests of the email search example: its queries, its rewards, its compared runs and its recipe.

Each query has one right tool call, which finds exactly the relevant mails, and no two splits share a question. The
agent runs against a gateway in memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
from openai import AsyncOpenAI

from email_agent import mailbox
from email_search import agent, evaluate, rewards
from email_search.agent import PAIRS, RUNS
from email_search.build_base import (
    CONFUSED,
    FEW,
    HABITS,
    INVENTED,
    MANY,
    NONE,
    Habits,
    Schedule,
    conversations,
    demonstrate,
)
from email_search.queries import RELEVANT, SPLITS, TOOLS, Kind, Query, Searchtools, mails_in, queries, stream
from email_search.rewards import WORTH, best_and_worst, parts, recall, score_calls
from example_parts.react import ERROR
from headrace_cli.demo import recipe
from headrace_registry.settings import GateSettings
from headrace_scorer.settings import ScorerSettings
from headrace_trainer.settings import TrainerSettings
from tests.support.fake_llm import Call, FakeLLM, Headrace, Reply

EXAMPLES = Path(__file__).parents[3] / "examples"


class Searcher:
    """Model that answers a query with the demonstrated tool call, with the faults that `habits` adds to it."""

    def __init__(self, queries: list[Query], habits: Habits = NONE) -> None:
        self._queries = {query.question: query for query in queries}
        self._habits = habits
        self._numbers = itertools.count()

    def __call__(self, call: Call) -> Reply:
        number = next(self._numbers)
        demonstration = demonstrate(
            self._queries[call.body["messages"][1]["content"]], random.Random(number), self._habits
        )
        choice = {"index": 0, "message": demonstration[-1], "finish_reason": "tool_calls"}
        return Reply({"id": f"chatcmpl-{number}", "object": "chat.completion", "choices": [choice]})


VERSION = "email-search@0123456789abcdef"
ALL = [query for split in SPLITS for query in queries(mailbox.generate(1), split)]


def options(**changes: object) -> argparse.Namespace:
    defaults = {"model": "m", "seed": 1, "tasks": 0, "concurrency": 4, "max_tokens": 64, "begun": 0, "until": 1}
    return argparse.Namespace(**{**defaults, **changes})


async def run_rounds(headrace: Headrace, **changes: object) -> agent.Users:
    users = agent.Users(headrace.client(), options(**changes))
    await users.ask()
    return users


async def test_a_round_makes_exactly_one_versions_pairs_and_ends_every_run() -> None:
    headrace = Headrace(Searcher(ALL, HABITS))
    headrace.pairs_per_version = PAIRS
    users = await run_rounds(headrace, begun=3, until=5)
    preferences = [body["preference"] for body in headrace.feedback if "preference" in body]
    assert len(preferences) == 2 * PAIRS, "runs in flight at a round's end add none to the next one"
    assert headrace.version == "m@2"
    ends = [body for body in headrace.feedback if body.get("ends_session")]
    assert sorted(name for body in ends for name in body["msg_ids"]) == sorted(headrace.spoken)
    assert len(headrace.spoken) % RUNS == 0
    assert not users.tally.failures


async def test_what_is_preferred_earned_more_and_is_said_before_the_runs_end() -> None:
    headrace = Headrace(Searcher(ALL, HABITS))
    await run_rounds(headrace)
    earned = {body["msg_ids"][0]: sum(body["parts"].values()) for body in headrace.feedback if "parts" in body}
    ended: set[str] = set()
    for body in headrace.feedback:
        if "parts" in body:
            assert body["parts"].keys() == WORTH.keys()
            ended.add(body["msg_ids"][0])
        else:
            better, worse = body["preference"]["chosen"], body["preference"]["rejected"]
            assert earned[better] > earned[worse]
            assert not {better, worse} & ended


async def test_runs_that_are_alike_are_not_compared_and_a_round_of_them_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "QUERIES_MAX", 20)
    monkeypatch.setattr(agent, "VERSION_S_MAX", 0.5)
    headrace = Headrace(Searcher(ALL, NONE))
    headrace.pairs_per_version = PAIRS
    users = await run_rounds(headrace)
    assert not [body for body in headrace.feedback if "preference" in body]
    assert 20 * RUNS <= len(headrace.spoken) <= 24 * RUNS
    assert users.tally.line().startswith(f"{len(headrace.spoken)} questions, 100% of the answers accepted")


async def test_each_run_is_a_session_of_its_own_and_other_servers_need_no_versions() -> None:
    with FakeLLM(Searcher(ALL, HABITS)) as llm:
        users = agent.Users(AsyncOpenAI(base_url=llm.base_url, api_key="none", max_retries=0), options())
        runs = [await users.play(ALL[0]) for _ in range(3)]
        assert await users._version() is None, "it has no page of models"
    sessions = [call.headers["x-session-id"] for call in llm.calls]
    assert len(set(sessions)) == len(runs) == 3


def evaluate_habits(
    habits: Habits, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, float]:
    with FakeLLM(Searcher(ALL, habits)) as llm:
        flags = f"--base-url {llm.base_url} --model {VERSION} --seed 1 --concurrency 4 --tasks 20".split()
        monkeypatch.setattr(sys, "argv", ["evaluate", *flags])
        evaluate.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len({line["task"] for line in lines}) == 20
    assert {call.headers["x-headrace-purpose"] for call in llm.calls} == {"eval"}
    return {name: sum(line[name] for line in lines) / 20 for name in ("tool", "score", "recall")}


def test_held_out_queries_are_scored_by_tool_arguments_and_recall(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate_habits(NONE, monkeypatch, capsys) == {"tool": 1.0, "score": 1.0, "recall": 6.0}
    assert evaluate_habits(Habits(excessive=1.0), monkeypatch, capsys) == {"tool": 1.0, "score": 0.0, "recall": 6.0}
    assert evaluate_habits(Habits(invented=1.0), monkeypatch, capsys) == {"tool": 0.0, "score": 0.0, "recall": 0.0}
    few = evaluate_habits(Habits(insufficient=1.0), monkeypatch, capsys)
    assert (few["tool"], few["score"]) == (1.0, 0.0)
    assert 2.0 < few["recall"] < 3.0


def test_the_services_take_the_settings_and_a_rounds_pairs_are_one_version() -> None:
    settings = tomllib.loads((EXAMPLES / "email_search" / "headrace.toml").read_text(encoding="utf-8"))
    gate, trainer = GateSettings(**settings["registry"]["gate"]), TrainerSettings(**settings["trainer"], base="b")
    assert gate.command[2] == "email_search.evaluate"
    assert trainer.algorithm == "dpo"
    assert trainer.model == recipe.read(EXAMPLES / "email_search").model
    assert trainer.batch_experiences * trainer.steps_per_version == 2 * PAIRS
    assert ScorerSettings(**settings["scorer"]).combine == "sum"


def test_the_recipe_promises_what_the_article_printed_and_each_command_is_a_program() -> None:
    search_recipe = recipe.read(EXAMPLES / "email_search")
    assert search_recipe.rows is not None
    assert (search_recipe.rows.at, search_recipe.rows.unit) == ((0, 5, 10), "rounds")
    promised = {name: (measure.before_max, measure.after_min) for name, measure in search_recipe.measures.items()}
    assert promised == {"tool": (0.65, 0.85), "arguments": (0.55, 0.80), "recall": (3.5, 5.5)}
    filled = {"cache": "c", "seed": 0, "out": "o", "base_url": "u", "version": VERSION, "row_before": 5, "row": 10}
    for name in ("base", "agent", "measure"):
        _, flag, module, *rest = search_recipe.command(name, filled)
        assert flag == "-m"
        assert find_spec(module) is not None
        assert name != "agent" or rest[rest.index("--begun") :][:4] == ["--begun", "5", "--until", "10"]


BOX = mailbox.generate(3)
TOOLS_OF_BOX = Searchtools(BOX.open())
QUERIES = [query for split in SPLITS for query in queries(BOX, split)]
"""Thousands of queries, from all splits."""


def played(query: Query, habits: Habits, seed: int = 0) -> list[dict[str, object]]:
    """Return the demonstrated conversation for `query`, followed by the result of the tool."""
    messages = demonstrate(query, random.Random(seed), habits)
    function = messages[-1]["tool_calls"][0]["function"]
    answer = TOOLS_OF_BOX.call(function["name"], function["arguments"])
    return [*messages, {"role": "tool", "tool_call_id": "call_1", "content": answer}]


def test_the_right_call_finds_the_newest_six_and_no_others() -> None:
    newest = {mail.number: mail for thread in BOX.threads for mail in thread.mails}
    for query in QUERIES:
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
    """Check the tool, the arguments, the invalid calls and the number of relevant mails of conversations with one
    habit."""
    habits = NONE if habit == "none" else Habits(**{habit: 1.0})
    for seed, query in enumerate(QUERIES[::97]):
        messages = played(query, habits, seed)
        score = score_calls(query, messages)
        wrong_tool = habit in ("invented", "confused")
        assert (score.tool, score.arguments) == (float(not wrong_tool), float(habit == "none"))
        assert score.invalid == float(habit == "invented")
        possible_recalls = {"none": [6], "excessive": [6], "insufficient": FEW}.get(habit, range(7))
        assert recall(query, messages) in possible_recalls


def test_what_is_confused_or_invented_is_never_the_right_tool() -> None:
    assert not INVENTED.keys() & TOOLS.keys()
    assert all({query.tool} & set(CONFUSED[query.kind]) == set() for query in QUERIES)
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


QUERY = Query("0", "sender", "Anna Berg", "Which mails did Anna Berg write?", frozenset({3, 5, 8, 13, 21, 34}))
FOUND = "34 Anna Berg: harbor budget\n21 Anna Berg: Re: maple audit\n13 Anna Berg: Re: 55 maple audit"
RIGHT = {"name": "Anna Berg", "limit": 6}


def run(name: str, arguments: Any, answer: str) -> list[dict[str, Any]]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": text}}
    return [
        {"role": "user", "content": QUERY.question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": answer},
    ]


REWARDED_RUNS = {
    "a good call": (run("search_sender", RIGHT, FOUND), (1.0, 0.5, 1.0, 0.0)),
    "the arguments in another order": (run("search_sender", {"limit": 6, "name": "Anna Berg"}, FOUND), (1, 0.5, 1, 0)),
    "too small a limit": (run("search_sender", {**RIGHT, "limit": 2}, FOUND), (1.0, 0.0, 1.0, 0.0)),
    "too large a limit": (run("search_sender", {**RIGHT, "limit": 9}, FOUND), (1.0, 0.0, 1.0, 0.0)),
    "half a name": (run("search_sender", {**RIGHT, "name": "Anna"}, "error: no such name"), (1.0, 0.0, 0.0, 0.0)),
    "another tool": (run("find_contact", RIGHT, "a1 Anna Berg: extension 20"), (0.0, 0.0, 1.0, 0.0)),
    "another tool, in vain": (run("search_folder", {"folder": "x", "limit": 6}, "error: no"), (0.0, 0.0, 0.0, 0.0)),
    "a tool that there is not": (run("search_mail", RIGHT, "error: no tool search_mail"), (0.0, 0.0, 0.0, -2.0)),
    "no JSON": (run("search_sender", '{"name": ', "error: arguments are not JSON"), (1.0, 0.0, 0.0, -2.0)),
    "no call": ([{"role": "user", "content": "?"}, {"role": "assistant", "content": "six"}], (0.0, 0.0, 0.0, 0.0)),
}


def earned(messages: list[dict[str, Any]]) -> tuple[float, ...]:
    return tuple(parts(score_calls(QUERY, messages)).values())


@pytest.mark.parametrize("name", REWARDED_RUNS)
def test_each_term_of_the_reward(name: str) -> None:
    messages, expected = REWARDED_RUNS[name]
    assert earned(messages) == expected


def test_an_invalid_tool_that_is_not_punished_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the penalty for an invalid tool, an invalid call earns as much as a failed valid call."""
    invalid, failed = REWARDED_RUNS["a tool that there is not"][0], REWARDED_RUNS["another tool, in vain"][0]
    assert sum(earned(invalid)) < sum(earned(failed))
    monkeypatch.setattr(rewards, "WORTH", {**rewards.WORTH, "invalid_tool": 0.0})
    assert sum(earned(invalid)) == sum(earned(failed))


def test_recall_counts_relevant_mails_that_a_tool_showed_and_no_numbers_besides() -> None:
    assert recall(QUERY, run("search_sender", RIGHT, FOUND)) == 3, "55 is no mail, and stands in a subject"
    assert recall(QUERY, run("search_sender", RIGHT, f"{FOUND}\n5 Anna Berg: x\n6 Anna Berg: x")) == 4
    assert recall(QUERY, run("find_contact", RIGHT, "a3 Anna Berg: extension 20")) == 0
    assert recall(QUERY, run("search_mail", RIGHT, "error: no tool search_mail")) == 0
    assert recall(QUERY, [{"role": "assistant", "content": "3 5 8 13 21 34"}]) == 0, "saying numbers finds nothing"


def test_the_best_run_is_compared_with_the_worst_and_equal_ones_are_not() -> None:
    assert best_and_worst([(2.0, "b"), (-2.0, "d"), (2.5, "a"), (0.0, "c")]) == ("a", "d")
    assert best_and_worst([(2.5, "first"), (2.5, "second"), (1.0, "third"), (1.0, "fourth")]) == ("first", "third")
    assert best_and_worst([(2.5, "a"), (2.5, "b")]) is None
    assert best_and_worst([(2.5, "alone")]) is None
