"""The policy combines sources. A source without a score is ignored, and is never a zero (P6)."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_schemas import Experience
from headrace_schemas.events.reward import Outcome
from headrace_schemas.values.sources import fits
from headrace_scorer.reward_policy import PARTS_MAX, RewardPolicy, SourceReward

EQUAL = RewardPolicy({"*": 1.0})


def scored(source: str, value: float, turn_id: str | None = None) -> SourceReward:
    return SourceReward(source, turn_id, "scored", value)


def silent(source: str, outcome: Outcome) -> SourceReward:
    return SourceReward(source, None, outcome, None)


def reward(policy: RewardPolicy, *rewards: SourceReward, turns: tuple[str, ...] = ("t",)) -> float | None:
    return policy.branch_reward(rewards, turns, rewarded=False).reward


def test_the_reward_is_the_weighted_mean_of_what_scored() -> None:
    policy = RewardPolicy({"judge:*": 3.0, "*": 1.0})
    reward_of_branch = policy.branch_reward([scored("judge:a", 1.0), scored("feedback", 0.0)], ["t"], rewarded=False)
    assert reward_of_branch.reward == 0.75
    assert [(part.source, part.value, part.weight) for part in reward_of_branch.parts] == [
        ("feedback", 0.0, 0.25),
        ("judge:a", 1.0, 0.75),
    ]


@pytest.mark.parametrize("outcome", ["abstained", "failed", "parse_error", "timed_out", "withdrawn"])
def test_p6_no_score_is_not_zero(outcome: Outcome) -> None:
    assert reward(EQUAL, scored("a", 0.5), silent("b", outcome)) == 0.5
    assert reward(EQUAL, silent("b", outcome)) is None


def test_the_first_pattern_that_fits_gives_the_weight() -> None:
    policy = RewardPolicy({"function:a": 2.0, "function:*": 1.0, "other": 0.5})
    assert [policy.weight(name) for name in ("function:a", "function:b", "other", "unknown")] == [2.0, 1.0, 0.5, 0.0]


@pytest.mark.parametrize("turned", [False, True])
def test_what_is_about_the_very_answer_goes_before_what_is_about_its_turn(turned: bool) -> None:
    answer = SourceReward("a", "t", "scored", 1.0, choice=0)
    rewards = [scored("a", 0.0, "t"), answer]
    assert reward(EQUAL, *reversed(rewards) if turned else rewards) == 1.0


def test_who_speaks_last_waits_for_all_others_and_not_for_himself() -> None:
    policy = RewardPolicy({"*": 1.0}, expected=["feedback", "learned:*"], functions=["function:a"])
    assert not policy.answered([silent("feedback", "abstained")], "learned:thumbs")
    assert policy.answered([silent("feedback", "abstained"), scored("function:a", 1.0)], "learned:thumbs")
    assert not policy.answered([scored("learned:thumbs", 1.0)], "learned:thumbs")


def test_sources_without_a_weight_do_not_count() -> None:
    policy = RewardPolicy({"feedback": 1.0, "judge:*": 0.0})
    assert reward(policy, scored("feedback", 1.0), scored("judge:a", 0.0), scored("stranger", 0.0)) == 1.0
    assert reward(policy, scored("judge:a", 1.0)) is None


def test_a_required_source_must_have_scored() -> None:
    policy = RewardPolicy({"*": 1.0}, required=["feedback"])
    reward_of_branch = policy.branch_reward([scored("function:a", 1.0)], ["t"], rewarded=False)
    assert (reward_of_branch.reward, reward_of_branch.no_reward, reward_of_branch.parts) == (
        None,
        "required_source_missing",
        (),
    )
    assert policy.branch_reward([silent("feedback", "abstained")], ["t"], rewarded=False).no_reward == "no_reward"
    assert reward(policy, scored("function:a", 1.0), scored("feedback", 0.0)) == 0.5


def test_a_reward_that_goes_away_is_withdrawn() -> None:
    assert EQUAL.branch_reward([silent("a", "withdrawn")], ["t"], rewarded=True).no_reward == "withdrawn"
    assert EQUAL.branch_reward([silent("a", "withdrawn")], ["t"], rewarded=False).no_reward == "no_reward"


def test_verdicts_on_turns_count_for_the_branches_that_hold_them() -> None:
    rewards = [scored("f", 1.0, "a"), scored("f", 0.0, "b"), scored("f", 0.5, "c")]
    assert reward(EQUAL, *rewards, turns=("a", "b")) == 0.5
    assert reward(EQUAL, *rewards, turns=("c",)) == 0.5
    assert reward(EQUAL, *rewards, turns=("d",)) is None
    assert reward(EQUAL, *rewards, scored("f", 0.9), turns=("a",)) == 0.9, "its word on the whole comes first"


def test_waiting_ends_when_everybody_expected_has_spoken_and_somebody_scored() -> None:
    policy = RewardPolicy({"*": 1.0}, required=["feedback"], expected=["judge:*"], functions=["function:a"])
    answered = [silent("function:a", "abstained"), silent("judge:x", "timed_out")]
    assert not policy.complete(answered)
    assert not policy.complete([*answered, silent("feedback", "abstained")])
    assert policy.complete([*answered, scored("feedback", 1.0)])
    assert not policy.complete([answered[0], scored("feedback", 1.0)]), "the judge has said nothing"
    assert not EQUAL.complete([]), "nobody is expected, and nobody has scored"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(-1, 1)), max_size=6), st.randoms(use_true_random=False))
def test_the_reward_lies_between_the_verdicts_whatever_their_order(
    values: list[tuple[str, float]], shuffle: random.Random
) -> None:
    rewards = [scored(source, value) for source, value in dict(values).items()]
    combined = reward(RewardPolicy({"a": 2.0, "*": 0.5}), *rewards)
    if rewards:
        assert combined is not None
        assert min(dict(values).values()) - 1e-9 <= combined <= max(dict(values).values()) + 1e-9
    shuffle.shuffle(rewards)
    assert reward(RewardPolicy({"a": 2.0, "*": 0.5}), *rewards) == combined


def test_a_reward_of_exactly_half_is_not_below_it() -> None:
    """Rounded shares of the weights add up to 0.49999999999999994, which `kto` and `rft` take for a bad answer."""
    policy = RewardPolicy({"user:tone": 0.5, "crowd": 2.0, "*": 1.0})
    rewards = [scored("crowd", 0.75), scored("feedback:truth", 0.25), scored("user", 0.5), scored("user:tone", 0.0)]
    assert reward(policy, *rewards) == 0.5


@given(st.floats(-1e6, 1e6), st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9))
def test_sources_that_agree_give_exactly_their_value(value: float, weights: list[float]) -> None:
    policy = RewardPolicy({f"s{index}": weight for index, weight in enumerate(weights)})
    assert reward(policy, *(scored(f"s{index}", value) for index in range(len(weights)))) == value


def test_patterns_know_nothing_but_the_star() -> None:
    assert fits("judge:*", "judge:helpful")
    assert fits("*", "anything\nat all")
    assert not fits("judge:*", "my-judge:x")
    assert not fits("a.c", "abc")
    assert not fits("[ab]", "a")


@pytest.mark.parametrize("outcome", ["abstained", "failed", "parse_error", "timed_out", "withdrawn"])
def test_a_required_source_that_spoke_without_a_score_is_still_waited_for(outcome: Outcome) -> None:
    policy = RewardPolicy({"*": 1.0}, required=["feedback"])
    assert not policy.complete([scored("function:a", 1.0), silent("feedback", outcome)])
    assert policy.complete([scored("function:a", 1.0), scored("feedback", 0.0)])


def test_at_most_64_sources_count_required_ones_first_and_then_the_heaviest() -> None:
    names = [f"metric:{number:02}" for number in range(PARTS_MAX + 3)]
    weights = {name: 1.0 + number for number, name in enumerate(names)}
    policy = RewardPolicy({**weights, "unweighted": 0.0}, required=[names[0]])
    rewards = [scored(name, float(name == names[0])) for name in (*names, "unweighted")]

    exactly = policy.branch_reward(rewards[:PARTS_MAX], ["t"], rewarded=False)
    assert (len(exactly.parts), exactly.left_out) == (PARTS_MAX, ())

    more = policy.branch_reward(rewards, ["t"], rewarded=False)
    assert [part.source for part in more.parts] == [names[0], *names[4:]]
    assert more.left_out == tuple(names[1:4]), "sources without a weight are not named"
    counted = [weights[part.source] for part in more.parts]
    assert more.reward == pytest.approx(1.0 / sum(counted))
    assert Experience.model_fields["parts"].metadata[0].max_length == PARTS_MAX, "the bound of the event"
