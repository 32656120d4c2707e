"""A sequence's attention in blocks of queries, each with the keys that they see between them, and no others.

A sliding window of W tokens then costs T x W and not T x T, in time and in memory. Plain causality needs no cutting: a
fused kernel does that. In the backward pass each block is computed once more, so nothing of it has been kept, and the
gradients of keys that several blocks see are added up in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.masking_utils import sdpa_mask

QUERIES = 256
"""Of a block. More would see more keys in vain, fewer would be small for a product."""


@dataclass(frozen=True)
class Block:
    """Queries `start` to `stop`, and keys `first` to `last`; the last of each is not in it."""

    start: int
    stop: int
    first: int
    last: int
    mask: Tensor | None
    """`[1, 1, queries, keys]`, True where a key is seen; None: each query sees all keys up to its own, which is the
    last one of the last query."""

    @property
    def queries(self) -> int:
        return self.stop - self.start

    @property
    def keys(self) -> int:
        return self.last - self.first


Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None, Block], Tensor]
"""Of one block, from its queries, keys and values, and what comes with each head."""


def causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """What `Block.mask` = None stands for, without its first two dimensions."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def of(length: int, asked: Mapping[str, Any]) -> tuple[Block, ...]:
    """How a sequence is cut under the mask that transformers asks for by `asked`."""
    alone = {**asked, "batch_size": 1, "kv_length": length, "kv_offset": 0, "attention_mask": None}
    if _plainly_causal(length, alone):
        return (Block(0, length, 0, length, None),)
    found: list[Block] = []
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        first, last = _reach(start, stop, length, asked)
        keys = {"kv_length": last - first, "kv_offset": first, "allow_is_causal_skip": False}
        shown = sdpa_mask(**{**alone, **keys, "q_length": stop - start, "q_offset": start})
        assert shown is not None, "it was asked not to leave a mask out"
        found.append(_block(start, stop, first, shown, found[-1] if found else None))
        if len(found) == 2 and found[0].mask is None and found[1].mask is None:
            found = [Block(0, stop, 0, stop, None)]
    return tuple(found)


def _reach(start: int, stop: int, length: int, asked: Mapping[str, Any]) -> tuple[int, int]:
    """Keys beyond these are not seen. Transformers says so with `local_size` where a mask is a window or chunks and
    nothing else, which is where it would leave the mask of a shorter sequence out; else all are asked about."""
    local = asked.get("local_size")
    if local is None or not asked.get("allow_is_causal_skip", True):
        return 0, length
    return max(0, start - local), stop


def finer(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """The same without a long one: for attention that keeps the scores of a block."""
    return tuple(one for block in blocks for one in split(block, QUERIES))


def split(block: Block, queries: int) -> Iterator[Block]:
    """The same in parts of at most so many queries."""
    for start in range(block.start, block.stop, queries):
        stop = min(start + queries, block.stop)
        if block.mask is None:
            yield Block(start, stop, block.first, block.last - (block.stop - stop), None)
        else:
            mask = block.mask[:, :, start - block.start : stop - block.start]
            yield Block(start, stop, block.first, block.last, mask)


def attend(
    query: Tensor, key: Tensor, value: Tensor, heads: Tensor | None, blocks: tuple[Block, ...], how: Attention
) -> Tensor:
    """`[B, heads, T, head_dim]` of sequences that are equally long. `heads`: a number for each head, which may have a
    gradient."""
    if len(blocks) == 1:
        return how(query, key, value, heads, blocks[0])
    found: Tensor = _InBlocks.apply(query, key, value, heads, blocks, how)  # type: ignore[no-untyped-call]
    return found


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        heads: Tensor | None,
        blocks: tuple[Block, ...],
        how: Attention,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, heads)
        ctx.blocks, ctx.how = blocks, how
        return torch.cat([how(*_of(block, query, key, value), heads, block) for block in blocks], dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        given = ctx.saved_tensors
        needed = [index for index, wanted in enumerate(ctx.needs_input_grad[:4]) if wanted]
        # Sums over blocks are in float32: a key is seen by many.
        sums = {index: torch.zeros_like(given[index], dtype=_wide(given[index])) for index in needed}
        for block in ctx.blocks:
            parts = [*_of(block, *given[:3]), given[3]]
            places = [*_of(block, *(sums.get(index) for index in range(3))), sums.get(3)]
            with torch.enable_grad():
                leaves: list[Any] = [None if part is None else part.detach() for part in parts]
                asked: list[Tensor] = [leaves[index].requires_grad_() for index in needed]
                found = ctx.how(*leaves, block)
            here = gradient[:, :, block.start : block.stop]
            of = torch.autograd.grad(found, asked, here)
            for index, one in zip(needed, of, strict=True):
                places[index].add_(one)
        return *(sums[index].to(given[index].dtype) if index in sums else None for index in range(4)), None, None


def _of(block: Block, query: Tensor | None, key: Tensor | None, value: Tensor | None) -> tuple[Any, Any, Any]:
    """The parts of these that the block is about."""
    queries, keys = slice(block.start, block.stop), slice(block.first, block.last)
    pairs = ((query, queries), (key, keys), (value, keys))
    one, two, three = (None if tensor is None else tensor[:, :, place] for tensor, place in pairs)
    return one, two, three


def _block(start: int, stop: int, offset: int, shown: Tensor, before: Block | None) -> Block:
    """`shown`: `[1, 1, queries, keys from offset on]`."""
    columns = shown[0, 0].any(0).nonzero()
    low, high = int(columns[0]), int(columns[-1]) + 1
    mask, first, last = shown[..., low:high], offset + low, offset + high
    whole = first == 0 and last == stop and (before is None or before.mask is None)
    if whole and torch.equal(mask[0, 0], causal(stop - start, last, mask.device)):
        return Block(start, stop, first, last, None)
    if before is not None and before.mask is not None and torch.equal(before.mask, mask):
        return Block(start, stop, first, last, before.mask)  # one mask for all of a window's blocks
    return Block(start, stop, first, last, mask.clone())


class _Asked(Exception):
    """Transformers wants to know what is seen."""


def _plainly_causal(length: int, alone: Mapping[str, Any]) -> bool:
    """Whether transformers would leave the mask out. It is not made to find out."""

    def ask(*_: Any) -> Tensor:
        raise _Asked

    try:
        return sdpa_mask(**{**alone, "q_length": length, "q_offset": 0, "mask_function": ask}) is None
    except _Asked:
        return False


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
