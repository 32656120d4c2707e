"""A policy gradient in the mean over all words at a place of the loss, in place of the one word that was sampled there.

    A_v = clip(log p_t(v) - log p_s(v), +- limit)          p_t: a teacher, p_s: the present weights; A has no gradient
    L   = - sum_n w_n sum_v p_s(v) A_v

Without the clip its gradient is that of KL(p_s || p_t), as in the self-distillation of arXiv:2601.20802. No tensor of
loss tokens x vocabulary is made: the teacher's logits come from its hidden states, chunk by chunk, while those of the
present weights are there (`head`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Taught:
    """Some of the loss tokens of a pass, and what a teacher thinks there."""

    places_M: Tensor
    """Which ones, ascending."""
    hidden_MH: Tensor
    """What the teacher asks its head."""
    weight_M: Tensor
    """What the gradient of each is multiplied with: the token's share of the loss, with the sign of its row."""
    answer: Callable[[Tensor], Tensor]
    """Its head: logits in float32, in a tensor of their own, of some hidden states."""
    limit: float

    def gradient(
        self, part: slice, log_nV: Tensor, shares_nV: Tensor, temperature_n: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Of the logits of the loss tokens `part`: which of them, and what is added there. `log_nV` and `shares_nV`:
        what the present weights think, after temperature."""
        first, last = torch.searchsorted(self.places_M, torch.tensor([part.start, part.stop], device=log_nV.device))
        if first == last:
            return None
        here_m = self.places_M[first:last] - part.start
        temperature_m = temperature_n[here_m, None]
        teacher_mV = self.answer(self.hidden_MH[first:last]).div_(temperature_m).log_softmax(-1)
        advantage_mV = teacher_mV.sub_(log_nV[here_m]).clamp_(-self.limit, self.limit)
        shares_mV = shares_nV[here_m]
        mean_m = (shares_mV * advantage_mV).sum(-1, keepdim=True)
        weight_m = self.weight_M[first:last, None] / temperature_m
        return here_m, advantage_mV.sub_(mean_m).mul_(shares_mV).mul_(-weight_m)
