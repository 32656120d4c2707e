"""The optimizer's state survives a save exactly, and both kinds do what their papers say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headrace_trainer import tensors
from headrace_trainer.optimizer import Optimizer
from headrace_trainer.policy import Policy
from headrace_trainer.settings import OptimizerSettings
from tests.unit.trainer.test_forward import open_policy


def push(policy: Policy, optimizer: Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("rank", [0, 4])
def test_a_thawed_optimizer_goes_on_as_if_nothing_had_happened(base: Path, kind: Any, rank: int) -> None:
    settings = OptimizerSettings(kind=kind, learning_rate=1e-2, warmup_updates=3)
    policy = open_policy(base, rank)
    optimizer = Optimizer(policy.parameters, settings)
    for seed in range(2):
        push(policy, optimizer, seed)
    weights, state = tensors.freeze(policy, optimizer, "main")
    drawn = torch.rand(3)
    push(policy, optimizer, 2)

    again = open_policy(base, rank)
    other = Optimizer(again.parameters, settings)
    push(again, other, 99)
    tensors.thaw(again, other, weights, state, with_random=True)
    assert torch.equal(torch.rand(3), drawn), "the random state too"
    assert other.updates == 2
    push(again, other, 2)
    assert all(torch.equal(tensor, policy.tensors()[name]) for name, tensor in again.tensors().items())
    assert tensors.freeze(again, other, "main")[0] == tensors.freeze(policy, optimizer, "main")[0]


def test_equal_tensors_give_equal_bytes(base: Path) -> None:
    policy = open_policy(base)
    optimizer = Optimizer(policy.parameters, OptimizerSettings())
    assert len({tensors.freeze(policy, optimizer, "main") for _ in range(20)}) == 1


def test_lineages_share_no_blob(base: Path) -> None:
    policy = open_policy(base)
    optimizer = Optimizer(policy.parameters, OptimizerSettings())
    mine, theirs = (tensors.freeze(policy, optimizer, lineage) for lineage in ("a", "b"))
    assert not set(mine) & set(theirs)


def test_the_warm_up_is_linear_then_constant() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Optimizer({"w": weight}, OptimizerSettings(learning_rate=0.4, warmup_updates=4))
    rates = []
    for _ in range(6):
        rates.append(optimizer.learning_rate)
        weight.grad = torch.ones(2)
        optimizer.step()
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    optimizer.reset()
    assert optimizer.learning_rate == pytest.approx(0.1)


def test_gradients_are_clipped_to_the_global_norm() -> None:
    weights = {name: nn.Parameter(torch.zeros(2)) for name in "ab"}
    optimizer = Optimizer(weights, OptimizerSettings(gradient_norm_max=1.0, beta1=0.0))
    for weight in weights.values():
        weight.grad = torch.full((2,), 2.0)
    assert optimizer.step() == pytest.approx(4.0)
    assert sum(float((w.grad**2).sum()) for w in weights.values() if w.grad is not None) == pytest.approx(1.0, rel=1e-5)


def test_muon_orthogonalises_matrices_and_leaves_tables_to_adamw() -> None:
    parameters = {
        "layers.0.q_proj.weight": nn.Parameter(torch.zeros(8, 8)),
        "embed_tokens.weight": nn.Parameter(torch.zeros(8, 8)),
        "norm.weight": nn.Parameter(torch.zeros(8)),
    }
    settings = OptimizerSettings(kind="muon", learning_rate=0.1, gradient_norm_max=1e9)
    optimizer = Optimizer(parameters, settings, {"layers.0.q_proj.weight"})
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    matrix, table, vector = parameters.values()
    singular = torch.linalg.svdvals(matrix.detach()) / (0.1 * 0.2 * 8**0.5)
    assert ((singular > 0.6) & (singular < 1.3)).all(), "all directions move about as much"
    for other in (table, vector):
        assert other.grad is not None
        assert float(other.detach().square().mean().sqrt()) == pytest.approx(0.1, rel=0.05), "as far as Adam's first"
        torch.testing.assert_close(other.detach().sign(), -other.grad.sign())


def test_without_a_gradient_nothing_moves() -> None:
    for kind in ("adamw", "muon"):
        weight = nn.Parameter(torch.ones(3, 3))
        optimizer = Optimizer({"w": weight}, OptimizerSettings(kind=kind))
        weight.grad = torch.zeros(3, 3)
        optimizer.step()
        assert torch.equal(weight.detach(), torch.ones(3, 3))
