"""Rotary embeddings whose frequencies depend on how long a sequence is: longrope, and dynamic NTK scaling.

Transformers chooses one set of frequencies for a whole pass, by its longest sequence, and dynamic NTK also remembers
the longest so far. Here each sequence of a pass gets its own, as if it were alone and the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headrace_trainer.torch_learner.model import attention

_BY_LENGTH = ("dynamic", "longrope")


def steady(model: nn.Module) -> None:
    """Change the rotary embeddings of `model` that need it, in place."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        named = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if any(isinstance(kind, str) and any(word in kind for word in _BY_LENGTH) for kind in named):
            _Steady(module)


class _Steady:
    """Stands before a module's forward."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own = module.forward
        module.forward = self

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **named: Any) -> Any:
        if position_ids.ndim != 2:
            return self._own(x, position_ids, *args, **named)
        if position_ids.shape[0] > 1:  # one sequence to a row; what pads it stands at position 0
            return _joined([self._alone(x, row[None], *args, **named) for row in position_ids], 0)
        # The device is only asked where the sequences start if nobody here knows.
        starts = attention.bounds_now()[:-1] or (position_ids[0] == 0).nonzero().flatten().tolist()
        return _joined([self._alone(x, part, *args, **named) for part in _parts(position_ids, starts)], 1)

    def _alone(self, x: Tensor, position_ids: Tensor, *args: Any, **named: Any) -> Any:
        self._forget()
        return self._own(x, position_ids, *args, **named)

    def _forget(self) -> None:
        """Back to the frequencies of a sequence within the original context."""
        module: Any = self._module
        for name in [name for name, _ in module.named_buffers(recurse=False) if name.endswith("original_inv_freq")]:
            original = getattr(module, name)
            setattr(module, name.replace("original_", ""), original.clone())
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
            setattr(module, name, module.original_max_seq_len)


def _parts(position_ids: Tensor, starts: Sequence[int]) -> list[Tensor]:
    inner = [start for start in starts if start]
    return list(torch.tensor_split(position_ids, inner, dim=1))


def _joined(found: list[Any], dim: int) -> Any:
    if isinstance(found[0], tuple):
        return tuple(torch.cat(each, dim=dim) for each in zip(*found, strict=True))
    return torch.cat(found, dim=dim)
