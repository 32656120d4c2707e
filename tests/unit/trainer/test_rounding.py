"""A version in 16 bits equals the trained weights on average; and the same weights always give the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.torch_learner.rounding import round_stochastically
from tests.support.torch_learners import policy_of
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import World

HALF = [torch.bfloat16, torch.float16]


def weights(dtype: torch.dtype) -> torch.Tensor:
    """Return weights as a base model in this type has them."""
    generator = torch.Generator().manual_seed(0)
    return (0.02 * torch.randn(300, 400, generator=generator)).to(dtype).float()


@pytest.mark.parametrize("dtype", HALF)
def test_what_has_not_moved_is_what_it_was(dtype: torch.dtype) -> None:
    base = weights(dtype)
    base[0, :4] = torch.tensor([0.0, -0.0, float("inf"), float("nan")])
    assert torch.equal(round_stochastically(base, dtype, "w").view(torch.int16), base.to(dtype).view(torch.int16))


@pytest.mark.parametrize("step", [1e-6, -1e-6, 3e-5])
@pytest.mark.parametrize("dtype", HALF)
def test_a_small_step_is_in_the_version_on_average(dtype: torch.dtype, step: float) -> None:
    """To the nearest value almost none of it would be."""
    base = weights(dtype)
    moved = base + step
    change = round_stochastically(moved, dtype, "w").float() - base
    assert float(change.mean()) == pytest.approx(step, rel=0.15)
    if dtype is torch.bfloat16 and abs(step) < 1e-5:
        assert abs(float((moved.to(dtype).float() - base).mean())) < 0.5 * abs(step)


@pytest.mark.parametrize("dtype", HALF)
def test_a_weight_that_goes_up_goes_up_once(dtype: torch.dtype) -> None:
    base = weights(dtype)
    last = round_stochastically(base, dtype, "w").float()
    for share in range(1, 40):
        now = round_stochastically(base + share * 2e-6, dtype, "w").float()
        assert (now >= last).all()
        last = now


def test_the_result_is_a_neighbour_and_depends_on_nothing_but_the_place() -> None:
    exact = 0.02 * torch.randn(5000, generator=torch.Generator().manual_seed(1))
    rounded = round_stochastically(exact, torch.bfloat16, "w")
    nearest = exact.to(torch.bfloat16)
    assert (rounded.view(torch.int16) - nearest.view(torch.int16)).abs().max() == 1
    assert torch.equal(rounded, round_stochastically(exact.clone(), torch.bfloat16, "w"))
    assert not torch.equal(rounded, round_stochastically(exact, torch.bfloat16, "other")), "tensors draw for themselves"
    assert torch.equal(round_stochastically(exact, torch.float32, "w"), exact)


def test_the_draws_are_even() -> None:
    """Along a row and down a column: 0.3 of a unit above is rounded up in 3 of 10 places."""
    unit = 2.0**-9
    exact = torch.full((512, 512), 0.25 + 0.3 * unit)
    up = (round_stochastically(exact, torch.bfloat16, "w").float() > 0.25).float()
    assert float(up.mean()) == pytest.approx(0.3, abs=0.01)
    for side in (0, 1):
        assert float(up.mean(side).std()) == pytest.approx((0.3 * 0.7 / 512) ** 0.5, rel=0.15)


def test_muon_is_for_matrices_between_hidden_layers(tmp_path: Path, make: Make) -> None:
    policy = policy_of(open_lineage(make(), World(tmp_path).blobs, World(tmp_path).clock))
    assert {name.rsplit(".", 2)[-2] for name in policy.hidden} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
