"""The email search example: rounds of compared runs against a gateway in memory, held-out queries, and the recipe."""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from importlib.util import find_spec

import pytest
from openai import AsyncOpenAI

from email_agent import mailbox
from email_search import agent, evaluate
from email_search.agent import PAIRS, RUNS
from email_search.demonstrations import NONE, Habits
from email_search.queries import SPLITS, queries
from email_search.rewards import WORTH
from email_search.warm_up import HABITS
from headrace_cli.demo import recipe
from headrace_registry.settings import GateSettings
from headrace_scorer.settings import ScorerSettings
from headrace_trainer.settings import TrainerSettings
from tests.support.fake_llm import FakeLLM
from tests.support.headrace_in_memory import Headrace

from .conftest import EXAMPLES
from .searcher import Searcher

VERSION = "email-search@0123456789abcdef"
ALL = [query for split in SPLITS for query in queries(mailbox.generate(1), split)]


def options(**changes: object) -> argparse.Namespace:
    defaults = {"model": "m", "seed": 1, "tasks": None, "concurrency": 4, "max_tokens": 64, "begun": 0, "until": 1}
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
    assert (search_recipe.rows.at, search_recipe.rows.unit, search_recipe.seed_s_max) == ((0, 5, 10), "rounds", 480)
    promised = {name: (measure.before_max, measure.after_min) for name, measure in search_recipe.measures.items()}
    assert promised == {"tool": (0.65, 0.85), "arguments": (0.55, 0.80), "recall": (3.5, 5.5)}
    filled = {"cache": "c", "seed": 0, "out": "o", "base_url": "u", "version": VERSION, "row_before": 5, "row": 10}
    for name in ("base", "agent", "measure"):
        _, flag, module, *rest = search_recipe.command(name, filled)
        assert flag == "-m"
        assert find_spec(module) is not None
        assert name != "agent" or rest[rest.index("--begun") :][:4] == ["--begun", "5", "--until", "10"]
