"""Fuses the operations between a layer's matrix products by torch.compile.

A GPU multiplies a layer's matrices in the time that it takes to read and write its activations three times, and
as single operations they are read and written some forty times. A layer's own code is compiled once for all layers and
all lengths. Attention is excluded, because its description of a row of sequences is no tensor.

Compiling needs a C compiler and takes half a minute to a minute and a half at the first step. Outside of training
(`disable_compilation`) the code runs uncompiled, because a comparison or a version's fingerprint is too short for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from headrace_runtime.errors import SettingError
from headrace_trainer.torch_learner.model import attention

Function = Callable[..., Any]


def check(device: torch.device) -> None:
    """Compile a small function to check that torch.compile works on this machine. Raises `SettingError`."""
    try:
        torch.compile(torch.sin)(torch.ones(8, device=device))
    except Exception as error:  # a compiler may raise any error
        message = (str(error).splitlines() or [""])[0][:200]
        remedy = f"torch.compile fails here: {type(error).__name__}: {message}; install a C compiler, or set false"
        raise SettingError("trainer.compute.compile", True, remedy) from error


def mark_layers(model: nn.Module) -> int:
    """Mark the layers of `model` to be compiled at their first call, and return their number."""
    outside = torch.compiler.disable(attention.attend)  # type: ignore[no-untyped-call]
    AttentionInterface.register(attention.BLOCKS, outside)
    model_layers = [
        layer
        for modules in model.modules()
        if isinstance(modules, nn.ModuleList)
        for layer in modules
        if _is_layer(layer)
    ]
    for layer in model_layers:
        layer.compile(dynamic=True)
    return len(model_layers)


def _is_layer(layer: nn.Module) -> bool:
    """Return whether a module is a transformer layer, rather than an expert or a branch inside one.

    Only layers can recompute their activations in the backward pass, so only they have `gradient_checkpointing`.
    """
    return hasattr(layer, "gradient_checkpointing")


def disable_compilation() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which compiled functions run uncompiled."""
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@cache
def compile_per_shape(function: Function) -> Function:
    """Return `function`, compiled for each shape of its tensors. For many shapes use `compile_for_all_shapes`."""
    return torch.compile(function, dynamic=False)


@cache
def compile_for_all_shapes(function: Function) -> Function:
    """Return `function`, compiled once for all shapes of its tensors."""
    return torch.compile(function, dynamic=True)
