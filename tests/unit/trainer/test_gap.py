"""Tests of the hindsight gap and of the default learning rate.

The gap is compared with all permutations, with results by hand, and with simulated streams. The default learning rate
by model size passes through measured points.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace_runtime.clock import SystemClock
from headrace_runtime.storage.blobs import BlobStore
from headrace_statistics import intervals
from headrace_trainer.algorithms.catalog.hindsight import (
    BLOCK,
    ERROR,
    PERMUTATIONS,
    GapEstimate,
    HindsightSettings,
    ReplyBlock,
    refusal,
)
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.settings import OptimizerSettings
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import optimizer_of, policy_of

SETTINGS = HindsightSettings()
STREAMS = 400
World = Callable[[np.random.Generator, int], ReplyBlock]


def chance_of(block: ReplyBlock) -> float:
    """Return the p-value of the block, independently computed from every permutation of the replies."""
    runs = range(len(block.without_reply_B))
    worth = [sum(float(block.with_reply_BB[pair]) for pair in enumerate(deal)) for deal in itertools.permutations(runs)]
    identity = float(block.with_reply_BB.trace())
    return sum(pair >= identity - 1e-9 for pair in worth) / math.factorial(len(runs))


@pytest.mark.parametrize("count", range(2, 8))
def test_chance_is_the_share_of_all_deals(count: int) -> None:
    for seed in range(6):
        block = read_a_little(np.random.default_rng([count, seed]), count)
        error = 4 * math.sqrt(0.25 / PERMUTATIONS)
        assert GapEstimate().plus([block]).p_value == pytest.approx(chance_of(block), abs=error)


def test_gaps_by_hand() -> None:
    told_BB = np.array([[-1.0, -2.0, -3.0], [-2.0, -1.5, -4.0], [-1.0, -1.0, -3.0]])
    block = ReplyBlock(told_BB, np.array([-4.0, -2.0, -5.0]))
    assert block.gaps.tolist() == [1.5, 0.5, -2.0], "others' mean, no reply, and a reply that is worse than others'"
    estimate = GapEstimate().plus([block, block])
    assert (estimate.count, estimate.mean) == (6, 0.0)
    assert (GapEstimate().mean, GapEstimate().p_value) == (0.0, 1.0)


def test_blocks_add_up_and_are_dealt_alike_again() -> None:
    blocks = [read_a_little(np.random.default_rng(n), 6) for n in range(3)]
    at_once, one_by_one = GapEstimate().plus(blocks), GapEstimate().plus(blocks[:1]).plus(blocks[1:])
    assert at_once == one_by_one
    assert at_once.p_value < min(GapEstimate().plus([block]).p_value for block in blocks)


def test_what_two_passes_round_differently_is_no_gap() -> None:
    """If all replies are equal, a permutation changes only rounding errors."""
    noise_BB = np.random.default_rng(3).normal(-1.0, 1e-8, (6, 6))
    np.fill_diagonal(noise_BB, -1.0 + 1e-7)
    estimate = GapEstimate().plus([ReplyBlock(noise_BB, np.full(6, -1.0))])
    assert estimate.p_value == 1.0
    assert not estimate.is_positive


def test_few_runs_are_enough_where_each_reply_suits_its_own_answer() -> None:
    """With four runs, one permutation in 24 is the identity, and the significance level is 1/20."""
    for count, waits in ((2, True), (3, True), (4, False), (5, False)):
        told_BB = np.full((count, count), -1.2)
        np.fill_diagonal(told_BB, -0.6)
        decision = refusal(GapEstimate().plus([ReplyBlock(told_BB, np.full(count, -1.1))]), SETTINGS)
        assert (decision is not None) == waits
        assert decision is None or decision.undecided


def test_replies_that_are_worse_than_none_are_no_teacher_however_well_they_match() -> None:
    told_BB = np.full((6, 6), -3.0)
    np.fill_diagonal(told_BB, -1.5)
    estimate = GapEstimate().plus([ReplyBlock(told_BB, np.full(6, -1.0))])
    assert estimate.p_value < 0.01
    decision = refusal(estimate, SETTINGS)
    assert decision is not None
    assert "is -0.5 nats a token over 6 runs" in decision.why


def test_what_is_not_a_number_is_not_believed() -> None:
    told_BB = np.full((6, 6), np.nan)
    assert refusal(GapEstimate().plus([ReplyBlock(told_BB, np.zeros(6))]), SETTINGS) is not None


@pytest.mark.parametrize(("count", "quantile"), [(8, 2.364624), (16, 2.131450), (64, 1.998341)])
def test_the_guard_s_interval_is_student_s(count: int, quantile: float) -> None:
    values = np.random.default_rng(count).normal(0.3, 2.0, count)
    bound = intervals.lower_bound(list(values), 0.025)
    assert bound == pytest.approx(values.mean() - quantile * values.std(ddof=1) / math.sqrt(count), abs=2e-3)
    assert intervals.lower_bound([1.0], 0.025) == -math.inf


def read_nothing(draw: np.random.Generator, count: int) -> ReplyBlock:
    """Simulate a base that ignores replies.

    The logprob of an answer does not depend on which reply precedes it, or whether any does. Answers and replies have
    heavy-tailed effects of their own.
    """
    answers, replies = draw.standard_t(2, (count, 1)), draw.standard_t(2, (1, count))
    told_BB = draw.standard_t(2, (count, count)) + answers + replies
    return ReplyBlock(told_BB, draw.standard_t(2, count) + answers[:, 0])


def read_nothing_and_hate_silence(draw: np.random.Generator, count: int) -> ReplyBlock:
    """Simulate the hardest case: any reply raises the logprob of any answer, and the own reply has no further
    effect."""
    block = read_nothing(draw, count)
    return ReplyBlock(block.with_reply_BB, block.without_reply_B - 50.0)


def read_a_little(draw: np.random.Generator, count: int) -> ReplyBlock:
    """Simulate the gains measured on the e-mail agent: a few replies have a large gain, most have a small one."""
    told_BB = draw.normal(-1.5, 0.3, (count, count))
    own_B = draw.lognormal(-0.6, 0.8, count)
    return ReplyBlock(told_BB + np.diag(own_B), draw.normal(-1.7, 0.3, count))


def blocks_of(draw: np.random.Generator, world: World, count: int) -> Iterator[ReplyBlock]:
    for part in np.array_split(np.arange(count), -(-count // BLOCK)):
        yield world(draw, len(part))


def believed(seed: int, world: World, first: int) -> bool:
    """Return whether training begins if the number of runs is doubled until there is a decision."""
    draw = np.random.default_rng([first, seed])
    estimate, count = GapEstimate().plus(blocks_of(draw, world, first)), first
    while (decision := refusal(estimate, SETTINGS)) is not None and decision.undecided:
        estimate, count = estimate.plus(blocks_of(draw, world, count)), 2 * count
    return decision is None


@pytest.mark.parametrize("first", [4, 7])
def test_error_rates(first: int) -> None:
    share = {
        world.__name__: np.mean([believed(seed, world, first) for seed in range(STREAMS)])
        for world in (read_nothing, read_nothing_and_hate_silence, read_a_little)
    }
    print(f"first look at {first} runs: {share}")
    noise = 3 * math.sqrt(ERROR * (1 - ERROR) / STREAMS)
    assert share["read_nothing"] <= ERROR
    assert share["read_nothing_and_hate_silence"] <= ERROR + noise
    assert share["read_a_little"] >= 0.99


def test_it_decides_earlier_than_student_s_interval() -> None:
    """The batches have five runs."""
    blocks = [read_a_little(np.random.default_rng(seed), 5) for seed in range(STREAMS)]
    dealt = np.mean([refusal(GapEstimate().plus([block]), SETTINGS) is None for block in blocks])
    mean = np.mean([intervals.lower_bound(block.gaps.tolist(), 0.025) > 0 for block in blocks])
    print(f"deals {dealt:.2f}, Student {mean:.2f}")
    assert dealt > 0.8 > mean


def test_planted_an_error_that_is_not_spent_is_seen() -> None:
    """Injected fault: each look after a block uses the whole error probability."""
    hits = 0
    for seed in range(STREAMS // 4):
        draw, estimate = np.random.default_rng(seed), GapEstimate()
        for _ in range(24):
            estimate = estimate.plus([read_nothing_and_hate_silence(draw, 4)])
            if estimate.is_positive and estimate.p_value <= ERROR:
                hits += 1
                break
    assert hits / (STREAMS // 4) > ERROR + 0.1


@pytest.mark.parametrize(
    ("parameters", "adapters", "rate"),
    [
        (5_000, False, 1e-4),
        (400_000, False, 1e-4),
        (400_000, True, 1e-3),
        (1_700_000_000, False, 3.2e-6),
        (7_000_000_000, False, 1.6e-6),
    ],
)
def test_it_falls_with_the_root_of_the_parameters(parameters: int, *, adapters: bool, rate: float) -> None:
    assert OptimizerSettings().with_rate_for_size(parameters, adapters=adapters).rate == pytest.approx(rate)


def test_what_is_set_stays() -> None:
    assert OptimizerSettings(learning_rate=0.5).with_rate_for_size(7, adapters=True).rate == 0.5


def test_a_lineage_trains_with_that_of_its_model(tmp_path: Path, make: Make) -> None:
    settings = make(optimizer={})
    lineage = open_lineage(settings, BlobStore((tmp_path / "blobs").as_uri()), SystemClock())
    expected = settings.optimizer.with_rate_for_size(policy_of(lineage).size, adapters=False).rate
    assert optimizer_of(lineage).learning_rate == expected
    assert expected == 1e-4
