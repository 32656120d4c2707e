"""Tests of every advantage estimator: values computed by hand, and an independent implementation on random batches."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from headrace_trainer.algorithms.advantages import EPSILON, Advantages, grpo, reinforce_pp, rloo
from headrace_trainer.algorithms.baselines import Baselines, Decay, Mean
from tests.support.presence import draw_seed

NUMBERS = itertools.count()
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
    tasks_min: int = 16,
    decay: Decay = DECAY,
) -> tuple[Advantages, Baselines]:
    names = runs or [f"run {next(NUMBERS)}" for _ in rewards]
    shares = weights or [1.0] * len(rewards)
    return reinforce_pp(
        rewards,
        shares,
        names,
        tasks,
        past or Baselines(),
        decay,
        history_min=history_min,
        tasks_min=tasks_min,
        scale_min=0.0 if scaled else None,
    )


def mean(total: float, weight: float, age: float | None = None) -> Mean:
    return Mean(total=total, weight=weight, age=weight if age is None else age)


class TestReinforcePlusPlus:
    def test_by_hand_within_one_batch(self) -> None:
        advantages, past = plus_plus([1.0, 0.0, 0.0, 5.0], ["a", "a", "a", "b"])
        # a: the mean of the other two; b: nobody else has its task, so nothing is known of it
        assert advantages.baselines_B == pytest.approx([0.0, 0.5, 0.5, 5.0])
        assert advantages.values_B == pytest.approx([1.0, -0.5, -0.5, 0.0])
        assert past.task("a").total == pytest.approx(0.9**2), "the first run is two runs old already"
        assert past.task("a").weight == pytest.approx(1 + 0.9 + 0.9**2)
        assert past.overall.total == pytest.approx(0.99**3 + 5.0)
        assert past.overall.age == 4.0

    def test_the_past_fades_run_by_run_however_runs_were_batched(self) -> None:
        rewards, tasks = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0], ["a", "b", "a", None, "a", "b"]
        names = [f"run {index}" for index in range(6)]
        unsplit = plus_plus(rewards, tasks, runs=names)[1]
        parts = Baselines()
        for reward, task, name in zip(rewards, tasks, names, strict=True):
            parts = plus_plus([reward], [task], parts, runs=[name])[1]
        for task in ("a", "b"):
            assert unsplit.task(task).total == pytest.approx(parts.task(task).total)
            assert unsplit.task(task).weight == pytest.approx(parts.task(task).weight)
        assert unsplit.overall.total == pytest.approx(parts.overall.total)

    def test_by_hand_with_history(self) -> None:
        past = Baselines(tasks={"a": mean(2.0, 4.0)})
        advantages, then = plus_plus([1.0], ["a"], past)
        assert advantages.values_B == pytest.approx([0.5]), "against the history alone, 2/4"
        assert then.task("a").total == pytest.approx(2.0 * 0.9 + 1.0)
        assert then.task("a").weight == pytest.approx(4.0 * 0.9 + 1.0)

    def test_a_single_run_learns_from_its_history(self) -> None:
        past = plus_plus([0.0], ["a"])[1]
        assert plus_plus([1.0], ["a"], past)[0].values_B == pytest.approx([1.0]), "pitfall 11: no group is needed"

    def test_the_very_first_run_has_nothing_to_be_compared_with(self) -> None:
        assert plus_plus([7.0], ["a"])[0].values_B == [0.0]
        assert plus_plus([7.0], [None], scaled=True)[0].values_B == [0.0]

    def test_a_run_without_a_task_is_compared_with_everything(self) -> None:
        past = Baselines(overall=mean(3.0, 4.0))
        assert plus_plus([1.0], [None], past)[0].baselines_B == pytest.approx([0.75])
        little = Baselines(overall=mean(0.25, 0.5))
        assert plus_plus([1.0], [None], little)[0].baselines_B == pytest.approx([0.5])

    def test_where_tasks_do_not_repeat_a_new_one_borrows_the_mean_over_all(self) -> None:
        once = {f"t{n}": mean(1.0, 1.0) for n in range(4)}
        overall = mean(3.0, 4.0)
        borrowed = plus_plus([1.0], ["new"], Baselines(tasks=once, overall=overall), tasks_min=4)[0]
        assert borrowed.baselines_B == pytest.approx([0.75])
        few = plus_plus([1.0], ["new"], Baselines(tasks=once, overall=overall), tasks_min=5)[0]
        assert few.values_B == [0.0]
        again = {**once, "t0": mean(1.9, 1.9), "t1": mean(1.9, 1.9)}
        assert plus_plus([1.0], ["new"], Baselines(tasks=again, overall=overall), tasks_min=4)[0].values_B == [0.0]
        enough = plus_plus([1.0], ["t0"], Baselines(tasks=once, overall=overall), tasks_min=4, history_min=1.0)[0]
        assert enough.baselines_B == [1.0], "one run of its task is as much as was asked for"

    def test_a_late_branch_is_not_compared_with_its_own_run(self) -> None:
        """The first branch of the run came two batches ago, so its weight has decayed since."""

        def baseline(reward: float) -> float:
            past = plus_plus([reward, 2.0], ["a", "a"], runs=["mine", "x"], weights=[0.5, 1.0])[1]
            past = plus_plus([3.0, 1.0], ["a", None], past, runs=["y", "z"])[1]
            return plus_plus([reward], ["a"], past, runs=["mine"], weights=[0.5])[0].baselines_B[0]

        assert baseline(0.0) == pytest.approx(baseline(100.0))
        assert baseline(0.0) == pytest.approx((2.0 * 0.9 + 3.0) / 1.9)

    def test_nor_is_one_without_a_task(self) -> None:
        def baseline(reward: float) -> float:
            past = plus_plus([reward, 2.0], [None, None], runs=["mine", "x"], weights=[0.5, 1.0])[1]
            past = plus_plus([3.0, 1.0], [None, "a"], past, runs=["y", "z"])[1]
            return plus_plus([reward], [None], past, runs=["mine"], weights=[0.5])[0].baselines_B[0]

        assert baseline(0.0) == pytest.approx(baseline(100.0))
        assert baseline(0.0) == pytest.approx((2.0 * 0.99**2 + 3.0 * 0.99 + 1.0) / (0.99**2 + 0.99 + 1.0))

    def test_the_runs_of_a_task_are_forgotten_with_it(self) -> None:
        bound = Decay(task=0.9, model=0.99, tasks_max=2)
        past = plus_plus([1.0] * 4, ["a", "b", "c", None], runs=["x", "y", "z", "w"], decay=bound)[1]
        assert list(past.runs) == ["y", "z", "w"]

    def test_the_runs_that_are_remembered_are_bounded(self) -> None:
        bound = Decay(task=0.9, model=0.99, tasks_max=2, runs_max=2)
        past = plus_plus([1.0] * 3, ["a", "b", "c"], runs=["x", "y", "z"], decay=bound)[1]
        assert list(past.tasks) == ["b", "c"]
        assert list(past.runs) == ["y", "z"]
        assert list(plus_plus([1.0] * 2, ["b", "c"], past, runs=["v", "w"], decay=bound)[1].runs) == ["v", "w"]

    def test_the_history_that_it_takes_is_a_setting(self) -> None:
        past = Baselines(tasks={"a": mean(0.0, 1.0)}, overall=mean(0.0, 9.0))
        assert plus_plus([1.0], ["a"], past, history_min=1.0)[0].values_B == [1.0]
        assert plus_plus([1.0], ["a"], past, history_min=2.0)[0].values_B == [0.0]

    def test_pitfall_9_a_run_counts_once_however_it_was_split(self) -> None:
        unsplit, past_whole = plus_plus([1.0, 0.0], ["a", "a"], runs=["x", "y"])
        split, past_split = plus_plus(
            [1.0, 1.0, 1.0, 1.0, 0.0], ["a"] * 5, runs=["x"] * 4 + ["y"], weights=[0.25] * 4 + [1.0]
        )
        assert unsplit.values_B == pytest.approx([1.0, -1.0])
        assert split.values_B == pytest.approx([1.0] * 4 + [-1.0]), "own branches are no comparison"
        assert past_split.task("a").total == pytest.approx(past_whole.task("a").total)
        assert past_split.squares.weight == pytest.approx(past_whole.squares.weight)
        assert past_split.task("a").weight == pytest.approx(past_whole.task("a").weight)
        assert past_split.squares.value == pytest.approx(past_whole.squares.value)

    def test_pitfall_12_constant_rewards_of_different_tasks_give_no_gradient(self) -> None:
        """Constant rewards give no gradient from the first batch on, in any order of the tasks."""
        for first in (["easy"], ["easy", "hard"], ["hard", "easy", "easy"]):
            past = Baselines()
            for tasks in (first, ["easy"], ["hard"], ["easy", "hard"] * 2):
                rewards = [{"easy": 1.0, "hard": 0.1}[str(task)] for task in tasks]
                names = [f"{past.overall.age} {index}" for index in range(len(tasks))]
                advantages, past = plus_plus(rewards, list(tasks), past, runs=names, scaled=True)
                assert advantages.values_B == [0.0] * len(tasks)

    def test_the_scale_is_the_running_root_mean_square(self) -> None:
        past = Baselines(tasks={"a": mean(0.0, 5.0)}, squares=mean(6.0, 2.0))
        advantages, then = plus_plus([2.0], ["a"], past, scaled=True)
        assert advantages.scales_B == pytest.approx([math.sqrt((6 + 4) / 3) + EPSILON])
        assert advantages.values_B == pytest.approx([2.0 / math.sqrt(10 / 3)], rel=1e-5)
        assert then.squares.total == pytest.approx(6.0 * 0.99 + 4.0)

    def test_it_agrees_with_another_implementation_on_random_streams(self) -> None:
        seed = draw_seed()
        draw = random.Random(seed)
        past, state = Baselines(), Naive()
        for _ in range(6):
            size = draw.randint(1, 9)
            rewards = [draw.gauss(0, 2) for _ in range(size)]
            tasks = [draw.choice(["a", "b", None]) for _ in range(size)]
            advantages, past = plus_plus(rewards, tasks, past, scaled=True)
            assert advantages.values_B == pytest.approx(state.batch(np.array(rewards), tasks), rel=1e-6, abs=1e-6)

    def test_the_tasks_that_are_remembered_are_bounded(self) -> None:
        past = Baselines()
        for task in ("a", "b", "c", "a", "d"):
            past = plus_plus([1.0], [task], past, decay=Decay(task=0.9, model=0.9, tasks_max=2))[1]
        assert list(past.tasks) == ["a", "d"]


class Naive:
    """Oracle: the same definition over all past runs, one run at a time, in numpy and without decayed sums."""

    def __init__(self) -> None:
        self.past: list[tuple[str | None, float, int]] = []  # task, reward, batch
        self.squares: list[float] = []

    def batch(self, rewards: np.ndarray, tasks: list[str | None]) -> np.ndarray:
        number = max((batch for _, _, batch in self.past), default=-1) + 1
        residuals, compared = [], []
        for index, (reward, task) in enumerate(zip(rewards, tasks, strict=True)):
            peers: list[tuple[str | None, float, int]] = list(self.past)
            beside = zip(tasks, rewards, strict=True)
            peers += [(t, float(r), number) for i, (t, r) in enumerate(beside) if i != index]
            mine = [peer for peer in peers if peer[0] == task]
            weights = np.array([0.9 ** self.age(peer, number, task) for peer in mine])
            if task is None:
                mine, weights = peers, np.array([0.99 ** self.age(peer, number, "") for peer in peers])
            is_known = weights.sum() >= (1.0 if task is not None else 1e-6)
            compared.append(is_known)
            baseline = np.average([r for _, r, _ in mine], weights=weights) if is_known else reward
            residuals.append(reward - baseline)
        squares = [r * r for r, is_known in zip(residuals, compared, strict=True) if is_known]
        decayed = sum(s * 0.99 ** (len(self.squares) - 1 - k) for k, s in enumerate(self.squares))
        counts = sum(0.99 ** (len(self.squares) - 1 - k) for k in range(len(self.squares)))
        mean_square = (decayed + sum(squares)) / (counts + len(squares)) if counts + len(squares) else 1.0
        self.squares += squares
        self.past += [(t, float(r), number) for t, r in zip(tasks, rewards, strict=True)]
        scaled: np.ndarray = np.array(residuals) / (np.sqrt(mean_square) + EPSILON)
        return scaled

    def age(self, peer: tuple[str | None, float, int], now: int, task: str | None) -> int:
        """Return the number of runs after `peer` and before the present batch.

        Only runs of `task` count, or all runs if it is empty.
        """
        if peer[2] == now:
            return 0
        position = next(index for index, past_run in enumerate(self.past) if past_run is peer)
        return sum(1 for t, _, _ in self.past[position + 1 :] if task == "" or t == task)


class TestGroups:
    def test_grpo_by_hand(self) -> None:
        advantages = grpo([1.0, 0.0, 1.0, 0.0, 3.0, 5.0], [1.0] * 6, list("abcdef"), list("gggghh"), scale_min=0.0)
        half = 0.5 / (math.sqrt(1 / 3) + EPSILON)  # unbiased deviation of 1, 0, 1, 0
        unit_advantage = 1.0 / (math.sqrt(2.0) + EPSILON)
        assert advantages.values_B == pytest.approx([half, -half, half, -half, -unit_advantage, unit_advantage])

    def test_grpo_agrees_with_numpy(self) -> None:
        seed = draw_seed()
        rewards = np.random.default_rng(seed).normal(size=12)
        advantages = grpo(list(rewards), [1.0] * 12, [str(i) for i in range(12)], ["x"] * 5 + ["y"] * 7, scale_min=0.0)
        expected = [(g - g.mean()) / (g.std(ddof=1) + 1e-6) for g in (rewards[:5], rewards[5:])]
        assert advantages.values_B == pytest.approx(np.concatenate(expected))

    def test_grpo_can_leave_rewards_in_their_unit(self) -> None:
        advantages = grpo([2.0, 0.0], [1.0, 1.0], ["a", "b"], ["g", "g"], scale_min=None)
        assert advantages.values_B == pytest.approx([1.0, -1.0])

    def test_the_noise_of_a_judge_is_no_full_advantage(self) -> None:
        rewards, runs = [0.5, 0.501, 0.5, 0.499], list("abcd")
        assert max(grpo(rewards, [1.0] * 4, runs, ["g"] * 4, scale_min=0.0).values_B) > 1.2
        floor = grpo(rewards, [1.0] * 4, runs, ["g"] * 4, scale_min=0.01)
        assert floor.values_B == pytest.approx([0.0, 0.1, 0.0, -0.1], rel=1e-3, abs=1e-9)
        clear = grpo([0.0, 1.0], [1.0] * 2, runs[:2], ["g"] * 2, scale_min=0.01)
        assert clear.values_B == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-4)

    def test_equal_rewards_give_nothing(self) -> None:
        assert grpo([0.3] * 3, [1.0] * 3, list("abc"), ["g"] * 3, scale_min=0.0).values_B == pytest.approx([0.0] * 3)

    def test_rloo_by_hand(self) -> None:
        advantages = rloo([1.0, 2.0, 6.0], [1.0] * 3, list("abc"), ["g"] * 3)
        assert advantages.values_B == pytest.approx([1 - 4.0, 2 - 3.5, 6 - 1.5])

    def test_rloo_is_n_over_n_minus_1_times_the_centred_reward(self) -> None:
        rewards = [0.5, -1.0, 2.0, 0.0]
        advantages = rloo(rewards, [1.0] * 4, list("abcd"), ["g"] * 4)
        assert advantages.values_B == pytest.approx([4 / 3 * (r - np.mean(rewards)) for r in rewards])

    @pytest.mark.parametrize("kind", ["grpo", "rloo"])
    def test_pitfall_9_a_split_run_is_one_member(self, kind: str) -> None:
        def group(rewards: list[float], weights: list[float], runs: str) -> list[float]:
            groups = ["g"] * len(rewards)
            if kind == "grpo":
                return list(grpo(rewards, weights, list(runs), groups, scale_min=0.0).values_B)
            return list(rloo(rewards, weights, list(runs), groups).values_B)

        unsplit = group([1.0, 0.0, 0.0], [1.0] * 3, "abc")
        split = group([1.0, 1.0, 0.0, 0.0], [0.5, 0.5, 1.0, 1.0], "aabc")
        assert split == pytest.approx([unsplit[0], *unsplit])

    def test_pitfall_11_a_single_run_is_refused(self) -> None:
        for runs in ("ab", "bb"):
            groups = ["g", "h"] if runs == "ab" else ["g", "g"]
            with pytest.raises(ValueError, match="has one run"):
                grpo([1.0, 0.0], [1.0, 1.0], list(runs), groups, scale_min=0.0)
            with pytest.raises(ValueError, match="has one run"):
                rloo([1.0, 0.0], [1.0, 1.0], list(runs), groups)
