"""How long a sequence may be for a step on it to fit into memory.

Attention keeps no scores and the head no logits, so what a pass keeps for its backward pass grows by the same for each
token. How much that is, is counted on a short sequence: the tensors that autograd keeps, each once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace_trainer.batches.batch import Row
from headrace_trainer.torch_learner.model import cpu
from headrace_trainer.torch_learner.model.forward import Pack
from headrace_trainer.torch_learner.model.head import CHUNK_BYTES
from headrace_trainer.torch_learner.shards import is_sharded

SHARE = 0.8
"""Of what is free; the rest is for saves, fragments and what others take."""
_TRAINED_BYTES = 16
"""For each trained parameter: gradient, that of corrections, and the optimizer's two."""
_CHUNKS = 4
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_USED = (Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"))


def context_of(config: Any) -> int:
    """Longest sequence that the model of this (text) configuration was made for, in tokens."""
    return int(getattr(config, "max_position_embeddings", None) or 1 << 30)


def tokens(free: int, trained: int, token_bytes: float) -> int:
    """Of the longest sequence that fits, 0 when none does. `trained`: parameters."""
    left = free * SHARE - trained * _TRAINED_BYTES - _CHUNKS * CHUNK_BYTES
    return max(0, int(left / token_bytes))


def free_bytes(device: torch.device) -> int | None:
    """Of the memory that a step takes from; None where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    cpu.give_back()  # what another lineage of this process has left
    found = [found for found in (_of_machine(), _of_container()) if found is not None]
    return min(found) if device.type == "cpu" and found else None


def kept_bytes(policy: Any, pack: Pack) -> int:
    """What a forward pass over `pack` keeps for the backward pass, without the weights."""
    changing = any(is_sharded(parameter) for parameter in policy.model.parameters())
    always = _addresses(policy.model)
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # Weights in parts come together layer by layer, at addresses of their own.
        if storage.data_ptr() not in (_addresses(policy.model) if changing else always):
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    alive: list[Tensor] = []
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        alive.extend(policy.logprobs(pack))  # until all is counted, no address is given to another tensor
    return sum(seen.values())


def _addresses(model: nn.Module) -> set[int]:
    """Of the weights that are whole at the moment."""
    return {each.untyped_storage().data_ptr() for each in model.parameters() if not is_sharded(each)}


def token_bytes(policy: Any, row: Row, *, recomputed: bool) -> float:
    """What each token of a sequence costs in the pass that `policy` makes. `recomputed`: layers keep what goes into
    them and their attention, and one at a time all the rest."""
    model: nn.Module = policy.model
    was = model.training
    model.eval()  # nothing is recomputed then, and all of it is seen
    try:
        whole = kept_bytes(policy, policy.collate([row])) / row.length
    finally:
        model.train(was)
    if not recomputed:
        return whole
    text = policy.model.config.get_text_config()
    layers, hidden = int(getattr(text, "num_hidden_layers", 1)), int(getattr(text, "hidden_size", 0))
    heads = int(getattr(text, "num_attention_heads", 1))
    width = heads * int(getattr(text, "head_dim", None) or hidden // heads)
    kept = (hidden + width) * next(model.parameters()).element_size() + 4 * heads
    return min(whole, whole / layers + layers * kept)


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def _of_container() -> int | None:
    for limit, used in zip(_LIMITS, _USED, strict=True):
        try:
            most, now = limit.read_text().strip(), used.read_text().strip()
        except OSError:
            continue
        if most.isdecimal():
            return max(0, int(most) - int(now))
    return None
