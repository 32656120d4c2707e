"""Forward passes over a batch whose KV is in the engine's own tensors: plain, or traced once per architecture.

Shapes: `_R` row of the batch, `_Q` new token of a row, `_T` position that attention sees, `_V` vocabulary.
Each row has its own positions: rows of different lengths decode together, and a prompt may be continued while other
rows wait. All functions of the plain pass map tensors to tensors, so that they can be traced.

With models that a CPU can serve, a decode step is some 400 tensor operations of a few microseconds each, and Python
costs more than they do. A traced pass runs without Python for every version. The trace takes the weights as inputs, so
further versions of an architecture need no tracing, and it releases the interpreter lock for a whole step, so that HTTP
requests continue. It is compared with the model's own code before it is used. If they differ, or tracing fails, the
model's own code is used. docs/decisions/0008 has measurements and alternatives.
"""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from headrace_inference.torch_engine.sampler import draw
from headrace_runtime.process.logs import get_logger

ATTENTION = "headrace"
"""Name of the engine's attention in transformers (`attn_implementation`)."""

_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments of attention that the fused implementation would ignore."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute scaled dot-product attention without copies of grouped keys and values.

    Transformers makes these copies, and they cost more than the attention. A decoding row has one query; its heads that
    share keys become the queries of one head.
    """
    if any(options.get(name) is not None for name in _UNSUPPORTED):
        raise NotImplementedError(f"{type(module).__name__} needs more than plain attention")
    rows, heads, queries, size = query.shape
    if queries == 1:
        grouped = query.view(rows, key.shape[1], -1, size)
        output = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
        return output.reshape(rows, 1, heads, size), None  # the strides differ between devices
    if query.device.type == "cuda":  # no fused kernel takes a mask and shared keys, so heads become queries of one head
        shared = key.shape[1]
        grouped = query.reshape(rows, shared, -1, size)
        folded = mask.expand(-1, heads // shared, -1, -1).reshape(rows, 1, -1, mask.shape[3])
        output = scaled_dot_product_attention(grouped, key, value, attn_mask=folded, scale=scaling)
        return output.reshape(rows, heads, queries, size).transpose(1, 2), None
    output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)


class RowCache:
    """KV cache with the interface of transformers, which writes the new keys and values of each row at its
    positions."""

    is_compileable = False

    def __init__(self, kv: Tensor, positions_RQ: Tensor, length: int) -> None:
        self._kv = kv
        self._index = positions_RQ[:, None, :, None]
        self._length = length

    def get_seq_length(self, _layer: int = 0) -> int:
        return 0  # positions are always passed explicitly

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        keys, values = self._kv[2 * layer], self._kv[2 * layer + 1]
        index = self._index.expand_as(key)
        keys.scatter_(2, index, key)
        values.scatter_(2, index, value)
        return keys[:, :, : self._length], values[:, :, : self._length]


def forward(model: nn.Module, ids_RQ: Tensor, positions_RQ: Tensor, window_T: Tensor, kv: Tensor) -> Tensor:
    """Compute the next-token logits of each row (float32, `[R, V]`), and write keys and values of the new tokens into
    the cache `kv`.

    Args:
        ids_RQ: new tokens of each row.
        positions_RQ: their positions.
        window_T: positions from 0 up to the last one that any row attends to.
        kv: `[2 * layers, R, heads, length, size]`.
    """
    return run(model, ids_RQ, positions_RQ, window_T, kv, keep=1)[:, -1]


def run(model: nn.Module, ids_RQ: Tensor, positions_RQ: Tensor, window_T: Tensor, kv: Tensor, *, keep: int) -> Tensor:
    """Compute the logits of each row's last `keep` new tokens, `[R, keep, V]` (0: of all), and extend the cache
    `kv`.
    """
    unseen = window_T > positions_RQ[:, None, :, None]
    mask = torch.zeros((), dtype=kv.dtype, device=kv.device).masked_fill(unseen, float("-inf"))
    output = model(
        input_ids=ids_RQ,
        position_ids=positions_RQ,
        attention_mask=mask,
        past_key_values=RowCache(kv, positions_RQ, window_T.shape[0]),
        use_cache=True,
        logits_to_keep=keep,
    )
    logits: Tensor = output.logits.float()
    return logits


log = get_logger(__name__)
_ROUNDINGS_MAX, _DIFFERENCE_MAX = 64, 0.1
"""Accepted difference of a trace from the model's own code, as a share of the largest value: 64 roundings of the type
times the root of the number of layers, whose errors add up like a random walk, and at most 0.1."""

Scratch = Callable[[int, int], Tensor]
"""Function that returns zeroed KV for `(rows, length)`, for a trial run."""

Decoded = tuple[Tensor, Tensor, Tensor, Tensor]
"""Token ids `[R]`, their logprobs `[R]`, all logprobs `[R, V]`, logits `[R, V]`."""


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by name. Tied tensors appear under each of their names."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in tensors}


def share_tensors(model: nn.Module) -> nn.Module:
    """Return a copy of a module that shares all tensors with it."""
    memo = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, memo)


class Program:
    """Forward pass of one model architecture, for prompts (`prefill`) and single tokens (`decode`). The argument
    `weights` is in the order of `tensors_of`.
    """

    def __init__(self, decode: Callable[..., Decoded], prefill: Callable[..., Tensor], *, traced: bool) -> None:
        self.decode = decode
        """`(weights, ids_R1, positions_R1, window_T, kv, temperature_R, uniform_R) -> Decoded`"""
        self.prefill = prefill
        """`(weights, ids_RQ, positions_RQ, window_T, kv) -> logits_RV`. Callers use only the KV that it writes."""
        self.traced = traced


def direct_program(model: nn.Module) -> Program:
    """Return an untraced program, which runs the model's own code. It ignores the argument `weights`."""

    def decode(_: Sequence[Tensor], ids: Tensor, at: Tensor, window: Tensor, kv: Tensor, *sampling: Tensor) -> Decoded:
        return _decode(model, ids, at, window, kv, *sampling)

    def prefill(_: Sequence[Tensor], ids: Tensor, at: Tensor, window: Tensor, kv: Tensor) -> Tensor:
        return forward(model, ids, at, window, kv)

    return Program(decode, prefill, traced=False)


