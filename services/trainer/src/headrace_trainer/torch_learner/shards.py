"""Tensors that are sharded over the processes of a team (DTensors, as FSDP2 makes them), and how to gather them.

An unsharded tensor is returned as it is, so a single process pays nothing for these functions. Functions that gather a
sharded tensor must be called by every member, in the same order, because the members exchange their parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether other processes hold parts of the tensor."""
    return hasattr(tensor, "full_tensor")


def gather(tensor: Tensor) -> Tensor:
    """Return the full tensor, in every process."""
    if not is_sharded(tensor):
        return tensor
    gathered: Tensor = _as_any(tensor).full_tensor()
    return gathered


def mean(tensor: Tensor) -> Tensor:
    """Return the mean over the full tensor."""
    return gather(tensor.sum()) / tensor.numel() if is_sharded(tensor) else tensor.mean()


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the norm of each tensor."""
    return [gather(norm) for norm in torch._foreach_norm(list(tensors))] if tensors else []


def cpu_copy(tensor: Tensor) -> Tensor:
    """Return a copy of the full tensor on the CPU in the first process of the team, and an empty tensor in the
    others."""
    gathered = gather(tensor.detach())
    if is_sharded(tensor) and _as_any(tensor).device_mesh.get_rank() != 0:
        return torch.empty(0)
    return gathered.cpu().clone()


def with_layout_of(parameter: Tensor, value: Tensor) -> Tensor:
    """Return a copy of `value` with the device and the sharding of `parameter`.

    Every process must have the full `value`; the result holds only the part of this process.
    """
    if not is_sharded(parameter):
        return value.to(parameter.device).clone()
    from torch.distributed.tensor import distribute_tensor  # imported here, because it takes seconds

    layout = _as_any(parameter)
    part: Tensor = distribute_tensor(value.to(layout.device), layout.device_mesh, layout.placements, src_data_rank=None)
    return part.clone()


def _as_any(tensor: Tensor) -> Any:
    return tensor
