"""A forward as one call: recorded once per architecture by torch's tracer, replayed without Python for every version.

At the size of models that a CPU serves, a decode step is some 400 tensor operations of a few microseconds each, and
Python costs more than they do. The recording takes the weights as inputs, so a new version of an architecture costs
nothing, and it releases the interpreter lock for a whole step, so that HTTP goes on meanwhile. It is compared with the
model's own code before it is used; where they differ, or tracing fails, the model's own code runs. Measurements and
what was tried instead: docs/decisions/0008.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace_inference.torch_engine.forward import forward
from headrace_inference.torch_engine.sampler import draw
from headrace_runtime.logs import get_logger

log = get_logger(__name__)
_TRACE_TOLERANCE = 1e-4

Scratch = Callable[[int, int], Tensor]
"""`(rows, length)` to zeroed KV for trying something out."""

Decoded = tuple[Tensor, Tensor, Tensor, Tensor]
"""Token ids `[R]`, their logprobs `[R]`, all logprobs `[R, V]`, logits `[R, V]`."""


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name; tied ones appear under each of their names."""
    found = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in found}


def share(model: nn.Module) -> nn.Module:
    """A second module over the very same tensors."""
    memo = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, memo)


class Program:
    """The forward of one architecture. `weights` are those of a version, in the order of `tensors_of`."""

    def __init__(self, decode: Callable[..., Decoded], prefill: Callable[..., Tensor], *, traced: bool) -> None:
        self.decode = decode
        """`(weights, ids_R1, positions_R1, window_T, kv, temperature_R, uniform_R) -> Decoded`"""
        self.prefill = prefill
        """`(weights, ids_RQ, positions_RQ, window_T, kv) -> logits_RV`; only the KV that it writes matters."""
        self.traced = traced


def direct(model: nn.Module) -> Program:
    """The model's own code; `weights` are ignored, they are in the model."""

    def decode(_: Sequence[Tensor], ids: Tensor, at: Tensor, window: Tensor, kv: Tensor, *how: Tensor) -> Decoded:
        return _decode(model, ids, at, window, kv, *how)

    def prefill(_: Sequence[Tensor], ids: Tensor, at: Tensor, window: Tensor, kv: Tensor) -> Tensor:
        return forward(model, ids, at, window, kv)

    return Program(decode, prefill, traced=False)


class Programs:
    """Traced programs by architecture, shared by all versions. Used by the loading thread alone."""

    def __init__(self, *, trace: bool) -> None:
        self._trace = trace
        self._known: dict[str, Program | None] = {}

    def of(self, model: nn.Module, folders: Sequence[Path], scratch: Scratch, context: int) -> Program:
        """The program for `model`, whose configuration files are in `folders`, right up to position `context`."""
        key = _key(model, folders)
        if key not in self._known:
            self._known[key] = _traced(model, scratch, context) if self._trace else None
        return self._known[key] or direct(model)


def _decode(
    model: nn.Module, ids: Tensor, at: Tensor, window: Tensor, kv: Tensor, temperature: Tensor, uniform: Tensor
) -> Decoded:
    logits = forward(model, ids, at, window, kv)
    return (*draw(logits, temperature, uniform), logits)


def _key(model: nn.Module, folders: Sequence[Path]) -> str:
    """Equal keys have equal programs: same settings (LoRA's scaling is a constant of the trace), same tensors."""
    digest = hashlib.sha256()
    for folder in folders:
        for name in ("config.json", "adapter_config.json"):
            path = folder / name
            digest.update(path.read_bytes() if path.exists() else b"-")
    for name, tensor in tensors_of(model).items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.device}\n".encode())
    return digest.hexdigest()


def _traced(model: nn.Module, scratch: Scratch, context: int) -> Program | None:
    try:
        program = _trace(model, scratch)
        difference = _difference(program, model, scratch, context)
    except Exception as error:  # noqa: BLE001 (whatever a model's code does that a tracer cannot follow)
        log.warning("not_traced", architecture=type(model).__name__, error=repr(error)[:500])
        return None
    if not difference <= _TRACE_TOLERANCE:
        log.warning("not_traced", architecture=type(model).__name__, difference=difference)
        return None
    return program


def _trace(model: nn.Module, scratch: Scratch) -> Program:
    skeleton = share(model)
    places = [_place(skeleton, name) for name in tensors_of(model)]

    def adopt(weights: Sequence[Tensor]) -> nn.Module:
        for (tensors, leaf), weight in zip(places, weights, strict=True):
            tensors[leaf] = weight
        return skeleton

    def decode(weights: list[Tensor], *inputs: Tensor) -> Decoded:
        return _decode(adopt(weights), *inputs)

    def prefill(weights: list[Tensor], *inputs: Tensor) -> Tensor:
        return forward(adopt(weights), *inputs)

    weights = list(tensors_of(model).values())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer's doubts are settled by _difference, its deprecation by 0008
        traced = [
            torch.jit.trace(function, (weights, *inputs), check_trace=False)  # type: ignore[no-untyped-call]
            for function, inputs in ((decode, _example(scratch, 3, 1)), (prefill, _example(scratch, 3, 5)[:4]))
        ]
    run_decode, run_prefill = (_plain_executor(function) for function in traced)
    return Program(run_decode, run_prefill, traced=True)


def _place(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    return (module._parameters if leaf in module._parameters else module._buffers), leaf


def _plain_executor(function: Any) -> Callable[..., Any]:
    """Without the profiling executor, which would compile anew for every shape that it meets."""

    def call(*inputs: object) -> Any:
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            return function(*inputs)

    return call


def _example(scratch: Scratch, rows: int, queries: int, past: int = 7) -> tuple[Tensor, ...]:
    """Inputs of `decode`; the first four are those of `prefill`."""
    cache = scratch(rows, past + queries + 1)
    device = cache.device
    ids = (torch.arange(rows * queries, device=device) % 11).view(rows, queries)
    positions = past + torch.arange(queries, device=device).expand(rows, queries).contiguous()
    window = torch.arange(past + queries, device=device)
    temperature = torch.full((rows,), 0.7, device=device)
    uniform = torch.linspace(0.1, 0.9, rows, dtype=torch.float64, device=device)
    return ids, positions, window, cache, temperature, uniform


@torch.inference_mode()
def _difference(program: Program, model: nn.Module, scratch: Scratch, context: int) -> float:
    """Largest difference between the program and the model's own code, in logits and KV, over other shapes."""
    weights = list(tensors_of(model).values())
    own = direct(model)
    worst = 0.0
    for rows, queries, past in ((1, 1, 0), (5, 1, 30), (1, 1, context - 2), (1, 2, 0), (2, 9, 13)):
        ours, theirs = (_example(scratch, rows, queries, past) for _ in range(2))
        pairs = [(program.prefill(weights, *ours[:4]), own.prefill(weights, *theirs[:4])), (ours[3], theirs[3])]
        if queries == 1:
            pairs += zip(program.decode(weights, *ours)[2:], own.decode(weights, *theirs)[2:], strict=True)
        worst = max(worst, *(float((x - y).abs().max()) for x, y in pairs))
    return worst
