"""The optimizer's state survives a save exactly, and both kinds follow their papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headrace_runtime.errors import SettingError
from headrace_trainer.settings import OptimizerSettings
from headrace_trainer.torch_learner import tensors
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.optimizer import Optimizer
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
    frozen = tensors.freeze(policy, optimizer, "main")
    drawn = torch.rand(3)
    push(policy, optimizer, 2)

    again = open_policy(base, rank)
    other = Optimizer(again.parameters, settings)
    push(again, other, 99)
    tensors.thaw(again, other, frozen, with_random=True)
    assert torch.equal(torch.rand(3), drawn), "the random state too"
    assert other.updates == 2
    push(again, other, 2)
    assert all(torch.equal(tensor, policy.tensors()[name]) for name, tensor in again.tensors().items())
    assert tensors.freeze(again, other, "main").weights == tensors.freeze(policy, optimizer, "main").weights


def test_equal_tensors_give_equal_bytes(base: Path) -> None:
    policy = open_policy(base)
    optimizer = Optimizer(policy.parameters, OptimizerSettings(learning_rate=1e-5))
    copies = [tensors.freeze(policy, optimizer, "main") for _ in range(20)]
    assert len({(bytes(copy.weights), bytes(copy.optimizer)) for copy in copies}) == 1


def test_lineages_share_no_blob(base: Path) -> None:
    policy = open_policy(base)
    optimizer = Optimizer(policy.parameters, OptimizerSettings(learning_rate=1e-5))
    mine, other_lineage = (tensors.freeze(policy, optimizer, lineage) for lineage in ("a", "b"))
    assert {bytes(mine.weights), bytes(mine.optimizer)}.isdisjoint(
        (bytes(other_lineage.weights), bytes(other_lineage.optimizer))
    )


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
    optimizer = Optimizer(weights, OptimizerSettings(learning_rate=1e-5, gradient_norm_max=1.0, beta1=0.0))
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
        optimizer = Optimizer({"w": weight}, OptimizerSettings(kind=kind, learning_rate=1e-5))
        weight.grad = torch.zeros(3, 3)
        optimizer.step()
        assert torch.equal(weight.detach(), torch.ones(3, 3))


def test_a_constant_gradient_moves_as_in_adam_from_the_first_update_on() -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = Optimizer({"w": weight}, OptimizerSettings(learning_rate=0.1, gradient_norm_max=1e9))
    for update, share in enumerate((1.0, 1.0, 0.25, 0.5, 0.25, 1.0)):
        before = weight.detach().clone()
        weight.grad = torch.full((3,), 2.0) * share
        optimizer.step(share)
        step = before - weight.detach()
        if update < 2:
            torch.testing.assert_close(step, torch.full((3,), 0.1), atol=1e-5, rtol=0)
        assert 0.0 < float(step.max()) <= 0.1 * share * 1.6, "a part of a batch is a part of a step"


def test_a_gradient_of_zero_spends_no_momentum() -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = Optimizer({"w": weight}, OptimizerSettings(learning_rate=0.1))
    for gradient in (1.0, -0.5, 0.7):
        weight.grad = torch.full((3,), gradient)
        optimizer.step()
    before, state = weight.detach().clone(), optimizer.state()
    weight.grad = torch.zeros(3)
    optimizer.step()
    assert torch.equal(weight.detach(), before)
    assert all(torch.equal(tensor, state[name]) for name, tensor in optimizer.state().items())


def test_the_state_of_torchs_adamw_is_taken_over() -> None:
    """A state of an earlier release continues with nearly the same steps."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(50, generator=generator) for _ in range(120)]
    torch_parameter, adam_parameter = nn.Parameter(torch.zeros(50)), nn.Parameter(torch.zeros(50))
    old = torch.optim.AdamW([torch_parameter], lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)
    for gradient in gradients[:100]:
        torch_parameter.grad = gradient.clone()
        old.step()
    saved = {f"w/{kind}": value.detach().clone() for kind, value in old.state[torch_parameter].items()}
    optimizer = Optimizer({"w": adam_parameter}, OptimizerSettings(learning_rate=0.1, gradient_norm_max=1e9))
    optimizer.load(saved | {"updates": torch.tensor([100])})
    start = torch_parameter.detach().clone()
    for gradient in gradients[100:]:
        torch_parameter.grad, adam_parameter.grad = gradient.clone(), gradient.clone()
        old.step()
        optimizer.step()
    assert optimizer.updates == 120
    moved = torch_parameter.detach() - start
    assert float((adam_parameter.detach() - moved).norm() / moved.norm()) < 0.15


def test_a_state_of_the_other_kind_is_refused_by_name() -> None:
    weight = nn.Parameter(torch.zeros(3, 3))
    muon = Optimizer({"w": weight}, OptimizerSettings(kind="muon", learning_rate=1e-5), {"w"})
    weight.grad = torch.ones(3, 3)
    muon.step()
    with pytest.raises(SettingError, match="'adamw': the saved lineage has another one for w"):
        Optimizer({"w": weight}, OptimizerSettings(learning_rate=1e-5)).load(muon.state())
