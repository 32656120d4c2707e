"""Computes the longest sequence for which a step fits into memory.

Attention stores no scores and the head no logits, so the memory of a forward pass grows by the same amount for each
token. That amount is measured on a short sequence: the size of the tensors that autograd stores, each counted once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace_trainer.batches.batch import Row
from headrace_trainer.torch_learner.model import devices
from headrace_trainer.torch_learner.model.forward import Pack
from headrace_trainer.torch_learner.model.head import CHUNK_BYTES
from headrace_trainer.torch_learner.stored_tensors import is_sharded

SHARE = 0.8
"""Share of the free memory that is used; the rest is for saves, fragmentation and other processes."""
_TRAINED_BYTES = 16
"""Bytes per trained parameter: gradient, that of corrections, and the optimizer's two."""
_CHUNKS = 4
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_USED = (Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"))


def context_of(config: Any) -> int:
    """Return the longest sequence that the model of this (text) configuration was made for, in tokens."""
    return int(getattr(config, "max_position_embeddings", None) or 1 << 30)


def tokens(free: int, trained: int, token_bytes: float) -> int:
    """Return the length in tokens of the longest sequence that fits into memory, or 0 if no sequence does.

    Args:
        free: free bytes.
        trained: number of trained parameters.
        token_bytes: bytes that each token of a sequence needs.
    """
    left = free * SHARE - trained * _TRAINED_BYTES - _CHUNKS * CHUNK_BYTES
    return max(0, int(left / token_bytes))


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory in bytes that a step can use, or None if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    devices.return_unused_memory()  # memory that another lineage of this process has freed
    sizes = [size for size in (_machine_free_bytes(), _container_free_bytes()) if size is not None]
    return min(sizes) if device.type == "cpu" and sizes else None


def stored_bytes(policy: Any, pack: Pack) -> int:
    """Return the bytes that a forward pass over `pack` stores for the backward pass, without the weights."""
    changing = any(is_sharded(parameter) for parameter in policy.model.parameters())
    always = _addresses(policy.model)
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # Sharded weights are gathered layer by layer, at new addresses.
        if storage.data_ptr() not in (_addresses(policy.model) if changing else always):
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    alive: list[Tensor] = []
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        alive.extend(policy.logprobs(pack))  # kept alive until all is counted, so that no address is reused
    return sum(seen.values())


def _addresses(model: nn.Module) -> set[int]:
    """Return the addresses of the weights that are not sharded at the moment."""
    return {each.untyped_storage().data_ptr() for each in model.parameters() if not is_sharded(each)}


def token_bytes(policy: Any, row: Row, *, recomputed: bool) -> float:
    """Return the bytes of memory that each token of a sequence needs in a training pass.

    Args:
        policy: the model.
        row: a short sequence, on which the memory is measured.
        recomputed: whether layers recompute their activations, so that each stores only its input and its attention.
    """
    model: nn.Module = policy.model
    was = model.training
    model.eval()  # disables recomputation, so that all tensors are counted
    try:
        full_bytes = stored_bytes(policy, policy.collate([row])) / row.length
    finally:
        model.train(was)
    if not recomputed:
        return full_bytes
    text = policy.model.config.get_text_config()
    layers, hidden = int(getattr(text, "num_hidden_layers", 1)), int(getattr(text, "hidden_size", 0))
    heads = int(getattr(text, "num_attention_heads", 1))
    width = heads * int(getattr(text, "head_dim", None) or hidden // heads)
    layer_bytes = (hidden + width) * next(model.parameters()).element_size() + 4 * heads
    return min(full_bytes, full_bytes / layers + layers * layer_bytes)


def _machine_free_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def _container_free_bytes() -> int | None:
    for limit, used in zip(_LIMITS, _USED, strict=True):
        try:
            most, now = limit.read_text().strip(), used.read_text().strip()
        except OSError:
            continue
        if most.isdecimal():
            return max(0, int(most) - int(now))
    return None
