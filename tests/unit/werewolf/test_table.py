"""A game through a server: the messages and the session of each player, and the feedback at the end of the game."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import tomllib
from importlib.util import find_spec

import pytest
from openai import AsyncOpenAI

from headrace_cli.demo import recipe
from headrace_scorer.functions.loading import FunctionLoader
from headrace_scorer.settings import ScorerSettings
from headrace_trainer.settings import TrainerSettings
from tests.support.fake_llm import Call, FakeLLM, Reply, answer, completion, status
from tests.support.headrace_in_memory import Headrace
from werewolf import agent, evaluate, rewards
from werewolf.rules import deals
from werewolf.table import Table, as_text
from werewolf.talk import role_prompt

from .conftest import EXAMPLES
from .games import DEAL

WEREWOLF = EXAMPLES / "werewolf"
VERSION = "werewolf@0123456789abcdef"
NUMBERS = itertools.count()


def choose_reply(call: Call) -> str:
    """Return the statement or vote of a player.

    Wolves name the alphabetically first villager. Villagers vote for Ben, and Ben votes for Emma.
    """
    prompt = call.body["messages"][0]["content"]
    names = re.findall("Anna|Ben|Clara|David|Emma|Felix", prompt)
    wolf = "werewolf" in prompt
    target = next(name for name in ("Anna", "Clara", "David") if name not in names)
    if call.last.endswith("Speak."):
        return f"woods, {target}" if wolf else "mill, nobody"
    return target if wolf else "Ben" if "Ben" not in names else "Emma"


def reply_with_id(call: Call) -> Reply:
    return Reply({**completion(choose_reply(call)), "id": f"chatcmpl-{next(NUMBERS)}"})


async def test_each_reads_its_own_conversation_and_the_second_wolf_its_partners_vote() -> None:
    with FakeLLM(answer(choose_reply)) as llm:
        async with AsyncOpenAI(base_url=llm.base_url, api_key="none") as client:
            episode = await Table(client, "wolves", "village", 12).play(DEAL)
    calls = [(call.body["model"], [message["content"] for message in call.body["messages"]]) for call in llm.calls]
    assert [index for index, (model, _) in enumerate(calls) if model == "wolves"] == [1, 4, 6, 7]
    assert calls[0][1] == [role_prompt(DEAL, "Anna"), "woods: nobody\nsuspected: nobody\nSpeak."]
    assert calls[2][1][1] == "woods: Ben\nsuspected: Anna\nSpeak."
    assert calls[6][1][2:] == ["woods, Anna", "woods: Emma\nsuspected: Anna, Anna\nVote."]
    assert calls[7][1][3] == "woods: Ben\nsuspected: Anna, Anna\nBen votes Anna.\nVote."
    assert calls[8][1][0] == role_prompt(DEAL, "Anna")
    assert calls[8][1][3] == "woods: Ben, Emma\nsuspected: nobody\nVote.", "she does not read her own name"
    assert not any("votes" in messages[-1] for _, messages in calls[8:])
    identity_headers = ("x-session-id", "x-run-id", "x-task-id")
    ids_by_header = {header: {call.headers[header] for call in llm.calls} for header in identity_headers}
    assert [len(ids) for ids in ids_by_header.values()] == [6, 1, 1]
    assert episode.game is not None
    assert (episode.game.out, episode.answer, episode.calls) == ("Ben", "villagers", 12)
    assert "Ben (werewolf): woods, Anna\n" in as_text(episode.game)
    assert as_text(episode.game).endswith("out: Ben; the villagers win")


async def test_a_server_that_refuses_ends_the_game_and_nothing_else() -> None:
    with FakeLLM(answer(choose_reply)) as llm:
        llm.then(status(400))
        async with AsyncOpenAI(base_url=llm.base_url, api_key="none") as client:
            episode = await Table(client, "wolves", "village", 12).play(DEAL)
    assert (episode.game, episode.answer) == (None, None)
    assert str(episode.failure).startswith("BadRequestError")


async def test_each_wolf_gets_a_feedback_with_its_facts_and_the_villagers_one_that_says_nothing() -> None:
    headrace = Headrace(reply_with_id)
    options = argparse.Namespace(
        model="m", villagers="v", seed=1, first=3, tasks=5, concurrency=2, max_tokens=12
    )  # fmt: skip
    players = agent.Players(headrace.client(), options)
    await players.ask()
    contexts = [body["context"] for body in headrace.feedback if "context" in body]
    played_deals = list(itertools.islice(deals("train", 1), 3, 8))
    assert sorted(context["player"] for context in contexts) == sorted(
        wolf for deal in played_deals for wolf in deal.wolves
    )
    assert all(context.keys() == set(rewards.FACTS) for context in contexts)
    assert all(body["ends_session"] and body["task_id"] == "game" and "value" not in body for body in headrace.feedback)
    assert sorted(len(body["msg_ids"]) for body in headrace.feedback) == [2] * 10 + [8] * 5
    assert sorted(msg_id for body in headrace.feedback for msg_id in body["msg_ids"]) == sorted(headrace.spoken)
    assert len({body["run_id"] for body in headrace.feedback}) == 5
    won = sum("Ben" not in deal.wolves for deal in played_deals) / 5
    assert f"5 games, {won:.0%} won by the werewolves, 60 model calls" in players.tally.line()


def test_it_prints_score_and_abilities_of_each_held_out_game(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", VERSION, "--villagers", "villager:v1.0", "--seed", "1", "--tasks", "6", "--concurrency", "3"]
    with FakeLLM(answer(choose_reply)) as llm:
        monkeypatch.setattr(sys, "argv", ["evaluate", "--base-url", llm.base_url, *flags])
        evaluate.main()
    lines = {line["task"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    audit_deals = {deal.id: deal for deal in itertools.islice(deals("audit", 1), 6)}
    assert lines.keys() == audit_deals.keys()
    for name, line in lines.items():
        assert line["score"] == float("Ben" not in audit_deals[name].wolves and "werewolves win" in line["game"])
        assert line["hide"] == 0.0, "they say that they were in the woods"
    assert {call.headers["x-headrace-purpose"] for call in llm.calls} == {"eval"}
    assert {call.body["model"] for call in llm.calls} == {VERSION, "villager:v1.0"}


def test_the_services_take_the_settings_and_the_scorer_finds_the_functions() -> None:
    config = tomllib.loads((WEREWOLF / "headrace.toml").read_text(encoding="utf-8"))
    scorer, trainer = ScorerSettings(**config["scorer"]), TrainerSettings(**config["trainer"], base="b")
    assert trainer.model == recipe.read(WEREWOLF).model
    sources = {function.source for function in FunctionLoader().load(scorer.functions)}
    assert scorer.weights.keys() == sources >= set(scorer.required)


def test_the_recipe_asks_for_the_models_and_rows_that_there_are() -> None:
    demo_recipe = recipe.read(WEREWOLF)
    (name, villager), *none = demo_recipe.models.items()
    assert f"{name}:{villager.label}" == agent.VILLAGERS
    assert not none
    placeholders = {
        "cache": "c",
        "seed": 0,
        "out": "o",
        "base_url": "u",
        "version": VERSION,
        "row_before": 100,
        "row": 500,
    }
    for command in ("base", "agent", "measure", "checks"):
        _, flag, module, *rest = demo_recipe.command(command, placeholders)
        assert (flag, find_spec(module) is not None) == ("-m", True)
        assert (agent.VILLAGERS in rest) == (command in ("agent", "measure"))
    batch = tomllib.loads((WEREWOLF / "headrace.toml").read_text())["trainer"]
    version = batch["batch_experiences"] * batch["steps_per_version"]
    assert demo_recipe.rows is not None
    assert all(2 * games % version == 0 for games in demo_recipe.rows.at), "each row ends with a version"
