"""Changes of a loaded model's layers: RMS norms with a gradient of their own, and LoRA adapters.

Transformers writes an RMS norm as five operations, and autograd adds at least as many. On a CPU each of them reads
and writes all activations. Here the norm stores its input and one number for each row.

Whether a module is an RMS norm is not derived from its name alone: a module is tested on planted rows and weights,
and keeps its own code unless its result equals one of the two formulas. The comparison at the start (`native`) then
includes the replaced norms.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from headrace_runtime.errors import SettingError
from headrace_trainer.settings import LoraSettings

_ROUNDING = 1e-5
_PROBE_ROWS = 5


@dataclass(frozen=True)
class NormFormula:
    """Formula of an RMS norm, `(weight + shift) * x / sqrt(mean(x^2) + epsilon)`. The shift is 1 in Gemma."""

    epsilon: float
    shift: float


def fuse(model: nn.Module) -> int:
    """Replace the forward methods of RMS norms by a fused implementation where their formula is recognized. Return the
    number of replaced norms.
    """
    count = 0
    for module in model.modules():
        form = form_of(module)
        if form is not None:
            module.forward = _Fused(module, form)
            count += 1
    return count


@torch.no_grad()
def form_of(module: nn.Module) -> NormFormula | None:
    """Return the formula that the norm `module` computes, by a test on its outputs, or None if it is an unknown one."""
    if not type(module).__name__.endswith("RMSNorm") or set(dict(module.named_parameters())) != {"weight"}:
        return None
    weight: Any = module.weight
    if weight.ndim != 1 or weight.dtype != torch.float32 or "forward" in vars(module) or not _has_one_argument(module):
        return None
    epsilons = [value for name, value in vars(module).items() if name in ("variance_epsilon", "eps", "epsilon")]
    rows_NH, probe_weight_H = _probe_inputs(weight)
    try:
        result_NH = functional_call(module, {"weight": probe_weight_H}, (rows_NH,))
    except Exception:  # noqa: BLE001 (a module's code may raise any error; the module keeps that code)
        return None
    for form in [NormFormula(float(epsilon), shift) for epsilon in epsilons for shift in (0.0, 1.0)]:
        if _is_close(result_NH, _normed(rows_NH, probe_weight_H, form)[0]):
            return form
    return None


class _Fused:
    """Replacement of a norm's forward method, with a hand-written gradient."""

    def __init__(self, module: nn.Module, form: NormFormula) -> None:
        self._module = module
        self._form = form
        self._original: Callable[[Tensor], Tensor] = module.forward

    def __call__(self, x: Tensor) -> Tensor:
        weight: Any = self._module.weight
        if x.dtype != torch.float32 or weight.dtype != torch.float32:
            return self._original(x)  # it rounds intermediate results, which the fused norm does not
        result: Tensor = _Norm.apply(x, weight, self._form)  # type: ignore[no-untyped-call]
        return result


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, form: NormFormula) -> Tensor:
        normed, scale = _normed(x, weight_H, form)
        ctx.save_for_backward(x, weight_H, scale)
        ctx.form = form
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_H, scale = ctx.saved_tensors
        width, shifted_H = x.shape[-1], _shifted(weight_H, ctx.form)
        both_NH = (gradient * x).reshape(-1, width)
        of_x = of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = scale.reshape(-1) @ both_NH
        if ctx.needs_input_grad[0]:
            along = (both_NH @ shifted_H).reshape(scale.shape) * scale**3 / width
            of_x = (gradient * shifted_H).mul_(scale).addcmul_(x, along, value=-1)
        return of_x, of_weight, None


def _normed(x: Tensor, weight_H: Tensor, form: NormFormula) -> tuple[Tensor, Tensor]:
    """Return the normed rows, and the factor of each row."""
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
    scale = square.div_(x.shape[-1]).add_(form.epsilon).rsqrt_()
    return (x * scale).mul_(_shifted(weight_H, form)), scale


def _shifted(weight_H: Tensor, form: NormFormula) -> Tensor:
    return weight_H + form.shift if form.shift else weight_H


def _is_close(original: Any, fused: Tensor) -> bool:
    same = isinstance(original, Tensor) and original.shape == fused.shape and original.dtype == fused.dtype
    return same and torch.allclose(fused, original, rtol=_ROUNDING, atol=_ROUNDING)


def _has_one_argument(module: nn.Module) -> bool:
    """Return whether the module's forward method has one argument, the rows."""
    return len(inspect.signature(module.forward).parameters) == 1


def _probe_inputs(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs that tell the formulas apart: rows of very different sizes, and weights of both signs.

    The smallest row is so small that the result depends on epsilon.
    """
    draw = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-4, 2, _PROBE_ROWS)[:, None]
    rows = torch.randn(_PROBE_ROWS, len(weight), generator=draw) * sizes
    return rows.to(weight.device), torch.randn(len(weight), generator=draw).to(weight.device)


def add_adapters(model: Any, lora: LoraSettings, seed: int) -> Any:
    """Return `model` with new adapters, which are its only trained weights. Raises `SettingError`."""
    from peft import LoraConfig, get_peft_model  # imported here, because it takes seconds

    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=sorted(lora.targets), lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    torch.manual_seed(seed)
    model.name_or_path = None  # the folder is removed before an adapter is saved, so it must not be looked up
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        modules = {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "weight")}
        remedy = f"{str(error).splitlines()[0]} The model's modules with weights: {', '.join(sorted(modules))}"
        raise SettingError("trainer.lora.targets", ", ".join(lora.targets), remedy) from None
