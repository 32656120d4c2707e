from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from werewolf import policies, talk
from werewolf.rules import NAMES, PLACES, WOODS, Game, Split, Statement, deals

from .games import DEAL, TALK, A, B, C, D, E, F, game


def test_a_game_by_hand() -> None:
    """Clara is out with three votes against two for Ben. Both wolves had suspected her, and both voted for her."""
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
        assert talk.read_statement(statement.name, talk.answer(statement)) == statement
    assert talk.read_statement(A, "castle, Ben") == Statement(A, None, B)
    assert talk.read_statement(A, "mill, Anna") == Statement(A, "mill", None), "nobody suspects himself"
    assert talk.read_statement(A, "Ben") == Statement(A, None, None)
    assert talk.read_name(A, " Ben. ") == B
    assert talk.role_prompt(DEAL, B) == "You are Ben, werewolf with Emma. Say a place and a suspect, then vote."
    assert talk.role_prompt(DEAL, A) == "You are Anna, villager. Say a place and a suspect, then vote."
    prompt = talk.voting_prompt(E, (*TALK, Statement(A, WOODS, E)), B, C)
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
    """Wolves with one ability use it in every game, and each other ability in less than 90 % of them, with seed 0."""
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
