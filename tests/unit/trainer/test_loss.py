"""Tests of the loss on a grid of signs and sizes, compared with numpy, and of corrections (P4, P10).

In any order of revisions, the weights end close to those of training on only the last revision.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace_runtime.kafka.wire import Record
from headrace_trainer.algorithms.loss import (
    drifted_rows,
    k3,
    likelihood,
    row_counts,
    row_sums,
    token_loss,
    unweighted_loss,
)
from headrace_trainer.algorithms.losses import LossInputs
from headrace_trainer.algorithms.settings import LossSettings
from headrace_trainer.batches.batch import Batch
from headrace_trainer.lineage.store import LineageStore
from headrace_trainer.trainer import Trainer
from tests.learning.corrections import Case, rest
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import Idle, World, experience

GRID = list(itertools.product([-1.5, -0.2, 0.0, 0.2, 0.9], [-1.0, -0.1, 0.0, 0.3, 2.0], [-2.0, -0.5, 0.0, 0.7]))
"""(current - start, start - behaviour, advantage)"""
BEHAVIOUR = -2.5


def tensors() -> tuple[torch.Tensor, ...]:
    behaviour_N = torch.full((len(GRID),), BEHAVIOUR, dtype=torch.float64)
    moved_N, drift_N, advantage_N = (torch.tensor(column, dtype=torch.float64) for column in zip(*GRID, strict=True))
    start_N = behaviour_N + drift_N
    return (start_N + moved_N).requires_grad_(), start_N, behaviour_N, advantage_N


def oracle(moved: float, drift: float, advantage: float, s: LossSettings) -> tuple[float, float]:
    """Return the loss and its derivative with respect to the current logprob, in plain arithmetic."""
    if not s.mask_low <= np.exp(drift) <= s.mask_high:
        return 0.0, 0.0
    weight = min(np.exp(drift), s.weight_max) if s.proximal == "step" else 1.0
    ratio = np.exp(moved) if s.proximal == "step" else np.exp(moved + drift)
    too_high = advantage > 0 and ratio > 1 + s.clip_high
    too_low = advantage < 0 and ratio < 1 - s.clip_low
    if too_high:
        return -weight * (1 + s.clip_high) * advantage, 0.0
    if too_low:
        return -weight * (1 - s.clip_low) * advantage, 0.0
    if s.clip_dual is not None and advantage < 0 and ratio > s.clip_dual:
        return -weight * s.clip_dual * advantage, 0.0
    return -weight * ratio * advantage, -weight * ratio * advantage


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"proximal": "behaviour"},
        {"clip_dual": 1.5},
        {"clip_low": 0.1, "clip_high": 0.1, "weight_max": 1.0},
        {"mask_low": 0.5, "mask_high": 2.0},
        {"mask_low": 0.5, "mask_high": 2.0, "proximal": "behaviour", "clip_dual": 2.0},
    ],
    ids=str,
)
def test_loss_and_gradient_are_those_of_the_formula(fields: dict[str, Any]) -> None:
    settings = LossSettings(**fields)
    current_N, start_N, behaviour_N, advantage_N = tensors()
    losses = token_loss(current_N, start_N, behaviour_N, advantage_N, settings)
    torch.autograd.backward(losses.loss_N.sum())
    expected = np.array([oracle(*point, settings) for point in GRID])
    np.testing.assert_allclose(losses.loss_N.detach().numpy(), expected[:, 0], rtol=1e-9, atol=1e-12)
    assert current_N.grad is not None
    np.testing.assert_allclose(current_N.grad.numpy(), expected[:, 1], rtol=1e-9, atol=1e-12)


def test_nothing_but_the_present_weights_has_a_gradient() -> None:
    current_N, start_N, behaviour_N, advantage_N = (logprobs.detach().requires_grad_() for logprobs in tensors())
    torch.autograd.backward(token_loss(current_N, start_N, behaviour_N, advantage_N, LossSettings()).loss_N.sum())
    assert current_N.grad is not None
    assert start_N.grad is None
    assert behaviour_N.grad is None


def test_on_policy_it_is_the_plain_policy_gradient() -> None:
    current_N = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantage_N = torch.tensor([1.0, -2.0, 0.0])
    losses = token_loss(current_N, current_N.detach(), current_N.detach(), advantage_N, LossSettings())
    torch.autograd.backward(losses.loss_N.sum())
    assert current_N.grad is not None
    assert current_N.grad.tolist() == [-1.0, 2.0, 0.0], "minus the advantage: descent makes good tokens likelier"
    assert not losses.clipped_N.any()
    assert not losses.truncated_N.any()
    assert not losses.masked_N.any()


def test_what_was_truncated_masked_and_clipped_is_counted() -> None:
    behaviour_N = torch.zeros(4)
    start_N = torch.tensor([1.0, -1.0, 5.0, 0.0])
    current_N = start_N + torch.tensor([0.0, 0.0, 0.0, 1.0])
    settings = LossSettings(weight_max=2.0, mask_high=100.0)
    losses = token_loss(current_N, start_N, behaviour_N, torch.full((4,), 2.0), settings)
    assert losses.truncated_N.tolist() == [True, False, True, False]
    assert losses.masked_N.tolist() == [False, False, True, False]
    assert losses.clipped_N.tolist() == [False, False, False, True]
    assert losses.weight_N.tolist() == pytest.approx([2.0, np.exp(-1.0), 2.0, 1.0])


def test_absurd_differences_stay_finite() -> None:
    current_N = torch.tensor([-0.0, -500.0], requires_grad=True)
    behaviour_N = torch.tensor([-500.0, -0.0])
    for proximal in ("step", "behaviour"):
        settings = LossSettings(proximal=proximal, mask_high=1e30)
        losses = token_loss(current_N, current_N.detach(), behaviour_N, torch.tensor([-1.0, 1.0]), settings)
        torch.autograd.backward(losses.loss_N.sum())
        assert torch.isfinite(losses.loss_N).all()
        assert current_N.grad is not None
        assert torch.isfinite(current_N.grad).all()


def test_k3_by_hand_never_negative_and_zero_only_for_equals() -> None:
    logprobs_N, reference_N = torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.0, -2.0, -1.0])
    expected = [0.0, np.exp(-1) - 1 + 1, np.exp(1) - 1 - 1]
    assert k3(logprobs_N, reference_N).tolist() == pytest.approx(expected)


def test_k3_estimates_the_divergence() -> None:
    """The expectation of k3 under the policy is the exact KL, summed over a small vocabulary."""
    generator = torch.Generator().manual_seed(5)
    policy_V, reference_V = (torch.randn(6, generator=generator).log_softmax(-1) for _ in range(2))
    exact = (policy_V.exp() * (policy_V - reference_V)).sum()
    torch.testing.assert_close((policy_V.exp() * k3(policy_V, reference_V)).sum(), exact)


def sampled(left_out_N: torch.Tensor | None = None) -> LossInputs:
    current_N, start_N, behaviour_N, advantage_N = tensors()
    return LossInputs(current_N, start_N, behaviour_N, advantage_N, torch.zeros(len(GRID)).long(), left_out_N)


def test_a_likelihood_is_minus_advantage_times_logprob_whoever_sampled() -> None:
    inputs = sampled()
    losses = likelihood(inputs, LossSettings())
    expected_N = [-a * (moved + drift + BEHAVIOUR) for moved, drift, a in GRID]
    np.testing.assert_allclose(losses.loss_N.detach(), expected_N, atol=1e-12)
    torch.autograd.backward(losses.loss_N.sum())
    np.testing.assert_allclose(inputs.current_N.grad, [-a for _, _, a in GRID])  # type: ignore[arg-type]
    assert not (losses.masked_N | losses.clipped_N).any()
    assert (losses.weight_N == 1).all()


def test_what_is_left_out_has_no_loss_and_says_so() -> None:
    out_N = torch.arange(len(GRID)) % 3 == 0
    inputs = sampled(out_N)
    clipped_N = torch.arange(len(GRID)) % 2 == 0
    losses = unweighted_loss(inputs.current_N, inputs, clipped_N)
    assert torch.equal(losses.masked_N, out_N)
    assert torch.equal(losses.clipped_N, clipped_N)
    assert torch.equal(losses.loss_N, torch.where(out_N, 0.0, inputs.current_N))


def test_rows_are_summed_and_counted() -> None:
    row_N = torch.tensor([2, 0, 2, 2])
    assert row_sums(torch.tensor([1.0, 2.0, 4.0, 8.0]), row_N, 4).tolist() == [2.0, 0.0, 13.0, 0.0]
    assert row_counts(row_N, 4).tolist() == [1, 0, 3, 0]


def test_rows_that_drifted_are_left_out_by_their_mean_and_in_both_directions() -> None:
    behaviour_N = torch.full((6,), -1.0)
    start_N = torch.tensor([-1.0, -0.5, -2.0, -2.0, -0.4, 0.4])
    row_N = torch.tensor([0, 0, 1, 1, 2, 2])
    assert drifted_rows(start_N, behaviour_N, row_N, 3, 0.5).tolist() == [False, True, True]
    assert drifted_rows(start_N, behaviour_N, row_N, 3, 1.0).tolist() == [False, False, False]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def advantages(world: World, trainer: Trainer, number: int) -> list[float]:
    assert trainer.lineage is not None
    entry = trainer.lineage.state.window.get(f"e{number}")
    assert entry is not None
    return [contribution.advantage for contribution in entry.contributions]


async def begin(world: World, make: Make, **settings: Any) -> str:
    await world.run(make(**settings))
    version = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, version, reward=float(n % 2), task="t") for n in range(4)))
    await world.run(make(**settings))
    return version


async def test_a_revision_of_what_still_waits_replaces_it(world: World, make: Make) -> None:
    await world.run(make())
    version = world.bus.checkpoints[0].version
    world.bus.produce(
        experience(0, version, 0.0), experience(0, version, 1.0, revision=1), experience(0, version, 5.0, revision=2)
    )
    world.bus.produce(*(experience(n, version, 0.0) for n in range(1, 4)))
    await world.run(make())
    expected = {("e0", 0): "superseded", ("e0", 1): "superseded", ("e0", 2): "trained"}
    assert {key: outcome for key, outcome in world.bus.fates.items() if key[0] == "e0"} == expected
    assert next(verdict for verdict in world.bus.verdicts if not verdict.dropped).experience_id == "e0", "same place"
    assert world.reporter.steps[0]["reward_mean"] == 5 / 4


async def test_a_withdrawal_of_what_still_waits_removes_it(world: World, make: Make) -> None:
    await world.run(make())
    version = world.bus.checkpoints[0].version
    world.bus.produce(experience(0, version), experience(0, version, None, revision=1, branch=False))
    await world.run(make())
    assert world.bus.fates == {("e0", 0): "superseded", ("e0", 1): "withdrawn"}


async def test_a_revision_after_training_adds_what_is_missing(world: World, make: Make) -> None:
    version = await begin(world, make)
    world.bus.produce(experience(1, version, 0.0, revision=1, task="t"))
    trainer = await world.run(make(), wait_s=31)
    assert world.bus.fates["e1", 1] == "trained"
    first, second = advantages(world, trainer, 1)
    assert first > 0
    same_reward = advantages(world, trainer, 0)[0]
    assert first + second < 0
    assert second == pytest.approx(-1.0 * first / (1 - 1 / 3), rel=1e-5), "(0 - 1) in the units of the first training"
    assert same_reward < 0
    assert world.reporter.steps[-1]["corrections"] == 1


@pytest.mark.parametrize("with_tokens", [True, False])
async def test_a_withdrawal_after_training_takes_everything_back(world: World, make: Make, with_tokens: bool) -> None:
    """The withdrawal may come without tokens; then the trainer reads them again from the bus."""
    version = await begin(world, make)
    world.bus.produce(experience(1, version, None, revision=1, branch=with_tokens))
    trainer = await world.run(make(), wait_s=31)
    assert world.bus.fates["e1", 1] == "trained"
    assert sum(advantages(world, trainer, 1)) == pytest.approx(0.0, abs=1e-7)


async def test_a_withdrawal_whose_tokens_are_gone_is_dropped_and_said(world: World, make: Make) -> None:
    version = await begin(world, make)
    world.bus.produce(experience(1, version, None, revision=1, branch=False))
    trainer = world.trainer(make())
    fetched: list[tuple[int, int]] = []

    async def find_expiry(positions: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Record]:
        fetched.extend(positions)
        return {}

    world.source.fetch = find_expiry  # type: ignore[method-assign]
    with pytest.raises(Idle):
        await trainer.run()
    first = next(r for r in world.bus.records if r.topic == "experiences" and b'"e1"' in (r.value or b""))
    assert fetched == [(first.partition, first.offset)]
    assert world.bus.fates["e1", 1] == "withdrawn"


async def test_an_unchanged_reward_is_not_trained_again(world: World, make: Make) -> None:
    version = await begin(world, make)
    world.bus.produce(experience(1, version, 1.0, revision=1, task="t"))
    await world.run(make(), wait_s=31)
    assert world.bus.fates["e1", 1] == "unchanged"
    assert len(world.bus.checkpoints) == 2


async def test_there_and_back_again_is_nothing(world: World, make: Make) -> None:
    version = await begin(world, make)
    for revision, reward in ((1, 0.0), (2, None), (3, 1.0)):
        world.bus.produce(experience(1, version, reward, revision=revision, task="t"))
        trainer = await world.run(make(), wait_s=31)
        assert world.bus.fates["e1", revision] == "trained"
    assert sum(advantages(world, trainer, 1)) == pytest.approx(advantages(world, trainer, 1)[0], abs=1e-6)


async def test_a_late_lower_revision_changes_nothing(world: World, make: Make) -> None:
    await world.run(make())
    version = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, version, float(n), revision=2) for n in range(4)))
    await world.run(make())
    world.bus.produce(experience(1, version, 9.0, revision=1), experience(1, version, 1.0, revision=2))
    await world.run(make())
    assert world.bus.fates["e1", 1] == "already_trained"
    assert len(world.bus.fates) == 5, "the redelivery of revision 2 has no second verdict"


@pytest.mark.parametrize("before", [pytest.param(0, marks=pytest.mark.long), 6])
@pytest.mark.parametrize(
    ("full_rows", "first", "second"),
    [
        pytest.param(8, 1, 8, marks=pytest.mark.long),
        (8, 8, 1),
        pytest.param(8, 4, 4, marks=pytest.mark.long),
        (1, 1, 1),
    ],
)
def test_a_correction_undoes_what_it_says(base: Path, full_rows: int, first: int, second: int, before: int) -> None:
    """The optimizer is AdamW with default settings. `make check NAME=learning` measures larger batches."""
    remainder = rest(base, Case(full_rows, first, second, before, seed=7))
    print(remainder)
    assert remainder.worst < 0.25


def test_a_correction_with_another_normaliser_is_seen(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected fault: the correction takes the token weight of the batch that it is trained in."""
    monkeypatch.setattr(Batch, "with_token_weight", lambda self, row: replace(row, token_weight=self.token_weight))
    assert rest(base, Case(8, 8, 1, 6, seed=7)).worst > 0.25


