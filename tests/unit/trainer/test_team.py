"""A step that several members share moves the weights as one process does. Here the members are threads;
`make check NAME=ray` shows the same of processes.

The assignment of passes to ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from headrace_trainer.batches.batch import Batch, Row, pack
from headrace_trainer.learner import NotFinite, StepResult
from headrace_trainer.ray_learner import rank_team
from headrace_trainer.ray_learner.rank_team import _merge, deal_passes, pass_budget
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.torch_learner.learner import TorchLearner, open_learner
from headrace_trainer.torch_learner.measures import Measures
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.step import train
from headrace_trainer.torch_learner.team import Team
from tests.unit.trainer.world import experience

GOING_ON = threading.Event()
_SAME = 1e-6


class Threads:
    """The exchange between members of one team."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count, timeout=60)
        self._brought: list[Any] = [None] * count

    def exchange(self, number: int, value: Any) -> list[Any]:
        self._brought[number] = value
        self._barrier.wait()
        values = list(self._brought)
        self._barrier.wait()
        return values


class Member:
    """A `Team` by hand: no torch.distributed. `equal`: as many passes for each, as with weights in parts."""

    def __init__(self, threads: Threads, number: int, *, equal: bool = False) -> None:
        self.threads = threads
        self.number = number
        self.equal = equal

    def budget(self, lengths: Sequence[int], pack_tokens: int) -> int:
        return rank_team.pass_budget(lengths, pack_tokens, self.threads.count)

    def mine(self, packs: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
        hands = rank_team.deal_passes(packs, lengths, self.threads.count)
        own_packs = [packs[index] for index in hands[self.number]]
        return own_packs + [[]] * (max(map(len, hands)) - len(own_packs) if self.equal else 0)

    def add_up(self, parameters: Mapping[str, nn.Parameter]) -> None:
        own_gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        every = self.threads.exchange(self.number, own_gradients)
        for name in {name for gradients in every for name in gradients}:
            parameters[name].grad = torch.stack(
                [member_gradients[name] for member_gradients in every if name in member_gradients]
            ).sum(0)

    def together(self, measures: Measures) -> Measures:
        return _merge(self.threads.exchange(self.number, measures))


class EachForItself(Member):
    """A faulty member that ignores the gradients of the others."""

    def add_up(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.threads.exchange(self.number, None)


def settings_of(base: Path, **more: Any) -> TrainerSettings:
    table = {"base": str(base), "optimizer": {"learning_rate": 1e-3}, "native": {"tokens": 0}}
    return TrainerSettings.model_validate({**table, **more})


def batches(version: str = "m@0123456789abcdef") -> list[Batch]:
    """Return batches of rows of several lengths, with corrections, and one smaller than the team."""

    def row(number: int, advantage: float, weight: float | None = None) -> Row:
        return Row.of(experience(number, version, length=10 + 5 * (number % 4)), advantage, version, weight)

    return [
        Batch(tuple(row(n, 0.5 - n % 3) for n in range(7))),
        Batch((row(7, 1.0), row(8, -1.0), row(0, 0.7, 0.02), row(9, 0.5)), full_rows=7),
        Batch((row(10, 1.0),), full_rows=7),
        Batch((row(1, -0.4, 0.02),), full_rows=7),
    ]


def play(learner: TorchLearner, settings: TrainerSettings, team: Team) -> list[StepResult]:
    outcomes = []
    for batch in batches():
        tokens = learner.policy.pack_tokens
        outcomes.append(train(learner.policy, learner.optimizer, batch, settings.loss, tokens, GOING_ON, team=team))
    return outcomes


def of_members(
    base: Path, settings: TrainerSettings, make: Callable[[Threads, int], Team], count: int
) -> list[tuple[dict[str, torch.Tensor], list[StepResult]]]:
    threads = Threads(count)
    learners = [open_learner(base, settings, Policy) for _ in range(count)]

    def run_member(number: int) -> tuple[dict[str, torch.Tensor], list[StepResult]]:
        results = play(learners[number], settings, make(threads, number))
        return learners[number].policy.tensors(), results

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run_member, range(count)))


