"""Weights, optimizer and random state as safetensors bytes. The lineage's name is inside, so lineages share no blob."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors.torch import load
from torch import Tensor

from headrace_runtime.process import liveness
from headrace_trainer.torch_learner.layout import layout
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.optimizer import Optimizer
from headrace_trainer.torch_learner.stored_tensors import SelectedTensors
from headrace_trainer.whole import Frozen

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "STATUS_ALLOC_FAILED")
_RANDOM = "random/"
_APPRAISER = "appraiser/"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device or the system had too little free memory. PyTorch has no exception of its own for all."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def freeze(policy: Policy, optimizer: Optimizer, lineage: str, appraiser: Mapping[str, Tensor] | None = None) -> Frozen:
    """Return the learner's state as bytes. Equal tensors give equal bytes. `appraiser` is the appraiser's state, if
    any."""
    about, random = about_state(lineage), random_state(policy)
    appraiser_tensors = {f"{_APPRAISER}{name}": tensor for name, tensor in (appraiser or {}).items()}
    return Frozen(_bytes(policy.tensors(), about), _bytes(optimizer.state() | random | appraiser_tensors, about))


def about_state(lineage: str) -> dict[str, str]:
    """Return the metadata of both files: one entry, because safetensors writes several in random order."""
    return {"headrace": f"training state of lineage {lineage}"}


def random_state(policy: Policy) -> dict[str, Tensor]:
    """Return the random state of this process, by the names under which it is saved."""
    state = {f"{_RANDOM}cpu": torch.get_rng_state()}
    if policy.device.type == "cuda":
        state[f"{_RANDOM}cuda"] = torch.cuda.get_rng_state(policy.device)
    return state


def set_random_state(policy: Policy, state: Mapping[str, Tensor]) -> None:
    """Set the random state of this process to the result of `random_state`."""
    torch.set_rng_state(state[f"{_RANDOM}cpu"])
    if policy.device.type == "cuda" and f"{_RANDOM}cuda" in state:
        torch.cuda.set_rng_state(state[f"{_RANDOM}cuda"], policy.device)


def thaw(policy: Policy, optimizer: Optimizer, frozen: Frozen, *, with_random: bool) -> dict[str, Tensor]:
    """Restore the result of `freeze`, optionally with its random state. Return the appraiser's state."""
    weights, state = load(bytes(frozen.weights)), load(bytes(frozen.optimizer))
    return restore(policy, optimizer, weights, state, with_random=with_random)


def restore(
    policy: Policy,
    optimizer: Optimizer,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    *,
    with_random: bool,
) -> dict[str, Tensor]:
    """Restore the state from tensors, of which at most one is read at a time. Return the appraiser's state."""
    appraiser_tensors = SelectedTensors(state, (name for name in state if name.startswith(_APPRAISER)), _APPRAISER)
    random = SelectedTensors(state, (name for name in state if name.startswith(_RANDOM)), _RANDOM)
    policy.load(weights)
    optimizer.load(SelectedTensors(state, (name for name in state if not name.startswith((_APPRAISER, _RANDOM)))))
    if with_random:
        set_random_state(policy, {f"{_RANDOM}{name}": value for name, value in random.items()})
    return dict(appraiser_tensors)


def _bytes(tensors: dict[str, Tensor], about: dict[str, str]) -> bytearray:
    """Return the bytes of the file that `safetensors.torch.save` would write.

    That function holds the interpreter's lock until all is copied, but copying a tensor does not.
    """
    plan = layout(tensors, about)
    content = bytearray(plan.size)
    content[: len(plan.header)] = plan.header
    for name, tensor in tensors.items():
        if tensor.numel():
            start, size = plan.starts[name], tensor.numel() * tensor.element_size()
            target = torch.frombuffer(content, dtype=torch.uint8, count=size, offset=start)
            target.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
            liveness.progress()
    return content
