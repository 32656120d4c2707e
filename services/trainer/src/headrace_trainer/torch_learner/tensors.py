"""Weights, optimizer and random state as safetensors files. The lineage's name is inside, so lineages share no blob."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from headrace_runtime.process import liveness
from headrace_trainer.learner import OPTIMIZER, WEIGHTS, Frozen
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.optimizer import Optimizer
from headrace_trainer.torch_learner.stored_tensors import SelectedTensors, layout

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "STATUS_ALLOC_FAILED")
_RANDOM = "random/"
_ESTIMATOR = "appraiser/"
_PIECE_BYTES = 4 << 20


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means that a device or the system ran out of memory, for which exceptions differ."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def freeze(
    policy: Policy, optimizer: Optimizer, lineage: str, token_estimator: Mapping[str, Tensor] | None = None
) -> Frozen:
    """Serialize weights, optimizer, random state and token estimator in safetensors format; equal tensors, equal bytes.

    Args:
        policy: the model.
        optimizer: its optimizer.
        lineage: name of the lineage, which is stored in the metadata.
        token_estimator: state of the estimator of token advantages; None without one.
    """
    about, (weights, state) = state_metadata(lineage), _references(policy, optimizer, token_estimator)
    return Frozen(_bytes(weights, about), _bytes(state, about))


def write_weights(folder: Path, policy: Policy, lineage: str) -> None:
    """Write the weights that `freeze` would return into `folder`, one tensor at a time to save memory."""
    weights = policy.parameters
    write_file(folder / WEIGHTS, weights, state_metadata(lineage), weights.__getitem__)


def write_optimizer(
    folder: Path,
    policy: Policy,
    optimizer: Optimizer,
    lineage: str,
    token_estimator: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the optimizer state that `freeze` would return into `folder`, one tensor at a time to save memory."""
    _, state = _references(policy, optimizer, token_estimator)
    write_file(folder / OPTIMIZER, state, state_metadata(lineage), state.__getitem__)


def _references(
    policy: Policy, optimizer: Optimizer, token_estimator: Mapping[str, Tensor] | None
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Return the tensors by name of the file of weights and of the file of optimizer states, without copying them.

    They change with the learner's next step. The second file also holds the state of the random numbers and the
    tensors of the estimator of token advantages, such as the critic of `ppo`.
    """
    estimator_tensors = {f"{_ESTIMATOR}{name}": tensor for name, tensor in (token_estimator or {}).items()}
    return policy.parameters, optimizer.state_tensors() | random_state(policy) | estimator_tensors


def state_metadata(lineage: str) -> dict[str, str]:
    """Return the metadata for the header of the safetensors files with a lineage's weights and optimizer state.

    It has a single entry: safetensors writes several entries in any order, and equal states must give equal bytes.
    """
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


def restore(
    policy: Policy,
    optimizer: Optimizer,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    *,
    with_random: bool,
) -> dict[str, Tensor]:
    """Restore weights and optimizer from the tensors of a save, which are read one at a time.

    Args:
        weights: tensors of the file of weights.
        state: tensors of the file of the optimizer's state.
        with_random: whether to restore the random number generators, too.

    Returns:
        The saved tensors of the estimator of token advantages, for example those of a critic.
    """
    estimator_tensors = SelectedTensors(state, (name for name in state if name.startswith(_ESTIMATOR)), _ESTIMATOR)
    random = SelectedTensors(state, (name for name in state if name.startswith(_RANDOM)), _RANDOM)
    policy.load(weights)
    optimizer.load(SelectedTensors(state, (name for name in state if not name.startswith((_ESTIMATOR, _RANDOM)))))
    if with_random:
        set_random_state(policy, {f"{_RANDOM}{name}": value for name, value in random.items()})
    return dict(estimator_tensors)


def write_file(
    path: Path, shapes: Mapping[str, Tensor], about: Mapping[str, str], value: Callable[[str], Tensor]
) -> None:
    """Write the file that `safetensors.torch.save_file` would write, with one tensor at a time in memory.

    Args:
        path: The file.
        shapes: Tensors of the right shapes and types, which may be `meta` tensors.
        about: The file's metadata.
        value: Returns the values of a tensor by its name.
    """
    plan = layout(shapes, about)
    with path.open("wb") as file:
        file.write(plan.header)
        for name in plan.starts:  # in the order of the file
            if shapes[name].numel():
                for piece in torch.split(_flat_bytes(value(name)), _PIECE_BYTES):
                    file.write(piece.numpy().data)
                    liveness.progress()


def _bytes(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> bytearray:
    """Return the content of the file that `write_file` would write for these tensors."""
    plan = layout(tensors, about)
    content = bytearray(plan.size)
    content[: len(plan.header)] = plan.header
    for name, tensor in tensors.items():
        if tensor.numel():
            source = _flat_bytes(tensor)
            torch.frombuffer(content, dtype=torch.uint8, count=len(source), offset=plan.starts[name]).copy_(source)
            liveness.progress()
    return content


def _flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
