"""Supervised training of a base model on demonstrations, which teaches the right steps, but not to always take them."""

# ruff: noqa: N803, N806 (tensors and token lists carry their shape as suffixes: _N conversations, _B batch, _T tokens)

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Tokens = list[int]


@dataclass(frozen=True)
class Schedule:
    """Training schedule. Right conversations come first, until the model can copy from its context, then bad habits as
    well."""

    steps: int = 400
    batch: int = 8
    """Conversations of a step."""
    right_share: float = 0.6
    """Share of the conversations before bad habits occur."""
    muon_lr: float = 0.006
    """Learning rate of matrices."""
    adamw_lr: float = 0.003
    """Learning rate of embeddings and norms."""
    decay_share: float = 0.7
    """Share of the steps over which the learning rates decay to zero."""
    other_weight: float = 0.02
    """Loss weight of tokens that the model only reads; its own tokens have weight 1."""

    @property
    def shown(self) -> int:
        """Number of conversations."""
        return self.steps * self.batch

    @property
    def shown_right(self) -> int:
        """Number of conversations at the beginning without a bad habit."""
        return round(self.shown * self.right_share)


def train(
    model: torch.nn.Module,
    texts_N: list[Tokens],
    opening: Tokens,
    end: int,
    schedule: Schedule,
    step_done: Callable[[], None],
) -> None:
    """Train one pass over the rendered conversations `texts_N`, in order.

    The model's own tokens are those between `opening`, which begins its turn, and `end`, inclusive.
    """
    import torch
    from torch.nn.functional import cross_entropy

    matrices, rest = _by_optimizer(model)
    optimizers = [
        torch.optim.Muon(matrices, lr=schedule.muon_lr, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=schedule.adamw_lr, weight_decay=0.0, betas=(0.9, 0.98)),
    ]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, _rate(schedule)) for optimizer in optimizers]
    for first in range(0, len(texts_N), schedule.batch):
        tokens_BT, weights_BT = _padded(texts_N[first : first + schedule.batch], opening, end, schedule.other_weight)
        logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits
        targets_BT, weights_BT = tokens_BT[:, 1:], weights_BT[:, 1:]
        losses_N = cross_entropy(logits_BTV[:, :-1].flatten(0, 1), targets_BT.flatten(), reduction="none")
        loss = (losses_N * weights_BT.flatten()).sum() / weights_BT.sum()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        step_done()


def _by_optimizer(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Return matrices between hidden layers, for Muon, and embeddings and norms, for AdamW."""
    named = list(model.named_parameters())
    is_matrix = {name: weight.ndim == 2 and "embed" not in name for name, weight in named}
    return [weight for name, weight in named if is_matrix[name]], [
        weight for name, weight in named if not is_matrix[name]
    ]


def _rate(schedule: Schedule, rise_steps: int = 20) -> Callable[[int], float]:
    def factor(step: int) -> float:
        left = 1 - step / schedule.steps
        return min(1.0, (step + 1) / rise_steps, left / schedule.decay_share + 0.02)

    return factor


def _padded(texts_B: list[Tokens], opening: Tokens, end: int, other: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and loss weights, padded on the right with weight 0."""
    import torch

    longest = max(map(len, texts_B))
    tokens_BT = torch.zeros(len(texts_B), longest, dtype=torch.long)
    weights_BT = torch.zeros(len(texts_B), longest)
    for row, text in enumerate(texts_B):
        tokens_BT[row, : len(text)] = torch.tensor(text)
        weights_BT[row, : len(text)] = other
        for start, stop in _own_spans(text, opening, end):
            weights_BT[row, start:stop] = 1.0
    return tokens_BT, weights_BT


def _own_spans(text: Tokens, opening: Tokens, end: int) -> Iterator[tuple[int, int]]:
    for position in range(len(text) - len(opening) + 1):
        start = position + len(opening)
        if text[position:start] == opening:
            yield start, text.index(end, start) + 1
