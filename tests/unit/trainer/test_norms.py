"""RMS norms with a gradient of their own: the textbook's numbers, and only where a module's own code computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headrace_trainer.settings import ComputeSettings, LoraSettings
from headrace_trainer.torch_learner.model import norms
from headrace_trainer.torch_learner.model.norms import NormFormula
from headrace_trainer.torch_learner.model.policy import Policy
from tests.architectures.catalog import CATALOG
from tests.unit.trainer.test_forward import open_policy

WIDTH = 12


class PlainRMSNorm(nn.Module):
    shift = 0.0

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self.shift) * (x * scale)


class ShiftedRMSNorm(PlainRMSNorm):
    shift = 1.0


def results(module: nn.Module, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    leaf = x.detach().clone().requires_grad_()
    module.zero_grad()
    out = module(leaf)
    torch.autograd.backward((out * upstream).sum())
    assert leaf.grad is not None
    gradients = {"out": out.detach(), "x": leaf.grad}
    gradients |= {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {name: tensor.double() for name, tensor in gradients.items()}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        size = float(tensor.abs().max())
        torch.testing.assert_close(actual[name], tensor, rtol=1e-5, atol=2e-6 * size + 1e-12, msg=name)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 9),
    heads=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 1000),
    size=st.sampled_from([1e-4, 1.0, 1e3]),
    kind=st.sampled_from([PlainRMSNorm, ShiftedRMSNorm]),
    turned=st.booleans(),
)
def test_it_is_the_textbook(
    rows: int, heads: int, seed: int, size: float, kind: type[PlainRMSNorm], turned: bool
) -> None:
    draw = torch.Generator().manual_seed(seed)
    shape = (1, rows, heads, WIDTH) if heads else (1, rows, WIDTH)
    x, upstream = torch.randn(shape, generator=draw) * size, torch.randn(shape, generator=draw)
    if turned and heads:
        upstream = upstream.transpose(1, 2).contiguous().transpose(1, 2)  # as attention hands it back
    exact, fused = kind().double(), kind()
    fused.weight.data = torch.randn(WIDTH, generator=draw)
    exact.weight.data = fused.weight.data.double()
    assert norms.fuse(fused) == 1
    assert_close(results(fused, x, upstream), results(exact, x.double(), upstream.double()))


@pytest.mark.parametrize("weight", [True, False])
def test_what_is_frozen_has_no_gradient(weight: bool) -> None:
    module = PlainRMSNorm()
    norms.fuse(module)
    module.weight.requires_grad_(weight)
    x = torch.randn(3, WIDTH, requires_grad=not weight)
    torch.autograd.backward(module(x).sum())
    assert (module.weight.grad is not None) is weight
    assert (x.grad is None) is weight


class CentredRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class GatedRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x) if gate is None else super().forward(x) * gate


class EpsilonOutsideRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class BoundedRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-1.5, 1.5)


class OtherName(PlainRMSNorm):
    pass


@pytest.mark.parametrize("kind", [CentredRMSNorm, GatedRMSNorm, EpsilonOutsideRMSNorm, BoundedRMSNorm, OtherName])
def test_what_computes_something_else_keeps_its_own_code(kind: type[PlainRMSNorm]) -> None:
    module = kind()
    assert norms.fuse(module) == 0
    assert "forward" not in vars(module)


def test_another_type_goes_through_the_modules_own_code() -> None:
    module, original = PlainRMSNorm(), PlainRMSNorm()
    assert norms.fuse(module) == 1
    x = torch.randn(3, WIDTH).bfloat16()
    assert torch.equal(module(x), original(x))


FORMS = {"Llama": 0.0, "Qwen 3": 0.0, "Gemma 2": 1.0, "Mistral, sliding window": 0.0}


@pytest.mark.parametrize("name", sorted(FORMS))
def test_the_norms_of_models_are_found(tmp_path: Path, name: str) -> None:
    (architecture,) = [case for case in CATALOG if case.name == name]
    compute = ComputeSettings(device="cpu", packing="padded")
    model = Policy.open(architecture.build(tmp_path), compute, LoraSettings(), 0).model
    rms_norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    assert rms_norms
    assert all(isinstance(vars(module)["forward"], norms._Fused) for module in rms_norms)
    assert {vars(module)["forward"]._form.shift for module in rms_norms} == {FORMS[name]}


NORMED = norms._normed
FAULTS: list[Any] = [
    lambda x, weight, form: NORMED(x, weight, NormFormula(0.0, form.shift)),
    lambda x, weight, form: NORMED(x, weight, NormFormula(form.epsilon, 0.0)),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_not_put_in(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    module = ShiftedRMSNorm()
    assert norms.form_of(module) == NormFormula(1e-6, 1.0)
    monkeypatch.setattr(norms, "_normed", fault)
    assert norms.form_of(module) is None


def test_two_runs_are_equal_bit_for_bit(base: Path) -> None:
    assert any(isinstance(vars(module).get("forward"), norms._Fused) for module in open_policy(base).model.modules())
    x, upstream = torch.randn(1, 7, WIDTH), torch.randn(1, 7, WIDTH)
    module = PlainRMSNorm()
    norms.fuse(module)
    first, two = (results(module, x, upstream) for _ in range(2))
    assert all(torch.equal(first[name], two[name]) for name in first)
