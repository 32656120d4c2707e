"""What a wolf's game was worth: each of the four terms, and their sum by the scorer's own policy."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping

import pytest

from headrace_scorer.reward_policy import RewardPolicy, SourceReward
from headrace_scorer.settings import ScorerSettings
from werewolf import rewards
from werewolf.agent import facts
from werewolf.rules import Game, Statement

from .conftest import EXAMPLES
from .games import VOTES, A, B, C, D, E, F, game

TERMS = ("team_win", "individual_survive", "successfully_blame", "exposed_penalty")
BLAMELESS = {"Ben": Statement(B, "inn", A)}


def happened(context: Mapping[str, object]) -> list[float | None]:
    return [getattr(rewards, term)(context) for term in TERMS]


def worth(context: Mapping[str, object]) -> float | None:
    """By the example's own settings."""
    given = tomllib.loads((EXAMPLES / "werewolf" / "headrace.toml").read_text(encoding="utf-8"))
    settings = ScorerSettings(**given["scorer"])
    policy = RewardPolicy(settings.weights, settings.required, combine=settings.combine)
    said = zip(TERMS, happened(context), strict=True)
    found = [SourceReward(f"function:{term}", None, "scored", value) for term, value in said]
    return policy.branch_reward(found, ["t"], rewarded=False).reward


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
    """Planted: each weight with the other sign, over the outcomes above."""
    contexts = [facts(game(), B), facts(game({A: B}), B), facts(game({A: B}), E)]
    right = [worth(context) for context in contexts]
    for place, term in enumerate(TERMS):
        weights = [10.0, 5.0, 2.0, 5.0]
        weights[place] *= -1
        wrong = [
            sum(w * v for w, v in zip(weights, happened(context), strict=True) if v is not None) for context in contexts
        ]
        assert wrong != right, term
