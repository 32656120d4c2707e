"""Recomputes the activations of layers in the backward pass, except their attention, whose results are stored.

The cost of attention grows with the square of a sequence, but the size of its result does not.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

_KEPT = [
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
]
T = TypeVar("T")


def enable(model: Any, device: torch.device, dtype: str) -> None:
    """Configure the layers of `model` to recompute their activations in the backward pass, except attention results.

    On a GPU in bfloat16, torch's selective checkpointing is not used, because compiled code cannot run inside it: the
    attention of `flash` is stored without it.
    """
    _without_dropout(model)
    flashes = device.type == "cuda" and dtype == "bfloat16"
    how = {"use_reentrant": False, "context_fn": contexts if flashes else _combined_contexts}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def _combined_contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Return the contexts of a layer's first and second pass, in which both kinds of attention are stored."""
    attention_contexts, torch_contexts = contexts(), create_selective_checkpoint_contexts(_KEPT)  # type: ignore[no-untyped-call]
    return _inside_all(attention_contexts[0], torch_contexts[0]), _inside_all(attention_contexts[1], torch_contexts[1])


@contextlib.contextmanager
def _inside_all(*managers: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield


def _without_dropout(model: nn.Module) -> None:
    """Disable dropout.

    Checkpointing needs training mode, but a policy gradient needs the sampling policy's logprobs.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]


@dataclass(frozen=True)
class _Results:
    """Stored attention results of a layer, in order. `again` is whether the layer is being recomputed."""

    values: deque[Any]
    again: bool


_results: ContextVar[_Results | None] = ContextVar("stored attention results", default=None)


def compute_once(compute: Callable[[], T]) -> T:
    """Return the result of `compute`, or while a layer is recomputed, the stored result of the first computation."""
    results = _results.get()
    if results is None:
        return compute()
    if results.again:
        stored: T = results.values.popleft()
        return stored
    result = compute()
    results.values.append(result)
    return result


def contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Return the two context managers for torch's activation checkpointing: the first records results of a layer's
    forward pass, and the second reuses them while the layer is recomputed.
    """
    values: deque[Any] = deque()
    return _inside(_Results(values, again=False)), _inside(_Results(values, again=True))


@contextlib.contextmanager
def _inside(results: _Results) -> Iterator[None]:
    token = _results.set(results)
    try:
        yield
    finally:
        _results.reset(token)
