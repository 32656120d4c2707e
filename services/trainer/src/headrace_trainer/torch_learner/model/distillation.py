"""A distillation target: a policy gradient in the mean over all words at a position, not only over the sampled word.

    A_v = clip(log p_t(v) - log p_s(v), +- limit)          p_t: a teacher, p_s: the present weights; A has no gradient
    L   = - sum_n w_n sum_v p_s(v) A_v

Without the clip its gradient is that of KL(p_s || p_t), as in the self-distillation of arXiv:2601.20802. No tensor of
loss tokens x vocabulary is made: the teacher's logits are computed from its hidden states, chunk by chunk, while those
of the present weights are in memory (`head`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace_trainer.torch_learner.model.pack_sets import EXCLUDED


@dataclass(frozen=True)
class DistillationTarget:
    """Teacher's hidden states at some of the loss tokens of a pass, towards whose distributions the policy is
    trained."""

    positions_M: Tensor
    """Indices of these tokens among the loss tokens, ascending."""
    hidden_MH: Tensor
    """The inputs of the teacher's head."""
    weight_M: Tensor
    """Factor of the gradient of each token: its weight in the loss, with the sign of its row."""
    answer: Callable[[Tensor], Tensor]
    """The teacher's head, which returns the logits of hidden states in float32, in a new tensor."""
    limit: float

    def gradient(
        self, part: slice, log_nV: Tensor, shares_nV: Tensor, temperature_n: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Compute the gradient of the logits in one chunk.

        Args:
            part: slice of the loss tokens in the chunk.
            log_nV: logprobs of the present weights, after temperature.
            shares_nV: their probabilities.
            temperature_n: temperature of each token.

        Returns:
            Indices within the chunk and the gradients to add there, or None where the chunk has no token with a target.
        """
        first, last = torch.searchsorted(self.positions_M, torch.tensor([part.start, part.stop], device=log_nV.device))
        if first == last:
            return None
        index_m = self.positions_M[first:last] - part.start
        temperature_m = temperature_n[index_m, None]
        teacher_mV = self.answer(self.hidden_MH[first:last]).div_(temperature_m)
        teacher_mV = teacher_mV.masked_fill_(log_nV[index_m] < EXCLUDED / 4, EXCLUDED).log_softmax(-1)
        advantage_mV = teacher_mV.sub_(log_nV[index_m]).clamp_(-self.limit, self.limit)
        shares_mV = shares_nV[index_m]
        mean_m = (shares_mV * advantage_mV).sum(-1, keepdim=True)
        weight_m = self.weight_M[first:last, None] / temperature_m
        return index_m, advantage_mV.sub_(mean_m).mul_(shares_mV).mul_(-weight_m)
