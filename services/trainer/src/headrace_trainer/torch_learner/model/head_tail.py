"""Operation that a model applies to the output of its head (a scale or a soft cap), and its detection with test
logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_PLANTED_MAX = 100.0
_HUGE = 1e6
_ROUNDING = 1e-5


@dataclass(frozen=True)
class Tail:
    """Operation that a model applies to the output of its head: a scale, `scale * logits` (Cohere, Granite), or a soft
    cap, `cap * tanh(logits / cap)` (Gemma)."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, raw: Tensor) -> Tensor:
        scaled = raw if self.scale == 1.0 else raw * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap

    def apply_in_place(self, raw: Tensor) -> Tensor:
        """Apply the operation to `raw`, the output of the head, in place, and return the logits."""
        if self.scale != 1.0:
            raw.mul_(self.scale)
        return raw if self.cap is None else raw.div_(self.cap).tanh_().mul_(self.cap)

    def gradient(self, gradient: Tensor, answer: Tensor | None) -> Tensor:
        """Compute the gradient of the input from that of the output, in place.

        Args:
            answer: output of the operation, which a cap needs; it is overwritten.
        """
        if self.cap is not None and answer is not None:
            gradient.mul_(answer.div_(self.cap).square_().neg_().add_(1.0))
        return gradient if self.scale == 1.0 else gradient.mul_(self.scale)


NO_TAIL = Tail()
"""The identity: the output of the head is the logits."""


def planted_logits(raw: Tensor) -> Tensor:
    """Return test logits of various sizes and both signs, shaped like `raw`, from which `find_tail` derives a
    `Tail`."""
    spread = torch.linspace(-_PLANTED_MAX, _PLANTED_MAX, raw.numel(), dtype=torch.float32, device=raw.device)
    spread[0], spread[1] = 1.0, _HUGE
    return spread.reshape(raw.shape)


def find_tail(planted: Tensor, answer: Tensor) -> Tail | None:
    """Return the operation that a model applies to the output of its head, or None if it is neither a scale nor a soft
    cap.

    Args:
        planted: the result of `planted_logits`, with which the output of the head was replaced in a forward pass.
        answer: the logits that the forward pass returned.
    """
    if answer.shape != planted.shape:
        return None
    small, huge = (float(value) for value in answer.flatten()[:2])
    tail = Tail(cap=huge) if 0 < huge < _HUGE * abs(small) / 2 else Tail(scale=small)
    return tail if torch.allclose(tail(planted), answer.float(), rtol=_ROUNDING, atol=_ROUNDING) else None
