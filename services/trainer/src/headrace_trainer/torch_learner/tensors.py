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


def freeze(policy: Policy, optimizer: Optimizer, lineage: str) -> Frozen:
    """Equal tensors give equal bytes."""
    random = {f"{_RANDOM}cpu": torch.get_rng_state()}
    if policy.device.type == "cuda":
        random[f"{_RANDOM}cuda"] = torch.cuda.get_rng_state(policy.device)
    about = {
        "headrace": f"training state of lineage {lineage}"
    }  # one entry: safetensors writes several in random order
    return Frozen(_bytes(policy.tensors(), about), _bytes(optimizer.state() | random, about))


def thaw(policy: Policy, optimizer: Optimizer, frozen: Frozen, *, with_random: bool) -> None:
    """Continue from `freeze`'s answer, optionally with the random state of that moment."""
    restore(policy, optimizer, load(frozen.weights), load(frozen.optimizer), with_random=with_random)


def restore(
    policy: Policy,
    optimizer: Optimizer,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    *,
    with_random: bool,
) -> None:
    """The same, from the tensors in the two."""
    tensors = dict(state)
    random = {name.removeprefix(_RANDOM): tensors.pop(name) for name in list(tensors) if name.startswith(_RANDOM)}
    policy.load(weights)
    optimizer.load(tensors)
    if with_random:
        torch.set_rng_state(random["cpu"])
        if policy.device.type == "cuda" and "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], policy.device)


def _bytes(tensors: dict[str, Tensor], about: dict[str, str]) -> bytes:
    return save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=about)
