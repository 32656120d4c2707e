"""Weights in bfloat16 that learn: the optimizer moves float32 masters, and the model computes with rounded copies."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace_runtime.errors import SettingError
from headrace_trainer.algorithms.settings import LossSettings
from headrace_trainer.settings import ComputeSettings, LoraSettings, OptimizerSettings
from headrace_trainer.torch_learner import tensors
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.optimizer import Optimizer
from headrace_trainer.torch_learner.rounding import round_stochastically
from headrace_trainer.torch_learner.step import train
from tests.unit.trainer.test_step import batch_of

RATE = 1e-6


@pytest.fixture(scope="module")
def narrow(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base in bfloat16, as published models are."""
    folder = tmp_path_factory.mktemp("narrow") / "model"
    shutil.copytree(base, folder)
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def open_policy(folder: Path) -> Policy:
    settings = ComputeSettings(device="cpu", dtype="bfloat16", weights="bfloat16")
    return Policy.open(folder, settings, LoraSettings(), seed=0)


def stepped(policy: Policy, pack_tokens: int = 4096, rate: float = RATE) -> dict[str, Tensor]:
    """The gradients that a step was made of."""
    optimizer = Optimizer(policy.parameters, OptimizerSettings(learning_rate=rate, gradient_norm_max=1e9))
    train(policy, optimizer, batch_of(1.0, -0.5, 0.7), LossSettings(), pack_tokens, threading.Event())
    return {name: parameter.grad.clone() for name, parameter in policy.parameters.items() if parameter.grad is not None}


def weights_of(policy: Policy) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in policy.model.named_parameters()}


def test_a_step_that_bfloat16_cannot_tell_moves_masters_and_some_weights(narrow: Path) -> None:
    policy = open_policy(narrow)
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
    policy = open_policy(narrow)
    stepped(policy, rate=1e-4)
    for name, weight in weights_of(policy).items():
        assert torch.equal(weight, round_stochastically(policy.tensors()[name], torch.bfloat16, name)), name


def test_the_fingerprint_of_the_weights_is_that_of_the_version(narrow: Path) -> None:
    policy = open_policy(narrow)
    stepped(policy, rate=1e-4)
    published = {name: round_stochastically(tensor, torch.bfloat16, name) for name, tensor in policy.tensors().items()}
    assert policy.fingerprint() == policy.fingerprint(published)


def test_gradients_of_many_passes_add_up_in_float32_and_nothing_stays_at_the_weights(narrow: Path) -> None:
    single, packed = open_policy(narrow), open_policy(narrow)
    flat, parts = stepped(single), stepped(packed, pack_tokens=8)
    for name, gradient in flat.items():
        assert gradient.dtype is torch.float32
        error = float((parts[name] - gradient).norm() / gradient.norm().clamp(min=1e-12))
        assert error < 0.03, name
    assert all(weight.grad is None for weight in packed.model.parameters())


def test_gradients_are_those_of_float32_weights_up_to_rounding(narrow: Path) -> None:
    settings = ComputeSettings(device="cpu")
    exact = stepped(Policy.open(narrow, settings, LoraSettings(), seed=0))
    gradients = stepped(open_policy(narrow))
    assert gradients.keys() == exact.keys()
    flat = [torch.cat([single[name].flatten() for name in exact]) for single in (gradients, exact)]
    assert float((flat[0] - flat[1]).norm() / flat[1].norm()) < 0.05


def test_saved_and_continued_is_never_stopped(narrow: Path) -> None:
    policy = open_policy(narrow)
    optimizer = Optimizer(policy.parameters, OptimizerSettings(learning_rate=1e-4))
    train(policy, optimizer, batch_of(1.0, -0.5), LossSettings(), 4096, threading.Event())
    pair = tensors.freeze(policy, optimizer, "main")
    again = open_policy(narrow)
    other = Optimizer(again.parameters, OptimizerSettings(learning_rate=1e-4))
    tensors.thaw(again, other, pair, with_random=True)
    for name, weight in weights_of(policy).items():
        assert torch.equal(weight, weights_of(again)[name]), name
    for each, mine in ((policy, optimizer), (again, other)):
        train(each, mine, batch_of(0.3, -0.9), LossSettings(), 4096, threading.Event())
    for name, master in policy.tensors().items():
        assert torch.equal(master, again.tensors()[name]), name


def test_a_version_becomes_the_weights_again(narrow: Path) -> None:
    policy = open_policy(narrow)
    before = weights_of(policy)
    stepped(policy, rate=1e-2)
    policy.load_files(narrow)
    for name, weight in weights_of(policy).items():
        assert torch.equal(weight, before[name]), name


def test_hidden_matrices_are_told_by_the_weights_that_masters_belong_to(narrow: Path) -> None:
    plain = Policy.open(narrow, ComputeSettings(device="cpu"), LoraSettings(), seed=0)
    assert open_policy(narrow).hidden == plain.hidden != frozenset()


def test_it_is_refused_where_versions_are_float32(base: Path) -> None:
    with pytest.raises(SettingError, match=r"trainer\.compute\.weights"):
        open_policy(base)


def test_it_is_refused_where_products_run_in_float32(narrow: Path) -> None:
    with pytest.raises(SettingError, match=r"trainer\.compute\.dtype"):
        Policy.open(narrow, ComputeSettings(device="cpu", weights="bfloat16"), LoraSettings(), seed=0)
