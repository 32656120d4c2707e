"""What each control does to rewards, by hand; nothing else of an experience may change."""

from __future__ import annotations

import random
from collections import Counter

from headrace_operations.controls.kinds import CONTROLS, FLIPPED, RANDOM, SHUFFLED, STILL, TRUE, alone, reward_sources
from tests.unit.cli.controls.made import experience, rewards

GIVEN = [experience(number, reward) for number, reward in enumerate((0.0, 0.2, 1.0, 0.2))]


def chance(seed: int = 0) -> random.Random:
    return random.Random(seed)


def test_the_truth_and_the_learning_rate_of_0_change_no_reward() -> None:
    assert TRUE.change(GIVEN, chance()) == STILL.change(GIVEN, chance()) == GIVEN
    assert STILL.settings == {"trainer.optimizer.learning_rate": 1e-300}


def test_flipped_rewards_keep_their_span() -> None:
    assert rewards(FLIPPED.change(GIVEN, chance())) == [1.0, 0.8, 0.0, 0.8]
    assert FLIPPED.change([], chance()) == []


def test_shuffled_rewards_are_the_same_ones_and_meet_every_run_alike() -> None:
    met = Counter[int]()
    for seed in range(3000):
        found = rewards(SHUFFLED.change(GIVEN, chance(seed)))
        assert sorted(found, key=str) == [0.0, 0.2, 0.2, 1.0]
        met[found.index(1.0)] += 1
    assert all(650 < met[place] < 850 for place in range(4)), met  # 750 expected, a standard deviation of 24


def test_random_rewards_are_drawn_from_the_distribution() -> None:
    met = Counter(rewards(RANDOM.change(GIVEN, chance(seed)))[2] for seed in range(3000))
    assert set(met) == {0.0, 0.2, 1.0}
    assert 1380 < met[0.2] < 1620, met


def test_a_source_alone_leaves_out_what_it_did_not_score() -> None:
    given = [experience(0, 0.6, answer=1.0, format=0.2), experience(1, 0.3, format=0.3)]
    assert reward_sources(given) == ["answer", "format"]
    assert rewards(alone("format").change(given, chance())) == [0.2, 0.3]
    kept = alone("answer").change(given, chance())
    assert [(one.experience_id, one.reward) for one in kept] == [("e0", 1.0)]


def test_only_rewards_change_and_the_same_seed_changes_alike() -> None:
    for control in (*CONTROLS, alone("x")):
        again = control.change(GIVEN, chance(7))
        assert again == control.change(GIVEN, chance(7))
        for before, after in zip(GIVEN, again, strict=False):
            assert before.model_copy(update={"reward": 0}) == after.model_copy(update={"reward": 0})
    assert rewards(GIVEN) == [0.0, 0.2, 1.0, 0.2], "what was given is as it was"
