"""The operations between a layer's products, fused by torch.compile.

A GPU multiplies a layer's matrices in the time that it takes to read and write its activations three times, and
written out in single operations they are read and written some forty times. Compiled is a layer's own code, once for
all layers and all lengths. Attention stays outside: what it is told about a row of sequences is no tensor.

Compiling needs a C compiler and takes half a minute to a minute and a half at the first step. Outside of training
(`eagerly`) the code runs as it is written: a comparison, or a version's fingerprint, is worth no compilation of its
own.
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
    """Compile something small. Raises `SettingError` where that is not possible."""
    try:
        torch.compile(torch.sin)(torch.ones(8, device=device))
    except Exception as error:  # whatever a compiler says
        said = (str(error).splitlines() or [""])[0][:200]
        remedy = f"nothing can be compiled here: {type(error).__name__}: {said}; install a C compiler, or set false"
        raise SettingError("trainer.compute.compile", True, remedy) from error


def layers(model: nn.Module) -> int:
    """Have the layers of `model` compiled when they are first asked. Returns how many."""
    outside = torch.compiler.disable(attention.attend)  # type: ignore[no-untyped-call]
    AttentionInterface.register(attention.BLOCKS, outside)
    found = [
        layer for several in model.modules() if isinstance(several, nn.ModuleList) for layer in several if _whole(layer)
    ]
    for layer in found:
        layer.compile(dynamic=True)
    return len(found)


def _whole(layer: nn.Module) -> bool:
    """A layer of the model and no expert or branch inside one: transformers can compute it again as a whole."""
    return hasattr(layer, "gradient_checkpointing")


def eagerly() -> contextlib.AbstractContextManager[Any]:
    """What is compiled runs as it is written."""
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@cache
def fused(function: Function) -> Function:
    """`function` of tensors, compiled for each shape that it is asked about: few, or see `fused_for_all`."""
    return torch.compile(function, dynamic=False)


@cache
def fused_for_all(function: Function) -> Function:
    """The same, compiled once for all shapes."""
    return torch.compile(function, dynamic=True)
