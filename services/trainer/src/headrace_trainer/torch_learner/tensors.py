"""Weights, optimizer and random state as safetensors bytes. The lineage's name is inside, so lineages share no blob."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors.torch import load, save
from torch import Tensor

from headrace_trainer.learner import Frozen
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.optimizer import Optimizer

_RANDOM = "random/"
_APPRAISER = "appraiser/"


def freeze(policy: Policy, optimizer: Optimizer, lineage: str, appraiser: Mapping[str, Tensor] | None = None) -> Frozen:
    """Equal tensors give equal bytes. `appraiser`: the state of one, where there is one."""
    random = {f"{_RANDOM}cpu": torch.get_rng_state()}
    if policy.device.type == "cuda":
        random[f"{_RANDOM}cuda"] = torch.cuda.get_rng_state(policy.device)
    about = {
        "headrace": f"training state of lineage {lineage}"
    }  # one entry: safetensors writes several in random order
    beside = {f"{_APPRAISER}{name}": tensor for name, tensor in (appraiser or {}).items()}
    return Frozen(_bytes(policy.tensors(), about), _bytes(optimizer.state() | random | beside, about))


def thaw(policy: Policy, optimizer: Optimizer, frozen: Frozen, *, with_random: bool) -> dict[str, Tensor]:
    """Continue from `freeze`'s answer, optionally with the random state of that moment. Returns the appraiser's
    state."""
    tensors = load(frozen.optimizer)
    names = [name for name in tensors if name.startswith(_APPRAISER)]
    beside = {name.removeprefix(_APPRAISER): tensors.pop(name) for name in names}
    random = {name.removeprefix(_RANDOM): tensors.pop(name) for name in list(tensors) if name.startswith(_RANDOM)}
    policy.load(load(frozen.weights))
    optimizer.load(tensors)
    if with_random:
        torch.set_rng_state(random["cpu"])
        if policy.device.type == "cuda" and "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], policy.device)
    return beside


def _bytes(tensors: dict[str, Tensor], about: dict[str, str]) -> bytes:
    return save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=about)
