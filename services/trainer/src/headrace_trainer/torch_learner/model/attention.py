"""Attention over one row of several sequences: each sees itself alone, and of itself what the model's own mask shows.

Transformers describes a mask by a function of two positions: causal, a sliding window, chunks. Here it is asked for
each sequence by itself, from position 0, so what the row holds besides changes nothing, and no mask of the whole row
exists. Nor does one of a whole sequence: `blocks` asks for a few queries at a time and keeps the keys that they see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from headrace_trainer.torch_learner.model import blocks, flash, tiles
from headrace_trainer.torch_learner.model.blocks import Block

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


def bounds_now() -> tuple[int, ...]:
    """Those of the row that is being computed; empty outside of one."""
    return _row.get()


class Seen:
    """What the layers of a pass get as their mask. It outlives the pass where activations are computed again."""

    def __init__(self, bounds: tuple[int, ...], **asked: Any) -> None:
        self.bounds = bounds or (0, asked["q_length"])
        self._asked = asked
        self._blocks: dict[int, tuple[Block, ...]] = {}
        self._rows: dict[torch.device, flash.Row | None] = {}

    def of(self, length: int) -> tuple[Block, ...]:
        """How a sequence is computed."""
        if length not in self._blocks:
            self._blocks[length] = blocks.of(length, self._asked)
        return self._blocks[length]

    def row(self, query: Tensor) -> flash.Row | None:
        """How all of them are computed where `query` is; None where no kernel does that."""
        if query.device not in self._rows:
            long = flash.takes_long(query)
            self._rows[query.device] = flash.row_of(self.bounds, self._asked, query.device, cudnn=long)
        return self._rows[query.device]


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
    scores by a tanh (Gemma 2), `s_aux` is a score per head for looking nowhere (GPT-OSS). Neighbours that are equally
    long are computed together."""
    if not isinstance(attention_mask, Seen):
        raise NotImplementedError(f"{type(module).__name__} makes a mask of its own")
    if unused.get("position_bias") is not None:
        raise NotImplementedError(f"{type(module).__name__} needs more than plain attention")
    by_hand = softcap is not None or s_aux is not None
    if not by_hand and flash.takes(query, key, value):
        row = attention_mask.row(query)
        if row is not None:
            return flash.attend(query, key, value, row, scaling), None
    how: blocks.Attention = partial(_by_hand, scaling=scaling, softcap=softcap) if by_hand else partial(_fused, scaling)
    runs = [(length, len(list(same))) for length, same in groupby(b - a for a, b in pairwise(attention_mask.bounds))]
    parts = (_split(tensor, [length * count for length, count in runs]) for tensor in (query, key, value))
    attended = []
    for (length, count), *run in zip(runs, *parts, strict=True):
        q, k, v = (part.unflatten(2, (count, length)).transpose(1, 2).flatten(0, 1) for part in run)
        cut = attention_mask.of(length)
        if not by_hand and tiles.takes(q):
            found = tiles.attend(q, k, v, cut, scaling)
        else:
            found = blocks.attend(q, k, v, s_aux, blocks.finer(cut) if by_hand else cut, how)
        attended.append(found.transpose(1, 2).reshape(len(query), count * length, found.shape[1], found.shape[3]))
    return (attended[0] if len(attended) == 1 else torch.cat(attended, dim=1)).contiguous(), None


def _split(tensor: Tensor, lengths: list[int]) -> Sequence[Tensor]:
    return (tensor,) if len(lengths) == 1 else torch.split_with_sizes(tensor, lengths, dim=2)


def _fused(scaling: float | None, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, block: Block) -> Tensor:
    """By a kernel that keeps no scores. One takes values as wide as keys: zeros fill the rest."""
    width = value.shape[3]
    if width < query.shape[3]:
        value = functional.pad(value, (0, query.shape[3] - width))
    grouped = key.shape[1] < query.shape[1]
    if grouped and not _takes_groups(query, key, value, block):
        groups, grouped = query.shape[1] // key.shape[1], False
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = block.mask is None
    found = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=block.mask, is_causal=causal, scale=scaling, enable_gqa=grouped
    )
    return found[..., :width]


def _takes_groups(query: Tensor, key: Tensor, value: Tensor, block: Block) -> bool:
    """Whether the kernel reads keys that several heads share where they are. Without, they are copied for each."""
    if query.device.type == "cuda":
        asked = cuda.SDPAParams(query, key, value, block.mask, 0.0, block.mask is None, True)
        return bool(cuda.can_use_flash_attention(asked))
    return query.device.type == "cpu"


def _by_hand(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    s_aux: Tensor | None,
    block: Block,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """What no fused kernel does. Keeps the block's scores until its gradient is computed."""
    heads, (several, shared, keys, _) = query.shape[1], key.shape
    groups, length = heads // shared, query.shape[2]
    # Heads that share keys stand one below the other, so no key is copied.
    folded = query.reshape(several, shared, groups * length, query.shape[3])
    scores = (folded @ key.transpose(2, 3)).reshape(several, heads, length, keys)
    scores = scores * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = blocks.causal(length, keys, query.device) if block.mask is None else block.mask
    scores = scores.float().masked_fill(~seen, float("-inf"))
    if s_aux is not None:
        nowhere = s_aux.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, nowhere], dim=-1)
    shares = scores.softmax(-1)[..., :keys].to(value.dtype).reshape(several, shared, groups * length, keys)
    return (shares @ value).reshape(several, heads, length, value.shape[3])


def bounds_of(lengths: Sequence[int]) -> tuple[int, ...]:
    """Of sequences that stand one after the other."""
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return tuple(bounds)


AttentionInterface.register(BLOCKS, attend)
AttentionMaskInterface.register(BLOCKS, _seen)
