"""Rotary embeddings whose frequencies depend on the length of a sequence: longrope, and dynamic NTK scaling.

Transformers chooses one set of frequencies for a whole pass, by its longest sequence, and dynamic NTK also remembers
the longest so far. Here each sequence of a pass gets its own frequencies, as if it were alone and the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headrace_trainer.torch_learner.model import attention

_BY_LENGTH = ("dynamic", "longrope")


def steady(model: nn.Module) -> None:
    """Replace the rotary embeddings of `model` that depend on the length, in place."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        named = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if any(isinstance(kind, str) and any(word in kind for word in _BY_LENGTH) for kind in named):
            _PerSequenceRope(module)


class _PerSequenceRope:
    """Replaces a module's forward method."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._original = module.forward
        module.forward = self

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **named: Any) -> Any:
        if position_ids.ndim != 2:
            return self._original(x, position_ids, *args, **named)
        if position_ids.shape[0] > 1:  # one sequence per row; padding has position 0
            return _joined([self._compute_alone(x, row[None], *args, **named) for row in position_ids], 0)
        # The starts are read from the device only if no bounds are set.
        starts = attention.bounds_now()[:-1] or (position_ids[0] == 0).nonzero().flatten().tolist()
        return _joined([self._compute_alone(x, part, *args, **named) for part in _parts(position_ids, starts)], 1)

    def _compute_alone(self, x: Tensor, position_ids: Tensor, *args: Any, **named: Any) -> Any:
        self._reset_frequencies()
        return self._original(x, position_ids, *args, **named)

    def _reset_frequencies(self) -> None:
        """Reset the frequencies to those of a sequence within the original context."""
        module: Any = self._module
        for name in [name for name, _ in module.named_buffers(recurse=False) if name.endswith("original_inv_freq")]:
            original = getattr(module, name)
            setattr(module, name.replace("original_", ""), original.clone())
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
            setattr(module, name, module.original_max_seq_len)


def _parts(position_ids: Tensor, starts: Sequence[int]) -> list[Tensor]:
    inner = [start for start in starts if start]
    return list(torch.tensor_split(position_ids, inner, dim=1))


def _joined(parts: list[Any], dim: int) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(torch.cat(each, dim=dim) for each in zip(*parts, strict=True))
    return torch.cat(parts, dim=dim)
