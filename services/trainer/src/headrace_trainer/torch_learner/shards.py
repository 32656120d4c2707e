"""Tensors of which every process of a team holds a part (DTensors, as FSDP2 makes them), and how they become whole.

A tensor that is whole already is returned as it is, so one process pays nothing for any of it. What is asked of a
shared tensor is asked by every member, in the same order: the parts travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def shared(tensor: Tensor) -> bool:
    """Whether other processes hold parts of it."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """All of it, in every process."""
    if not shared(tensor):
        return tensor
    found: Tensor = _shared(tensor).full_tensor()
    return found


def mean(tensor: Tensor) -> Tensor:
    """Over all of it."""
    return whole(tensor.sum()) / tensor.numel() if shared(tensor) else tensor.mean()


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each."""
    return [whole(norm) for norm in torch._foreach_norm(list(tensors))] if tensors else []


def kept(tensor: Tensor) -> Tensor:
    """A copy of all of it on the CPU, in the first process of the team; the others have nothing of it."""
    found = whole(tensor.detach())
    if shared(tensor) and _shared(tensor).device_mesh.get_rank() != 0:
        return torch.empty(0)
    return found.cpu().clone()


def as_held(parameter: Tensor, value: Tensor) -> Tensor:
    """A copy of `value`, all of which every process has, in the form that `parameter` is held in: where it is, and of
    it only the part that is held here."""
    if not shared(parameter):
        return value.to(parameter.device).clone()
    from torch.distributed.tensor import distribute_tensor  # seconds that one process need not wait

    held = _shared(parameter)
    found: Tensor = distribute_tensor(value.to(held.device), held.device_mesh, held.placements, src_data_rank=None)
    return found.clone()


def _shared(tensor: Tensor) -> Any:
    return tensor
