"""Every advantage against numbers worked out by hand, and against an independent implementation on random batches."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from headrace_trainer.advantages import EPSILON, Advantages, grpo, reinforce_pp, rloo
from headrace_trainer.baselines import Baselines, Decay, Mean

DECAY = Decay(task=0.9, model=0.99, tasks_max=100)


def plus_plus(
    rewards: list[float],
    tasks: list[str | None],
    past: Baselines | None = None,
    *,
    runs: list[str] | None = None,
    weights: list[float] | None = None,
    scaled: bool = False,
    history_min: float = 1.0,
    decay: Decay = DECAY,
) -> tuple[Advantages, Baselines]:
    names = runs or [f"r{index}" for index in range(len(rewards))]
    shares = weights or [1.0] * len(rewards)
    return reinforce_pp(
        rewards, shares, names, tasks, past or Baselines(), decay, history_min=history_min, scaled=scaled
    )


class TestReinforcePlusPlus:
    def test_by_hand_within_one_batch(self) -> None:
        found, past = plus_plus([1.0, 0.0, 0.0, 5.0], ["a", "a", "a", "b"])
        # a: the mean of the other two; b: nobody else has its task, so the mean of all others, 1/3
        assert found.baselines_B == pytest.approx([0.0, 0.5, 0.5, 1 / 3])
        assert found.values_B == pytest.approx([1.0, -0.5, -0.5, 14 / 3])
        assert past.task("a") == Mean(total=1.0, weight=3.0)
        assert past.overall == Mean(total=6.0, weight=4.0)

    def test_by_hand_with_history(self) -> None:
        past = Baselines(tasks={"a": Mean(total=2.0, weight=4.0)})
        found, then = plus_plus([1.0], ["a"], past)
        assert found.values_B == pytest.approx([0.5]), "against the history alone, 2/4"
        assert then.task("a").total == pytest.approx(2.0 * 0.9 + 1.0)
        assert then.task("a").weight == pytest.approx(4.0 * 0.9 + 1.0)

    def test_a_single_run_learns_from_its_history(self) -> None:
        past = plus_plus([0.0], ["a"])[1]
        assert plus_plus([1.0], ["a"], past)[0].values_B == pytest.approx([1.0]), "pitfall 11: no group is needed"

    def test_the_very_first_run_has_nothing_to_be_compared_with(self) -> None:
        assert plus_plus([7.0], ["a"])[0].values_B == [0.0]
        assert plus_plus([7.0], [None], scaled=True)[0].values_B == [0.0]

    def test_a_task_without_history_borrows_the_mean_over_all_tasks(self) -> None:
        past = Baselines(overall=Mean(total=3.0, weight=4.0))
        assert plus_plus([1.0], ["new"], past)[0].baselines_B == pytest.approx([0.75])
        assert plus_plus([1.0], [None], past)[0].baselines_B == pytest.approx([0.75])

    def test_the_history_that_it_takes_is_a_setting(self) -> None:
        past = Baselines(tasks={"a": Mean(total=1.0, weight=1.0)}, overall=Mean(total=0.0, weight=9.0))
        assert plus_plus([1.0], ["a"], past, history_min=1.0)[0].baselines_B == pytest.approx([1.0])
        assert plus_plus([1.0], ["a"], past, history_min=2.0)[0].baselines_B == pytest.approx([0.0])

    def test_pitfall_9_a_run_counts_once_however_it_was_split(self) -> None:
        whole, past_whole = plus_plus([1.0, 0.0], ["a", "a"], runs=["x", "y"])
        split, past_split = plus_plus(
            [1.0, 1.0, 1.0, 1.0, 0.0], ["a"] * 5, runs=["x"] * 4 + ["y"], weights=[0.25] * 4 + [1.0]
        )
        assert whole.values_B == pytest.approx([1.0, -1.0])
        assert split.values_B == pytest.approx([1.0] * 4 + [-1.0]), "own branches are no comparison"
        assert past_split.task("a").total == pytest.approx(past_whole.task("a").total)
        assert past_split.task("a").weight == pytest.approx(past_whole.task("a").weight)
        assert past_split.squares.value == pytest.approx(past_whole.squares.value)

    def test_pitfall_12_constant_rewards_of_different_tasks_give_no_gradient(self) -> None:
        past = Baselines()
        for _ in range(3):
            for task, reward in (("easy", 1.0), ("hard", 0.1)):
                found, past = plus_plus([reward], [task], past, scaled=True)
        found, past = plus_plus([1.0, 0.1, 1.0, 0.1], ["easy", "hard"] * 2, past, scaled=True)
        assert found.values_B == pytest.approx([0.0] * 4, abs=1e-9)

    def test_the_scale_is_the_running_root_mean_square(self) -> None:
        past = Baselines(tasks={"a": Mean(total=0.0, weight=5.0)}, squares=Mean(total=6.0, weight=2.0))
        found, then = plus_plus([2.0], ["a"], past, scaled=True)
        assert found.scales_B == pytest.approx([math.sqrt((6 + 4) / 3) + EPSILON])
        assert found.values_B == pytest.approx([2.0 / math.sqrt(10 / 3)], rel=1e-5)
        assert then.squares.total == pytest.approx(6.0 * 0.99 + 4.0)

    def test_it_agrees_with_another_implementation_on_random_streams(self) -> None:
        seed = random.SystemRandom().randrange(2**32)
        print(f"seed {seed}")
        draw = random.Random(seed)
        past, state = Baselines(), Naive()
        for _ in range(6):
            size = draw.randint(1, 9)
            rewards = [draw.gauss(0, 2) for _ in range(size)]
            tasks = [draw.choice(["a", "b", None]) for _ in range(size)]
            found, past = plus_plus(rewards, tasks, past, scaled=True)
            assert found.values_B == pytest.approx(state.batch(np.array(rewards), tasks), rel=1e-6, abs=1e-6)

    def test_the_tasks_that_are_remembered_are_bounded(self) -> None:
        past = Baselines()
        for task in ("a", "b", "c", "a", "d"):
            past = plus_plus([1.0], [task], past, decay=Decay(task=0.9, model=0.9, tasks_max=2))[1]
        assert list(past.tasks) == ["a", "d"]


class Naive:
    """The same definition over the whole past, one run at a time, with numpy and without decayed sums."""

    def __init__(self) -> None:
        self.past: list[tuple[str | None, float, int]] = []  # task, reward, batch
        self.squares: list[float] = []

    def batch(self, rewards: np.ndarray, tasks: list[str | None]) -> np.ndarray:
        number = max((batch for _, _, batch in self.past), default=-1) + 1
        residuals = []
        for index, (reward, task) in enumerate(zip(rewards, tasks, strict=True)):
            peers: list[tuple[str | None, float, int]] = list(self.past)
            beside = zip(tasks, rewards, strict=True)
            peers += [(t, float(r), number) for i, (t, r) in enumerate(beside) if i != index]
            mine = [peer for peer in peers if task is not None and peer[0] == task]
            weights = np.array([0.9 ** self.age(b, number, task) for _, _, b in mine])
            if weights.sum() < 1.0:
                mine, weights = peers, np.array([0.99 ** self.age(b, number, "") for _, _, b in peers])
            baseline = np.average([r for _, r, _ in mine], weights=weights) if len(mine) else reward
            residuals.append(reward - baseline)
        decayed = [s * 0.99**k for k, s in zip(self.ages(number), self.squares, strict=True)]
        counts = [0.99**k for k in self.ages(number)]
        mean_square = (sum(decayed) + sum(r * r for r in residuals)) / (sum(counts) + len(residuals))
        self.squares += [r * r for r in residuals]
        self.past += [(t, float(r), number) for t, r in zip(tasks, rewards, strict=True)]
        scaled: np.ndarray = np.array(residuals) / (np.sqrt(mean_square) + EPSILON)
        return scaled

    def age(self, batch: int, now: int, task: str | None) -> int:
        """Runs that came in batches after `batch`: of the task, or of all when it is empty."""
        return sum(1 for t, _, b in self.past if batch < b < now and (task == "" or t == task))

    def ages(self, now: int) -> list[int]:
        return [self.age(batch, now, "") for _, _, batch in self.past]


class TestGroups:
    def test_grpo_by_hand(self) -> None:
        found = grpo([1.0, 0.0, 1.0, 0.0, 3.0, 5.0], [1.0] * 6, list("abcdef"), list("gggghh"), scaled=True)
        half = 0.5 / (math.sqrt(1 / 3) + EPSILON)  # unbiased deviation of 1, 0, 1, 0
        one = 1.0 / (math.sqrt(2.0) + EPSILON)
        assert found.values_B == pytest.approx([half, -half, half, -half, -one, one])

    def test_grpo_agrees_with_numpy(self) -> None:
        seed = random.SystemRandom().randrange(2**32)
        print(f"seed {seed}")
        rewards = np.random.default_rng(seed).normal(size=12)
        found = grpo(list(rewards), [1.0] * 12, [str(i) for i in range(12)], ["x"] * 5 + ["y"] * 7, scaled=True)
        expected = [(g - g.mean()) / (g.std(ddof=1) + 1e-6) for g in (rewards[:5], rewards[5:])]
        assert found.values_B == pytest.approx(np.concatenate(expected))

    def test_grpo_can_leave_rewards_in_their_unit(self) -> None:
        found = grpo([2.0, 0.0], [1.0, 1.0], ["a", "b"], ["g", "g"], scaled=False)
        assert found.values_B == pytest.approx([1.0, -1.0])

    def test_equal_rewards_give_nothing(self) -> None:
        assert grpo([0.3] * 3, [1.0] * 3, list("abc"), ["g"] * 3, scaled=True).values_B == pytest.approx([0.0] * 3)

    def test_rloo_by_hand(self) -> None:
        found = rloo([1.0, 2.0, 6.0], [1.0] * 3, list("abc"), ["g"] * 3)
        assert found.values_B == pytest.approx([1 - 4.0, 2 - 3.5, 6 - 1.5])

    def test_rloo_is_n_over_n_minus_1_times_the_centred_reward(self) -> None:
        rewards = [0.5, -1.0, 2.0, 0.0]
        found = rloo(rewards, [1.0] * 4, list("abcd"), ["g"] * 4)
        assert found.values_B == pytest.approx([4 / 3 * (r - np.mean(rewards)) for r in rewards])

    @pytest.mark.parametrize("kind", ["grpo", "rloo"])
    def test_pitfall_9_a_split_run_is_one_member(self, kind: str) -> None:
        def group(rewards: list[float], weights: list[float], runs: str) -> list[float]:
            groups = ["g"] * len(rewards)
            if kind == "grpo":
                return list(grpo(rewards, weights, list(runs), groups, scaled=True).values_B)
            return list(rloo(rewards, weights, list(runs), groups).values_B)

        whole = group([1.0, 0.0, 0.0], [1.0] * 3, "abc")
        split = group([1.0, 1.0, 0.0, 0.0], [0.5, 0.5, 1.0, 1.0], "aabc")
        assert split == pytest.approx([whole[0], *whole])

    def test_pitfall_11_a_single_run_is_refused(self) -> None:
        for runs in ("ab", "bb"):
            groups = ["g", "h"] if runs == "ab" else ["g", "g"]
            with pytest.raises(ValueError, match="has one run"):
                grpo([1.0, 0.0], [1.0, 1.0], list(runs), groups, scaled=True)
            with pytest.raises(ValueError, match="has one run"):
                rloo([1.0, 0.0], [1.0, 1.0], list(runs), groups)
