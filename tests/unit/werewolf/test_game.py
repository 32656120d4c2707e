"""Tests of the werewolf example: a game through a server, rewards, rules, and games written by hand.

A game has one session for each player, and feedback at its end. A wolf's reward has four terms, which the scorer's own
policy adds up. Each of three abilities of wolves matters, and none is sufficient.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import pytest
from openai import AsyncOpenAI

from headrace_cli.demo import recipe
from headrace_scorer.functions.loading import FunctionLoader
from headrace_scorer.reward_policy import RewardPolicy, SourceReward
from headrace_scorer.settings import ScorerSettings
from headrace_trainer.settings import TrainerSettings
from tests.support.fake_llm import Call, FakeLLM, Headrace, Reply, answer, completion, status
from werewolf import ablation, agent, evaluate, policies, rewards, table
from werewolf.ablation import WinRate, lines
from werewolf.agent import facts
from werewolf.table import NAMES, PLACES, WOODS, Deal, Game, Split, Statement, Table, as_text, deals, role_prompt

EXAMPLES = Path(__file__).parents[3] / "examples"


A, B, C, D, E, F = NAMES
DEAL = Deal("by-hand", seats=NAMES, wolves=(B, E), lots=(F, E, D, C, B, A))
"""Ben and Emma are the wolves; of several with most votes Felix goes first."""
TALK = (
    Statement(A, "mill", None),
    Statement(B, "inn", C),
    Statement(C, "well", B),
    Statement(D, "barn", C),
    Statement(E, "mill", C),
    Statement(F, "inn", None),
)
VOTES: Mapping[str, str | None] = MappingProxyType({A: C, B: C, C: B, D: B, E: C, F: None})


def game(votes: Mapping[str, str | None] = VOTES, **statements: Statement) -> Game:
    """Return the game that is written by hand, with other `votes`, or with other statements by name."""
    return Game(DEAL, tuple(statements.get(statement.name, statement) for statement in TALK), {**VOTES, **votes})


def test_a_game_by_hand() -> None:
    """Clara is eliminated with three votes against two for Ben. Both wolves suspected her and voted for her."""
    played = game()
    assert (played.out, played.wolves_win) == (C, True)
    assert (played.hid, played.blamed, played.voted_together) == (True, True, True)


@pytest.mark.parametrize(
    ("votes", "out", "wolves_win"),
    [
        ({A: B}, B, False),
        ({D: C}, C, True),
        ({A: F, B: F, C: B, D: B, E: D}, F, True),
        ({A: E, B: F, C: E, D: F, E: None}, F, True),
        ({A: E, B: D, C: E, D: C, E: D}, E, False),
        (dict.fromkeys(NAMES), None, True),
    ],
    ids=["a wolf", "a villager", "lots: Felix before Ben", "lots: Felix before Emma", "lots: Emma", "nobody votes"],
)
def test_who_is_out(votes: dict[str, str | None], out: str | None, wolves_win: bool) -> None:
    played = game(votes)
    assert (played.out, played.wolves_win) == (out, wolves_win)


def test_what_is_none_of_the_three_abilities() -> None:
    assert not game(Ben=Statement(B, WOODS, C)).hid
    assert not game(Ben=Statement(B, None, C)).hid, "who says no place is not believed"
    assert game(Clara=Statement(C, WOODS, B)).hid, "villagers have nothing to hide"
    assert game(Ben=Statement(B, "inn", A)).blamed, "one wolf had named her"
    assert not game(Ben=Statement(B, "inn", A), Emma=Statement(E, "mill", None)).blamed
    assert not game({A: B}).blamed, "a wolf is out"
    assert not game(dict.fromkeys(NAMES)).blamed
    assert not game({B: A}).voted_together
    assert not game({B: E, E: E}).voted_together
    assert not game({B: None, E: None}).voted_together


def test_the_talk_is_read_as_it_is_written() -> None:
    for statement in (*TALK, Statement(A, WOODS, F)):
        assert table.read_statement(statement.name, table.answer_line(statement)) == statement
    assert table.read_statement(A, "castle, Ben") == Statement(A, None, B)
    assert table.read_statement(A, "mill, Anna") == Statement(A, "mill", None), "nobody suspects himself"
    assert table.read_statement(A, "Ben") == Statement(A, None, None)
    assert table.read_name(A, " Ben. ") == B
    assert table.role_prompt(DEAL, B) == "You are Ben, werewolf with Emma. Say a place and a suspect, then vote."
    assert table.role_prompt(DEAL, A) == "You are Anna, villager. Say a place and a suspect, then vote."
    prompt = table.voting_prompt(E, (*TALK, Statement(A, WOODS, E)), B, C)
    assert prompt == "woods: Anna\nsuspected: Clara, Ben, Clara, Clara\nBen votes Clara.\nVote."


def test_deals_are_fair_and_their_splits_apart() -> None:
    splits: tuple[Split, ...] = ("warm_up", "train", "gate", "audit")
    deals_by_split = {split: list(itertools.islice(deals(split, 1), 600)) for split in splits}
    assert deals_by_split["audit"] == list(itertools.islice(deals("audit", 1), 600))
    assert len({deal.id for split_deals in deals_by_split.values() for deal in split_deals}) == 2400
    wolves = Counter(name for deal in deals_by_split["train"] for name in deal.wolves)
    first = Counter(deal.seats[0] for deal in deals_by_split["train"])
    assert all(150 < wolves[name] < 250 and 60 < first[name] < 140 for name in NAMES)
    assert all(set(deal.seats) == set(deal.lots) == set(NAMES) for deal in deals_by_split["train"])
    assert all(
        list(deal.wolves) == [name for name in deal.seats if name in deal.wolves] for deal in deals_by_split["train"]
    )


@pytest.mark.parametrize("ability", policies.ABILITIES)
def test_an_ability_is_what_is_told_of_it(ability: str) -> None:
    """Wolves with one ability use it in every game, and each other ability in less than 90 % of the games, with seed
    0."""
    rng = random.Random(0)
    games = [policies.play(deal, (ability,), rng) for deal in itertools.islice(deals("warm_up", 0), 300)]
    checks = {"hide": _hides, "blame": _blames, "vote": _votes}
    shares = {name: sum(map(check, games)) / len(games) for name, check in checks.items()}
    assert shares.pop(ability) == 1.0
    assert all(share < 0.9 for share in shares.values())


def _hides(played: Game) -> bool:
    return all(statement.place in PLACES for statement in played.talk if statement.name in played.deal.wolves)


def _blames(played: Game) -> bool:
    return all(
        statement.suspect in played.deal.villagers for statement in played.talk if statement.name in played.deal.wolves
    )


def _votes(played: Game) -> bool:
    first, second = (played.votes[wolf] for wolf in played.deal.wolves)
    return first == second and first in played.deal.villagers


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
        "cache": "c", "seed": 0, "out": "o", "base_url": "u", "version": VERSION, "row_before": 100, "row": 500,
    }  # fmt: skip
    for command in ("base", "agent", "measure", "checks"):
        _, flag, module, *rest = demo_recipe.command(command, placeholders)
        assert (flag, find_spec(module) is not None) == ("-m", True)
        assert (agent.VILLAGERS in rest) == (command in ("agent", "measure"))
    batch = tomllib.loads((WEREWOLF / "headrace.toml").read_text())["trainer"]
    version = batch["batch_experiences"] * batch["steps_per_version"]
    assert demo_recipe.rows is not None
    assert all(2 * games % version == 0 for games in demo_recipe.rows.at), "each row ends with a version"


TERMS = ("team_win", "individual_survive", "successfully_blame", "exposed_penalty")
BLAMELESS = {"Ben": Statement(B, "inn", A)}


def happened(context: Mapping[str, object]) -> list[float | None]:
    return [getattr(rewards, term)(context) for term in TERMS]


def worth(context: Mapping[str, object]) -> float | None:
    """Return the reward for a game's context with the example's own settings."""
    example_settings = tomllib.loads((EXAMPLES / "werewolf" / "headrace.toml").read_text(encoding="utf-8"))
    settings = ScorerSettings(**example_settings["scorer"])
    policy = RewardPolicy(settings.weights, settings.required, combine=settings.combine)
    terms = zip(TERMS, happened(context), strict=True)
    rewards = [SourceReward(f"function:{term}", None, "scored", value) for term, value in terms]
    return policy.branch_reward(rewards, ["t"], rewarded=False).reward


@pytest.mark.parametrize(
    ("played", "wolf", "expected", "sum_of_them"),
    [
        (game(), B, [1, 1, 1, 0], 17.0),
        (game(VOTES, **BLAMELESS), B, [1, 1, 0, 0], 15.0),
        (game(VOTES, **BLAMELESS), E, [1, 1, 1, 0], 17.0),
        (game({A: B}), B, [0, 0, 0, -1], -5.0),
        (game({A: B}), E, [0, 1, 0, 0], 5.0),
        (game(dict.fromkeys((A, B, C, D, E, F))), E, [1, 1, 0, 0], 15.0),
        (game({A: B}, Emma=Statement(E, "mill", B)), E, [0, 1, 0, 0], 5.0),
    ],
    ids=["all of it", "named another one", "its partner", "voted out", "its partner is", "nobody", "named its partner"],
)
def test_four_terms(played: Game, wolf: str, expected: list[int], sum_of_them: float) -> None:
    context = facts(played, wolf)
    assert happened(context) == expected
    assert worth(context) == sum_of_them


def test_without_the_facts_they_abstain() -> None:
    context: dict[str, object] = dict(facts(game(), B))
    for name in rewards.FACTS:
        assert happened({key: value for key, value in context.items() if key != name}) == [None] * 4


def test_a_fault_in_any_term_changes_the_reward() -> None:
    """Injected fault: the sign of each weight is flipped in turn, over the outcomes above."""
    contexts = [facts(game(), B), facts(game({A: B}), B), facts(game({A: B}), E)]
    right = [worth(context) for context in contexts]
    for index, term in enumerate(TERMS):
        weights = [10.0, 5.0, 2.0, 5.0]
        weights[index] *= -1
        wrong = [
            sum(w * v for w, v in zip(weights, happened(context), strict=True) if v is not None) for context in contexts
        ]
        assert wrong != right, term


GAMES, SEED = 1000, 7


def failing(rates: dict[tuple[str, ...], WinRate]) -> list[str]:
    return [str(line["name"]) for line in lines(rates) if not line["holds"]]


def test_no_ability_is_enough_and_none_can_be_missed() -> None:
    rates = ablation.ablation(GAMES, SEED)
    assert 0.45 < rates[()].low < rates[()].high < 0.58, "where the base begins"
    assert [name for name, rate in rates.items() if rate.low > ablation.WIN_RATE] == [
        ("hide", "blame"), ("hide", "vote"), ("hide", "blame", "vote")
    ]  # fmt: skip
    assert failing(rates) == []


@pytest.mark.parametrize(
    ("name", "value", "fails"),
    [
        ("honest", 0.0, ["ablation: all but hide"]),
        ("votes_suspect", 0.0, ["ablation: all but blame"]),
    ],
    ids=["nobody ever gives itself away", "villagers do not listen to suspicions"],
)
def test_rules_under_which_an_ability_is_worth_nothing_are_found_out(
    monkeypatch: pytest.MonkeyPatch, name: str, value: float, fails: list[str]
) -> None:
    monkeypatch.setattr(policies.play, "__defaults__", (replace(policies.HABITS, **{name: value}),))
    assert set(fails) <= set(failing(ablation.ablation(GAMES, SEED)))


def test_an_interval_by_hand() -> None:
    rate = WinRate(0.5, 400)
    assert rate.margin == pytest.approx(1.96 * 0.025)
    assert str(rate) == "50.0% ± 4.9%"


def test_it_prints_lines_for_the_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["ablation", "--lines", "--games", "300"])
    ablation.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 7
    assert all(report_line.keys() == {"name", "wanted", "found", "holds"} for report_line in lines)