def apart(weights: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    assert weights.keys() == other.keys()
    return max(float((weights[name] - other[name]).abs().max()) for name in weights)


CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "adapters": {"lora": {"rank": 2}},
    "two updates and the base": {"loss": {"updates_per_step": 2, "kl": 0.05}},
    "sequences left out": {"loss": {"sequence_mask_max": 1.5}},
}


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_team_moves_the_weights_as_one_process_does(base: Path, name: str, equal: bool) -> None:
    settings = settings_of(base, **CASES[name])
    alone = open_learner(base, settings, Policy)
    expected = _alone(alone, settings)
    results = of_members(base, settings, lambda threads, number: Member(threads, number, equal=equal), 3)
    for weights, member_results in results:
        assert apart(weights, alone.policy.tensors()) < _SAME
        for result, expected_result in zip(member_results, expected, strict=True):
            assert result.left_out == expected_result.left_out
            for measure in expected_result.measured.keys() - {"step_seconds", "tokens_per_second"}:
                assert result.measured[measure] == pytest.approx(
                    expected_result.measured[measure], rel=1e-4, abs=1e-5
                ), measure
    assert apart(results[0][0], results[1][0]) == 0.0, "every member has the same weights"


def _alone(learner: TorchLearner, settings: TrainerSettings) -> list[StepResult]:
    from headrace_trainer.torch_learner.team import ALONE

    return play(learner, settings, ALONE)


def test_members_that_do_not_add_up_are_noticed(base: Path) -> None:
    settings = settings_of(base)
    alone = open_learner(base, settings, Policy)
    _alone(alone, settings)
    results = of_members(base, settings, EachForItself, 2)
    assert apart(results[0][0], alone.policy.tensors()) > 100 * _SAME


def test_what_is_not_finite_in_one_member_is_so_in_all(base: Path) -> None:
    settings = settings_of(base)
    threads = Threads(2)
    rows = tuple(Row.of(experience(n, "m@0123456789abcdef"), float("nan") if n == 0 else 1.0, None) for n in range(4))

    learners = [
        open_learner(base, settings, Policy) for _ in range(2)
    ]  # one after the other: loading is for one thread

    def is_refused(number: int) -> bool:
        learner = learners[number]
        before = learner.freeze()
        tokens, team = learner.policy.pack_tokens, Member(threads, number)
        with pytest.raises(NotFinite):
            train(learner.policy, learner.optimizer, Batch(rows), settings.loss, tokens, GOING_ON, team=team)
        return learner.freeze() == before

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(is_refused, range(2))) == [True, True]


LENGTHS = st.lists(st.integers(1, 60), max_size=24)


def test_the_longest_goes_first_and_to_whoever_has_least() -> None:
    assert deal_passes([[0], [1], [2], [3]], [5, 9, 4, 1], 2) == [[1, 3], [0, 2]]


def test_equal_passes_go_in_turn() -> None:
    assert deal_passes([[0], [1], [2]], [7, 7, 7], 2) == [[0, 2], [1]]


def test_nothing_is_dealt_to_everybody() -> None:
    assert deal_passes([], [], 3) == [[], [], []]


@given(LENGTHS, st.integers(1, 5), st.integers(1, 80))
def test_each_row_is_trained_once_whoever_it_goes_to(lengths: list[int], ranks: int, pack_tokens: int) -> None:
    packs = pack(lengths, pass_budget(lengths, pack_tokens, ranks))
    hands = deal_passes(packs, lengths, ranks)
    assert len(hands) == ranks
    assert sorted(row for hand in hands for number in hand for row in packs[number]) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 5), st.integers(1, 80))
def test_a_pass_that_holds_several_rows_stays_within_both_bounds(
    lengths: list[int], ranks: int, pack_tokens: int
) -> None:
    bound = pass_budget(lengths, pack_tokens, ranks)
    assert 1 <= bound <= pack_tokens
    for rows in pack(lengths, bound):
        assert len(rows) == 1 or sum(lengths[row] for row in rows) <= bound


@pytest.mark.parametrize(("ranks", "passes"), [(1, 1), (2, 2), (4, 4)])
def test_a_small_batch_has_a_pass_for_each_rank(ranks: int, passes: int) -> None:
    lengths = [10] * 8
    packs = pack(lengths, pass_budget(lengths, 4096, ranks))
    assert len(packs) == passes
    assert [len(hand) for hand in deal_passes(packs, lengths, ranks)] == [1] * ranks
