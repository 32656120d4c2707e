"""Effect of each control on the rewards, computed by hand; no other field of an experience may change."""

from __future__ import annotations

import random
from collections import Counter

from headrace_operations.controls.kinds import CONTROLS, FLIPPED, RANDOM, SHUFFLED, STILL, TRUE, alone, reward_sources
from tests.unit.cli.controls.made import experience, rewards

EXPERIENCES = [experience(number, reward) for number, reward in enumerate((0.0, 0.2, 1.0, 0.2))]


def chance(seed: int = 0) -> random.Random:
    return random.Random(seed)


def test_controls_true_and_still_change_no_reward() -> None:
    assert TRUE.change(EXPERIENCES, chance()) == STILL.change(EXPERIENCES, chance()) == EXPERIENCES
    assert STILL.settings == {"trainer.optimizer.learning_rate": 1e-300}


def test_flipped_rewards_keep_their_span() -> None:
    assert rewards(FLIPPED.change(EXPERIENCES, chance())) == [1.0, 0.8, 0.0, 0.8]
    assert FLIPPED.change([], chance()) == []


def test_shuffled_rewards_are_a_uniform_permutation() -> None:
    counts = Counter[int]()
    for seed in range(3000):
        shuffled = rewards(SHUFFLED.change(EXPERIENCES, chance(seed)))
        assert sorted(shuffled, key=str) == [0.0, 0.2, 0.2, 1.0]
        counts[shuffled.index(1.0)] += 1
    assert all(650 < counts[position] < 850 for position in range(4)), (
        counts
    )  # 750 expected, a standard deviation of 24


def test_random_rewards_are_drawn_from_the_distribution() -> None:
    counts = Counter(rewards(RANDOM.change(EXPERIENCES, chance(seed)))[2] for seed in range(3000))
    assert set(counts) == {0.0, 0.2, 1.0}
    assert 1380 < counts[0.2] < 1620, counts


def test_a_source_alone_leaves_out_unscored_experiences() -> None:
    experiences = [experience(0, 0.6, answer=1.0, format=0.2), experience(1, 0.3, format=0.3)]
    assert reward_sources(experiences) == ["answer", "format"]
    assert rewards(alone("format").change(experiences, chance())) == [0.2, 0.3]
    scored = alone("answer").change(experiences, chance())
    assert [(one.experience_id, one.reward) for one in scored] == [("e0", 1.0)]


def test_controls_change_only_rewards_and_are_reproducible() -> None:
    for control in (*CONTROLS, alone("x")):
        changed = control.change(EXPERIENCES, chance(7))
        assert changed == control.change(EXPERIENCES, chance(7))
        for before, after in zip(EXPERIENCES, changed, strict=False):
            assert before.model_copy(update={"reward": 0}) == after.model_copy(update={"reward": 0})
    assert rewards(EXPERIENCES) == [0.0, 0.2, 1.0, 0.2], "the input is unchanged"
