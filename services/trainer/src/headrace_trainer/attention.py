"""Attention over one row of several sequences: each sees itself alone, and of itself what the model's own mask shows.

Transformers describes a mask by a function of two positions: causal, a sliding window, chunks. Here it is asked for
each sequence by itself, from position 0, so what the row holds besides changes nothing, and no mask of the whole row
exists.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

BLOCKS = "headrace_blocks"
"""The name under which transformers knows our attention."""
_row: ContextVar[tuple[int, ...]] = ContextVar("bounds of the row's sequences", default=())


@contextlib.contextmanager
def sequences(bounds: tuple[int, ...]) -> Iterator[None]:
    """Forward passes inside are over one row with these sequences: where each starts, and where the last one ends."""
    token = _row.set(bounds)
    try:
        yield
    finally:
        _row.reset(token)


class Seen:
    """What the layers of a pass get as their mask. It outlives the pass where activations are computed again."""

    def __init__(self, bounds: tuple[int, ...], **asked: Any) -> None:
        self.bounds = bounds or (0, asked["q_length"])
        self._asked = asked
        self._masks: dict[int, Tensor | None] = {}

    def of(self, length: int) -> Tensor | None:
        """The mask of a sequence, `[1, 1, T, T]`, True where a key is seen; None when plain causality will do."""
        if length not in self._masks:
            alone = {"batch_size": 1, "q_length": length, "kv_length": length, "attention_mask": None}
            self._masks[length] = sdpa_mask(**{**self._asked, **alone, "q_offset": 0, "kv_offset": 0})
        return self._masks[length]


def _seen(**asked: Any) -> Seen:
    return Seen(_row.get(), **asked)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Seen | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention inside each sequence; shapes as transformers has them, `[1, heads, T, head_dim]` in. `softcap` bounds
    scores by a tanh (Gemma 2), `s_aux` is a score per head for looking nowhere (GPT-OSS)."""
    if not isinstance(attention_mask, Seen):
        raise NotImplementedError(f"{type(module).__name__} makes a mask of its own")
    if unused.get("position_bias") is not None:
        raise NotImplementedError(f"{type(module).__name__} needs more than plain attention")
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    lengths = [stop - start for start, stop in pairwise(attention_mask.bounds)]
    parts = (torch.split_with_sizes(tensor, lengths, dim=2) for tensor in (query, key, value))
    attended = []
    for q, k, v in zip(*parts, strict=True):
        mask = attention_mask.of(q.shape[2])
        if softcap is None and s_aux is None:
            found = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling
            )
        else:
            found = _by_hand(q, k, v, mask, scaling, softcap, s_aux)
        attended.append(found)
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous(), None


def _by_hand(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """What no fused kernel does. Keeps all scores of a sequence, as the model's own attention does."""
    length = query.shape[2]
    seen = mask if mask is not None else torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.float().masked_fill(~seen, float("-inf"))
    if s_aux is not None:
        nowhere = s_aux.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, nowhere], dim=-1)
    return scores.softmax(-1)[..., :length].to(value.dtype) @ value


def bounds_of(lengths: Sequence[int]) -> tuple[int, ...]:
    """Of sequences that stand one after the other."""
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return tuple(bounds)


AttentionInterface.register(BLOCKS, attend)
AttentionMaskInterface.register(BLOCKS, _seen)