async def test_a_correction_comes_with_the_weight_of_its_first_training(world: World, make: Make) -> None:
    """The contribution was one of four; the correction is alone in a batch that was cut by time."""
    version = await begin(world, make)
    world.bus.produce(experience(1, version, None, revision=1))
    trainer = await world.run(make(), wait_s=31)
    assert trainer.lineage is not None
    entry = trainer.lineage.state.window.get("e1")
    assert entry is not None
    first, second = entry.contributions
    assert first.token_weight == second.token_weight > 0


async def test_a_correction_of_what_an_earlier_release_trained_is_trained_with_its_batch(
    world: World, make: Make
) -> None:
    version = await begin(world, make)
    store = LineageStore(world.blobs, "main")
    store.take_over()
    saved = store.load()
    assert saved is not None
    entry = saved.window["e1"]
    unknown = tuple(contribution.model_copy(update={"token_weight": 0.0}) for contribution in entry.contributions)
    window = saved.window | {"e1": entry.model_copy(update={"contributions": unknown})}
    store.save(saved.model_copy(update={"window": window}))
    store.release()
    world.bus.produce(experience(1, version, None, revision=1))
    trainer = await world.run(make(), wait_s=31)
    assert world.bus.fates["e1", 1] == "trained"
    assert sum(advantages(world, trainer, 1)) == pytest.approx(0.0, abs=1e-7)
