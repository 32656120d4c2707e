"""Tests of optimizers, of bfloat16 training, and of stochastic rounding.

The optimizer's state survives a save exactly, and both kinds follow their papers. Weights in bfloat16 are trained by
float32 master weights. A 16-bit version equals the trained weights on average, and equal weights always give equal
bytes.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from headrace_runtime.errors import SettingError
from headrace_trainer.algorithms.settings import LossSettings
from headrace_trainer.learner import Frozen
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.settings import ComputeSettings, LoraSettings, OptimizerSettings
from headrace_trainer.torch_learner import tensors
from headrace_trainer.torch_learner.model.masters import round_stochastically
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.optimizer import Optimizer
from headrace_trainer.torch_learner.step import train
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.test_forward import open_policy
from tests.unit.trainer.test_step import batch_of
from tests.unit.trainer.world import World, policy_of


def push(policy: Policy, optimizer: Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def restore(policy: Policy, optimizer: Optimizer, frozen: Frozen) -> None:
    weights, state = load(bytes(frozen.weights)), load(bytes(frozen.optimizer))
    tensors.restore(policy, optimizer, weights, state, with_random=True)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("rank", [0, 4])
def test_a_restored_optimizer_goes_on_as_if_nothing_had_happened(base: Path, kind: Any, rank: int) -> None:
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
    restore(again, other, frozen)
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
    """A state saved by an earlier release continues with nearly the same steps."""
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


RATE = 1e-6


@pytest.fixture(scope="module")
def narrow(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a base in bfloat16, as published models are."""
    folder = tmp_path_factory.mktemp("narrow") / "model"
    shutil.copytree(base, folder)
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def open_master_policy(folder: Path) -> Policy:
    settings = ComputeSettings(device="cpu", dtype="bfloat16", weights="bfloat16")
    return Policy.open(folder, settings, LoraSettings(), seed=0)


def stepped(policy: Policy, pack_tokens: int = 4096, rate: float = RATE) -> dict[str, Tensor]:
    """Run one training step, and return its gradients by parameter name."""
    optimizer = Optimizer(policy.parameters, OptimizerSettings(learning_rate=rate, gradient_norm_max=1e9))
    train(policy, optimizer, batch_of(1.0, -0.5, 0.7), LossSettings(), pack_tokens, threading.Event())
    return {name: parameter.grad.clone() for name, parameter in policy.parameters.items() if parameter.grad is not None}


def weights_of(policy: Policy) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in policy.model.named_parameters()}


def test_a_step_that_bfloat16_cannot_tell_moves_masters_and_some_weights(narrow: Path) -> None:
    policy = open_master_policy(narrow)
    before, masters = weights_of(policy), policy.tensors()
    assert all(weight.dtype is torch.bfloat16 for weight in before.values())
    gradients = stepped(policy)
    moved = [((policy.parameters[name] != masters[name]) | (of == 0)).flatten() for name, of in gradients.items()]
    assert float(torch.cat(moved).float().mean()) > 0.95
    changed = torch.cat([(weight != before[name]).flatten() for name, weight in weights_of(policy).items()])
    nearest = torch.cat([
        (policy.parameters[name].bfloat16() != before[name]).flatten() for name in before
    ])  # fmt: skip
    assert 0 < float(changed.float().mean()) < 0.2
    assert float(nearest.float().mean()) < float(changed.float().mean())


def test_what_is_trained_on_is_what_a_version_holds(narrow: Path) -> None:
    policy = open_master_policy(narrow)
    stepped(policy, rate=1e-4)
    for name, weight in weights_of(policy).items():
        assert torch.equal(weight, round_stochastically(policy.tensors()[name], torch.bfloat16, name)), name


def test_the_fingerprint_of_the_weights_is_that_of_the_version(narrow: Path) -> None:
    policy = open_master_policy(narrow)
    stepped(policy, rate=1e-4)
    published = {name: round_stochastically(tensor, torch.bfloat16, name) for name, tensor in policy.tensors().items()}
    assert policy.fingerprint() == policy.fingerprint(published)


def test_gradients_of_many_passes_add_up_in_float32_and_nothing_stays_at_the_weights(narrow: Path) -> None:
    single, packed = open_master_policy(narrow), open_master_policy(narrow)
    flat, parts = stepped(single), stepped(packed, pack_tokens=8)
    for name, gradient in flat.items():
        assert gradient.dtype is torch.float32
        error = float((parts[name] - gradient).norm() / gradient.norm().clamp(min=1e-12))
        assert error < 0.03, name
    assert all(weight.grad is None for weight in packed.model.parameters())


def test_gradients_are_those_of_float32_weights_up_to_rounding(narrow: Path) -> None:
    settings = ComputeSettings(device="cpu")
    exact = stepped(Policy.open(narrow, settings, LoraSettings(), seed=0))
    gradients = stepped(open_master_policy(narrow))
    assert gradients.keys() == exact.keys()
    flat = [torch.cat([single[name].flatten() for name in exact]) for single in (gradients, exact)]
    assert float((flat[0] - flat[1]).norm() / flat[1].norm()) < 0.05


def test_saved_and_continued_is_never_stopped(narrow: Path) -> None:
    policy = open_master_policy(narrow)
    optimizer = Optimizer(policy.parameters, OptimizerSettings(learning_rate=1e-4))
    train(policy, optimizer, batch_of(1.0, -0.5), LossSettings(), 4096, threading.Event())
    pair = tensors.freeze(policy, optimizer, "main")
    again = open_master_policy(narrow)
    other = Optimizer(again.parameters, OptimizerSettings(learning_rate=1e-4))
    restore(again, other, pair)
    for name, weight in weights_of(policy).items():
        assert torch.equal(weight, weights_of(again)[name]), name
    for each, mine in ((policy, optimizer), (again, other)):
        train(each, mine, batch_of(0.3, -0.9), LossSettings(), 4096, threading.Event())
    for name, master in policy.tensors().items():
        assert torch.equal(master, again.tensors()[name]), name


def test_a_version_becomes_the_weights_again(narrow: Path) -> None:
    policy = open_master_policy(narrow)
    before = weights_of(policy)
    stepped(policy, rate=1e-2)
    policy.load_files(narrow)
    for name, weight in weights_of(policy).items():
        assert torch.equal(weight, before[name]), name


def test_hidden_matrices_are_told_by_the_weights_that_masters_belong_to(narrow: Path) -> None:
    plain = Policy.open(narrow, ComputeSettings(device="cpu"), LoraSettings(), seed=0)
    assert open_master_policy(narrow).hidden == plain.hidden != frozenset()


def test_it_is_refused_where_versions_are_float32(base: Path) -> None:
    with pytest.raises(SettingError, match=r"trainer\.compute\.weights"):
        open_master_policy(base)


def test_it_is_refused_where_products_run_in_float32(narrow: Path) -> None:
    with pytest.raises(SettingError, match=r"trainer\.compute\.dtype"):
        Policy.open(narrow, ComputeSettings(device="cpu", weights="bfloat16"), LoraSettings(), seed=0)


HALF = [torch.bfloat16, torch.float16]


def weights(dtype: torch.dtype) -> torch.Tensor:
    """Return weights as a base model in `dtype` has them."""
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
    """Rounding to the nearest value would lose nearly the whole step."""
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
    """A value 0.3 units above a grid point is rounded up in 3 of 10 positions, in each row and column."""
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
