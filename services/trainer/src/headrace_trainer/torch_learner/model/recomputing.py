"""Layers whose activations are computed again in the backward pass, all but their attention.

Its cost grows with the square of a sequence, and what it keeps does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from headrace_trainer.torch_learner.model import kept

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
    """From here on, in training mode. Selective checkpointing looks at each operation, so nothing compiled runs inside
    it; our own attention is kept without."""
    _without_dropout(model)
    flashes = device.type == "cuda" and dtype == "bfloat16"
    how = {"use_reentrant": False, "context_fn": kept.contexts if flashes else _both}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def _both() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Of a layer's first pass and its second: our own attention is kept, and torch's."""
    ours, torchs = kept.contexts(), create_selective_checkpoint_contexts(_KEPT)  # type: ignore[no-untyped-call]
    return _inside(ours[0], torchs[0]), _inside(ours[1], torchs[1])


@contextlib.contextmanager
def _inside(*contexts: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _without_dropout(model: nn.Module) -> None:
    """Checkpointing needs training mode; a policy gradient needs the logprobs of the policy that acted."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]
