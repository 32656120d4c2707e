"""Attention over one row of several sequences, each of which attends to itself alone, and its rotary embeddings.

Transformers describes a mask by a function of two positions: causal, a sliding window, chunks. Here that function is
evaluated for each sequence by itself, from position 0, so other sequences in the row have no effect, and no mask of the
whole row is built. Nor is a mask of a whole sequence: `blocks` evaluates a few queries at a time and keeps their keys.

Transformers chooses one set of frequencies for a whole pass, by its longest sequence, and dynamic NTK also remembers
the longest so far. Here each sequence of a pass gets its own frequencies, as if it were alone and the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from headrace_trainer.torch_learner.model import blocks, flash, tiles
from headrace_trainer.torch_learner.model.blocks import Block

BLOCKS = "headrace_blocks"
"""The name under which this attention is registered in transformers."""
_row: ContextVar[tuple[int, ...]] = ContextVar("bounds of the row's sequences", default=())
_BY_LENGTH = ("dynamic", "longrope")


@contextlib.contextmanager
def row_of_sequences(bounds: tuple[int, ...]) -> Iterator[None]:
    """Open a context in which forward passes compute one row that contains several sequences.

    Args:
        bounds: start of each sequence in the row, and the end of the last one.
    """
    token = _row.set(bounds)
    try:
        yield
    finally:
        _row.reset(token)


def bounds_now() -> tuple[int, ...]:
    """Return the bounds of the sequences in the row that is being computed; empty outside of `row_of_sequences`."""
    return _row.get()


class SequenceMask:
    """Attention mask of a row of sequences, which transformers passes to each layer in place of a mask tensor."""

    def __init__(self, bounds: tuple[int, ...], **mask_args: Any) -> None:
        self.bounds = bounds or (0, mask_args["q_length"])
        self._mask_args = mask_args
        self._blocks: dict[int, tuple[Block, ...]] = {}
        self._rows: dict[torch.device, flash.Row | None] = {}

    def of(self, length: int) -> tuple[Block, ...]:
        """Return the blocks into which the attention of a sequence of `length` tokens is divided."""
        if length not in self._blocks:
            self._blocks[length] = blocks.divide(length, self._mask_args)
        return self._blocks[length]

    def row(self, query: Tensor) -> flash.Row | None:
        """Return the plan of the row for a flash kernel on the device of `query`, or None if no kernel supports it."""
        if query.device not in self._rows:
            long = flash.is_cudnn_faster(query)
            self._rows[query.device] = flash.row_of(self.bounds, self._mask_args, query.device, cudnn=long)
        return self._rows[query.device]


def _mask_object(**mask_args: Any) -> SequenceMask:
    return SequenceMask(_row.get(), **mask_args)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: SequenceMask | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Compute attention inside each sequence of a row. The signature and shapes are those of transformers.

    `query`, `key` and `value` are `[1, heads, T, head_dim]`. Neighbouring sequences of equal length are computed
    together.

    Args:
        attention_mask: the mask of the row.
        scaling: factor of the scores; None: the inverse root of the width.
        softcap: bound on scores by a tanh (Gemma 2).
        s_aux: a score per head for attending to no token (GPT-OSS).
    """
    if not isinstance(attention_mask, SequenceMask):
        raise NotImplementedError(f"{type(module).__name__} builds a mask of its own")
    if unused.get("position_bias") is not None:
        raise NotImplementedError(f"{type(module).__name__} needs more than plain attention")
    unfused = softcap is not None or s_aux is not None
    if not unfused and flash.supports(query, key, value):
        row = attention_mask.row(query)
        if row is not None:
            return flash.attend(query, key, value, row, scaling), None
    how: blocks.Attention = partial(_unfused, scaling=scaling, softcap=softcap) if unfused else partial(_fused, scaling)
    runs = [(length, len(list(same))) for length, same in groupby(b - a for a, b in pairwise(attention_mask.bounds))]
    parts = (_split(tensor, [length * count for length, count in runs]) for tensor in (query, key, value))
    attended = []
    for (length, count), *run in zip(runs, *parts, strict=True):
        q, k, v = (part.unflatten(2, (count, length)).transpose(1, 2).flatten(0, 1) for part in run)
        cut = attention_mask.of(length)
        if not unfused and tiles.supports(q):
            result = tiles.attend(q, k, v, cut, scaling)
        else:
            result = blocks.attend(q, k, v, s_aux, blocks.refine(cut) if unfused else cut, how)
        attended.append(result.transpose(1, 2).reshape(len(query), count * length, result.shape[1], result.shape[3]))
    return (attended[0] if len(attended) == 1 else torch.cat(attended, dim=1)).contiguous(), None