class Programs:
    """Cache of traced programs by model architecture, shared by all versions. Only the loading thread uses it."""

    def __init__(self, *, trace: bool) -> None:
        self._trace = trace
        self._programs: dict[str, Program | None] = {}

    def get_program(self, model: nn.Module, folders: Sequence[Path], scratch: Scratch, context: int) -> Program:
        """Return the program of a model: traced if possible, otherwise one that runs the model's own code.

        Args:
            model: the model.
            folders: folders with the model's configuration files.
            scratch: function that returns zeroed KV for a trial run.
            context: number of positions for which the program must be correct.
        """
        key = _architecture_key(model, folders)
        if key not in self._programs:
            self._programs[key] = _trace_or_none(model, scratch, context) if self._trace else None
        return self._programs[key] or direct_program(model)


def _decode(
    model: nn.Module, ids: Tensor, at: Tensor, window: Tensor, kv: Tensor, temperature: Tensor, uniform: Tensor
) -> Decoded:
    logits = forward(model, ids, at, window, kv)
    return (*draw(logits, temperature, uniform), logits)


def _architecture_key(model: nn.Module, folders: Sequence[Path]) -> str:
    """Return a digest of the configuration and the tensors' shapes. Models with equal digests have the same program.

    The configuration includes that of LoRA, whose scaling is a constant in the trace.
    """
    digest = hashlib.sha256()
    for folder in folders:
        for name in ("config.json", "adapter_config.json"):
            path = folder / name
            digest.update(path.read_bytes() if path.exists() else b"-")
    for name, tensor in tensors_of(model).items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.device}\n".encode())
    return digest.hexdigest()


