"""Recomputes the activations of layers in the backward pass, except their attention.

The cost of attention grows with the square of a sequence, but the size of its result does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from headrace_trainer.torch_learner.model import attention_results

_KEPT = [
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
]


def enable(model: Any, device: torch.device, dtype: str) -> None:
    """Recompute activations in training mode from now on.

    Selective checkpointing inspects each operation, so compiled code cannot run inside it; attention of `blocks` and
    `flash` is stored without it.
    """
    _without_dropout(model)
    flashes = device.type == "cuda" and dtype == "bfloat16"
    how = {"use_reentrant": False, "context_fn": attention_results.contexts if flashes else _combined_contexts}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def _combined_contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Return the contexts of a layer's first and second pass, in which both kinds of attention are stored."""
    attention_contexts, torch_contexts = attention_results.contexts(), create_selective_checkpoint_contexts(_KEPT)  # type: ignore[no-untyped-call]
    return _inside(attention_contexts[0], torch_contexts[0]), _inside(attention_contexts[1], torch_contexts[1])


@contextlib.contextmanager
def _inside(*contexts: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _without_dropout(model: nn.Module) -> None:
    """Disable dropout. Checkpointing needs training mode, but a policy gradient needs the sampling policy's
    logprobs."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]