def _split(tensor: Tensor, lengths: list[int]) -> Sequence[Tensor]:
    return (tensor,) if len(lengths) == 1 else torch.split_with_sizes(tensor, lengths, dim=2)


def _fused(scaling: float | None, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, block: Block) -> Tensor:
    """Compute the attention of a block by a fused kernel of torch, with values padded to the width of keys if
    needed."""
    width = value.shape[3]
    if width < query.shape[3]:
        value = functional.pad(value, (0, query.shape[3] - width))
    grouped = key.shape[1] < query.shape[1]
    if grouped and not _takes_groups(query, key, value, block):
        groups, grouped = query.shape[1] // key.shape[1], False
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = block.mask is None
    result = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=block.mask, is_causal=causal, scale=scaling, enable_gqa=grouped
    )
    return result[..., :width]


def _takes_groups(query: Tensor, key: Tensor, value: Tensor, block: Block) -> bool:
    """Return whether torch's kernel supports grouped-query attention here, so that shared keys need no copies."""
    if query.device.type == "cuda":
        params = cuda.SDPAParams(query, key, value, block.mask, 0.0, block.mask is None, True)
        return bool(cuda.can_use_flash_attention(params))
    return query.device.type == "cpu"


def _unfused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    s_aux: Tensor | None,
    block: Block,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """Compute the attention of a block by single operations, for soft caps and sinks, which no fused kernel
    supports."""
    heads, (batch, key_heads, keys, _) = query.shape[1], key.shape
    groups, length = heads // key_heads, query.shape[2]
    # Heads that share keys are stacked as rows of one matrix, so no key is copied.
    folded = query.reshape(batch, key_heads, groups * length, query.shape[3])
    scores = (folded @ key.transpose(2, 3)).reshape(batch, heads, length, keys)
    scores = scores * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = blocks.causal(length, keys, query.device) if block.mask is None else block.mask
    scores = scores.float().masked_fill(~visible, float("-inf"))
    if s_aux is not None:
        no_token = s_aux.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, no_token], dim=-1)
    shares = scores.softmax(-1)[..., :keys].to(value.dtype).reshape(batch, key_heads, groups * length, keys)
    return (shares @ value).reshape(batch, heads, length, value.shape[3])


def bounds_of(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the start of each sequence of these lengths in a row, and the end of the last one."""
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return tuple(bounds)


AttentionInterface.register(BLOCKS, attend)
AttentionMaskInterface.register(BLOCKS, _mask_object)


def replace_length_ropes(model: nn.Module) -> None:
    """Replace rotary embeddings of `model` whose frequencies depend on the sequence length, so that each sequence
    has its own."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        named = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if any(isinstance(kind, str) and any(word in kind for word in _BY_LENGTH) for kind in named):
            _PerSequenceRope(module)


class _PerSequenceRope:
    """Forward method of a rotary embedding that computes the frequencies of each sequence of a row by itself."""

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
        starts = bounds_now()[:-1] or (position_ids[0] == 0).nonzero().flatten().tolist()
        return _joined([self._compute_alone(x, part, *args, **named) for part in _parts(position_ids, starts)], 1)

    def _compute_alone(self, x: Tensor, position_ids: Tensor, *args: Any, **named: Any) -> Any:
        self._reset_frequencies()
        return self._original(x, position_ids, *args, **named)

    def _reset_frequencies(self) -> None:
        """Reset the module's frequencies to those for sequences within the original context."""
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