def _trace_or_none(model: nn.Module, scratch: Scratch, context: int) -> Program | None:
    """Trace a model, and return None if that fails or if the trace differs from the model's own code."""
    try:
        program = _trace(model, scratch)
        difference = _difference(program, model, scratch, context)
    except Exception as error:  # noqa: BLE001 (the tracer may fail in any way)
        log.warning("not_traced", architecture=type(model).__name__, error=repr(error)[:500])
        return None
    accepted = _accepted_difference(scratch(1, 1))
    if not difference <= accepted:
        log.warning("not_traced", architecture=type(model).__name__, difference=difference, accepted=accepted)
        return None
    return program


def _trace(model: nn.Module, scratch: Scratch) -> Program:
    skeleton = share_tensors(model)
    slots = [_tensor_slot(skeleton, name) for name in tensors_of(model)]

    def adopt(weights: Sequence[Tensor]) -> nn.Module:
        for (tensors, leaf), weight in zip(slots, weights, strict=True):
            tensors[leaf] = weight
        return skeleton

    def decode(weights: list[Tensor], *inputs: Tensor) -> Decoded:
        return _decode(adopt(weights), *inputs)

    def prefill(weights: list[Tensor], *inputs: Tensor) -> Tensor:
        return forward(adopt(weights), *inputs)

    weights = list(tensors_of(model).values())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # _difference checks the trace, and decision 0008 covers the deprecation
        traced = [
            torch.jit.trace(function, (weights, *inputs), check_trace=False)  # type: ignore[no-untyped-call]
            for function, inputs in ((decode, _example(scratch, 3, 1)), (prefill, _example(scratch, 3, 5)[:4]))
        ]
    run_decode, run_prefill = (_plain_executor(function) for function in traced)
    return Program(run_decode, run_prefill, traced=True)


def _tensor_slot(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return the dictionary of a submodule that contains the tensor `name`, and the tensor's key in it."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    return (module._parameters if leaf in module._parameters else module._buffers), leaf


def _plain_executor(function: Any) -> Callable[..., Any]:
    """Wrap a traced function so that PyTorch's profiling executor does not compile it again for every new shape."""

    def call(*inputs: object) -> Any:
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            return function(*inputs)

    return call


def _example(scratch: Scratch, rows: int, queries: int, past: int = 7) -> tuple[Tensor, ...]:
    """Return example inputs for tracing a program, or for comparing a trace with the model's own code.

    Args:
        scratch: function that returns zeroed KV.
        rows: number of rows of the batch.
        queries: number of new tokens of each row.
        past: number of earlier tokens of each row.

    Returns:
        The inputs of `decode` after the weights: token ids, positions, window, KV, temperature and uniform numbers. The
            first four are the inputs of `prefill`.
    """
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
    """Return the largest difference in logits and KV between a traced program and the model's own code.

    It is a share of the largest value, and measured on shapes for which the program was not traced.
    """
    weights = list(tensors_of(model).values())
    reference = direct_program(model)
    worst = 0.0
    for rows, queries, past in ((1, 1, 0), (5, 1, 30), (1, 1, context - 2), (1, 2, 0), (2, 9, 13)):
        inputs, copies = (_example(scratch, rows, queries, past) for _ in range(2))
        logits = program.prefill(weights, *inputs[:4]), reference.prefill(weights, *copies[:4])
        pairs = [logits, (inputs[3], copies[3])]
        if queries == 1:
            pairs += zip(program.decode(weights, *inputs)[2:], reference.decode(weights, *copies)[2:], strict=True)
        for traced, right in pairs:
            worst = max(worst, as_number((traced - right).abs().max() / right.abs().max().clamp_min(1.0)))
    return worst


def as_number(difference: Tensor) -> float:
    """Return a difference as a number, infinity for NaN."""
    value = float(difference)
    return math.inf if math.isnan(value) else value


def _accepted_difference(kv: Tensor) -> float:
    """Return the largest accepted result of `_difference`, for a model with KV like `kv` (`[2 * layers, ...]`)."""
    layers = kv.shape[0] / 2
    return min(_DIFFERENCE_MAX, _ROUNDINGS_MAX * torch.finfo(kv.dtype).eps * math.sqrt(layers))
