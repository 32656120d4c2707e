"""Attention over a row of sequences on a GPU, by kernels that store no scores and need no mask.

Neighbouring sequences of up to `LONG` tokens are one call of flash attention, which gets the start of each: the host's
work is the same for 2 of them as for 60. Longer ones use cuDNN where the GPU is faster with it (Hopper and later; 1.6
times at 4,096 tokens). It prepares a plan for each length, so lengths are rounded up to multiples of `STEP`: the added
tokens follow the sequence, where its own tokens do not attend to them.

Keys that several heads share are read without copies, and a sliding window is two numbers. Whether a mask is plain
causality or such a window is not derived from a name: transformers' own mask is evaluated for the queries where
windows, chunks and plain causality differ. Where layers are recomputed, attention is stored in the first pass
(`recomputing`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from headrace_trainer.torch_learner.model import recomputing

LONG, STEP = 1024, 512
_WIDTH_MAX, _WIDTH_STEP = 256, 8
"""Head widths that flash attention supports."""
_CUDNN_WIDTH_MAX = 128
_AMPERE, _HOPPER = (8, 0), (9, 0)

ExtraTensors = tuple[Tensor | None, ...]
KernelResult = tuple[Tensor, ExtraTensors]
"""The result of attention, `[tokens, heads, width]`, and the other tensors that its gradient needs."""


@dataclass(frozen=True)
class Part:
    """Neighbouring sequences of a row whose attention is computed by one kernel call."""

    lengths: tuple[int, ...]
    window: int | None
    """Number of keys that a query attends to, its own included; None: all keys up to its own."""
    bounds: Tensor | None
    """int32 on the device: the start of each sequence in the part, and the end of the last one. None: each sequence is
    computed as if it had `rounded` tokens."""

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def rounded_length(self) -> int:
        return _round_up(self.longest)


@dataclass(frozen=True)
class Row:
    """Plan for computing the attention of one row of packed sequences: parts, each of which one kernel call
    computes."""

    parts: tuple[Part, ...]

    @property
    def sizes(self) -> list[int]:
        """Number of tokens in each of `parts`."""
        return [sum(part.lengths) for part in self.parts]


class Kernel(Protocol):
    """Interface of an attention kernel for tensors `[tokens, heads, width]`."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float | None) -> KernelResult: ...

    def backward(
        self,
        of: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        result: KernelResult,
        part: Part,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Flash:
    """Kernel of FlashAttention-2 (arXiv:2307.08691), as torch implements it."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float | None) -> KernelResult:
        answer, norms, state, _, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, part.bounds, part.bounds, part.longest, part.longest, 0.0, part.window is None, False,
            scale=scale, window_size_left=_left(part), window_size_right=0,
        )  # fmt: skip
        return answer, (norms, state)

    def backward(
        self,
        of: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        result: KernelResult,
        part: Part,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        answer, (norms, state) = result
        three: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            of, query, key, value, answer, norms, part.bounds, part.bounds, part.longest, part.longest, 0.0,
            part.window is None, state, query.new_empty(0), scale=scale, window_size_left=_left(part),
            window_size_right=0,
        )  # fmt: skip
        return three


class Cudnn:
    """Attention kernel of cuDNN for several sequences of equal (rounded) length."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float | None) -> KernelResult:
        three = (_rectangle(tensor, part) for tensor in (query, key, value))
        answer, norms, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *three, None, True, 0.0, True, False, scale=scale
        )
        return _strip(answer, part), (norms, seed, offset)

    def backward(
        self,
        of: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        result: KernelResult,
        part: Part,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        answer, (norms, seed, offset) = result
        five = (_rectangle(tensor, part) for tensor in (of, query, key, value, answer))
        of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *five,
            norms,
            seed,
            offset,
            None,
            None,
            None,
            part.rounded_length,
            part.rounded_length,
            0.0,
            True,
            scale=scale,
        )
        return _strip(of_query, part), _strip(of_key, part), _strip(of_value, part)


FLASH: Kernel = Flash()
CUDNN: Kernel = Cudnn()


def row_of(bounds: tuple[int, ...], mask_args: Mapping[str, Any], device: torch.device, *, cudnn: bool) -> Row | None:
    """Return the plan of a row's attention under the mask that transformers builds from `mask_args`.

    The result is None if no kernel supports the mask.

    Args:
        bounds: start of each sequence in the row, and the end of the last one.
        mask_args: arguments of transformers' mask functions.
        device: device of the row.
        cudnn: whether cuDNN computes long sequences.
    """
    lengths = [b - a for a, b in pairwise(bounds)]
    window_keys = window_of(max(lengths), mask_args)
    if window_keys is None:
        return None
    window = window_keys if window_keys < max(lengths) else None
    parts: list[Part] = []
    for several in _neighbours(lengths, cudnn=cudnn and window is None):
        if cudnn and window is None and several[0] > LONG:
            parts.append(Part(tuple(several), None, None))
        else:
            parts.append(Part(tuple(several), window, _offsets(several, device)))
    return Row(tuple(parts))


def _neighbours(lengths: list[int], *, cudnn: bool) -> Iterator[list[int]]:
    """Yield groups of neighbouring sequences, each of which is computed by one call.

    Short sequences form one group. Long ones are grouped if they are rounded to the same length, in groups of 1, 2, 4
    and so on, because cuDNN prepares a plan for each group size.
    """
    for size, group in groupby(lengths, lambda length: _round_up(length) if cudnn and length > LONG else 0):
        several = list(group)
        while several:
            count = 1 << (len(several).bit_length() - 1) if size else len(several)
            yield several[:count]
            several = several[count:]


def _offsets(lengths: list[int], device: torch.device) -> Tensor:
    offsets = functional.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
    return offsets.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else offsets


def _round_up(length: int) -> int:
    return -(-length // STEP) * STEP


def _left(part: Part) -> int:
    """Return the number of keys before a query's own that it attends to; -1 means all."""
    return -1 if part.window is None else part.window - 1


def _rectangle(tensor: Tensor, part: Part) -> Tensor:
    """Reshape a part of the row to `[sequences, heads, rounded length, width]`, with padding if it is needed."""
    if all(length == part.rounded_length for length in part.lengths):
        return tensor.reshape(len(part.lengths), part.rounded_length, *tensor.shape[1:]).transpose(1, 2)
    padded = tensor.new_zeros(len(part.lengths), part.rounded_length, *tensor.shape[1:])
    for target, source in zip(padded, torch.split(tensor, list(part.lengths)), strict=True):
        target[: len(source)] = source
    return padded.transpose(1, 2)


def _strip(tensor: Tensor, part: Part) -> Tensor:
    """Remove the padding that `_rectangle` added, and return the sequences one after the other."""
    rows = tensor.transpose(1, 2)
    if all(length == part.rounded_length for length in part.lengths):
        return rows.flatten(0, 1)
    return torch.cat([row[:length] for row, length in zip(rows, part.lengths, strict=True)])


def window_of(longest: int, mask_args: Mapping[str, Any]) -> int | None:
    """Return the window of a mask: the largest number of keys that a query attends to, its own included.

    It is `longest` for plain causality, and None if the mask is neither plain causality nor a window.
    """
    if not mask_args.get("allow_is_causal_skip", True):
        return None  # the mask was combined with another one
    local = mask_args.get("local_size")
    if local is None or local >= longest:
        return longest
    edges = (0, local - 1, local, local + 1, 2 * local - 1, 2 * local, longest - 1)
    queries = torch.tensor(sorted({edge for edge in edges if 0 <= edge < longest}))[:, None]
    keys = torch.arange(longest)[None]
    none = torch.zeros(1, 1, dtype=torch.int64)
    try:
        visible = mask_args["mask_function"](none, none, queries, keys)
    except (RuntimeError, TypeError, IndexError):
        return None  # the mask reads data on the device, which a window does not
    window = (keys <= queries) & (keys > queries - local)
    return int(local) if torch.equal(visible.expand_as(window), window) else None


def supports(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether a flash kernel supports these tensors in the type that `cast` returns."""
    width = query.shape[-1]
    fits = width == key.shape[-1] == value.shape[-1] and width <= _WIDTH_MAX and width % _WIDTH_STEP == 0
    if query.device.type != "cuda" or not fits or cast(query).dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(query.device) >= _AMPERE


def is_cudnn_faster(query: Tensor) -> bool:
    """Return whether cuDNN's kernel is available and faster for long sequences."""
    able = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    allowed = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    if not (able and allowed):
        return False
    return query.shape[-1] <= _CUDNN_WIDTH_MAX and torch.cuda.get_device_capability(query.device) >= _HOPPER


def cast(tensor: Tensor) -> Tensor:
    """Return the tensor in the type that autocast, if enabled, uses for matrix products."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: Row,
    scale: float | None,
    kernels: tuple[Kernel, Kernel] | None = None,
) -> Tensor:
    """Compute the attention of a row, from `[1, heads, T, width]` to `[1, T, heads, width]`.

    Args:
        row: plan of the row.
        scale: factor of the scores; None: the inverse root of the width.
        kernels: kernels of parts with and without bounds; None for `FLASH` and `CUDNN`.
    """
    three = (cast(tensor).squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    # Not `[0]`, whose gradient is written into zeros first.
    how = _AttentionPlan(row, scale, kernels or (FLASH, CUDNN))
    result: Tensor = _Attention.apply(*three, how)  # type: ignore[no-untyped-call]
    return result[None]


@dataclass(frozen=True)
class _AttentionPlan:
    row: Row
    scale: float | None
    kernels: tuple[Kernel, Kernel]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, list[ExtraTensors]]:
        three = (torch.split(tensor, self.row.sizes) for tensor in (query, key, value))
        answers, more = [], []
        for part, q, k, v in zip(self.row.parts, *three, strict=True):
            answer, beside = self._kernel(part).forward(q, k, v, part, self.scale)
            answers.append(answer)
            more.append(beside)
        return (answers[0] if len(answers) == 1 else torch.cat(answers)), more

    def backward(
        self,
        of: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        answer: Tensor,
        more: list[ExtraTensors],
    ) -> tuple[Tensor, ...]:
        five = (torch.split(tensor, self.row.sizes) for tensor in (of, query, key, value, answer))
        parts = [
            self._kernel(part).backward(of_part, q, k, v, (part_answer, beside), part, self.scale)
            for part, beside, of_part, q, k, v, part_answer in zip(self.row.parts, more, *five, strict=True)
        ]
        return parts[0] if len(parts) == 1 else tuple(torch.cat(each) for each in zip(*parts, strict=True))

    def _kernel(self, part: Part) -> Kernel:
        return self.kernels[part.bounds is None]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, how: _AttentionPlan) -> Tensor:
        answer, more = recomputing.compute_once(partial(how.forward, query, key, value))
        ctx.save_for_backward(query, key, value, answer, *(tensor for beside in more for tensor in beside))
        ctx.how, ctx.counts = how, [len(beside) for beside in more]
        return answer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, answer, *flat = ctx.saved_tensors
        rest = iter(flat)
        more = [tuple(next(rest) for _ in range(count)) for count in ctx.counts]
        return *ctx.how.backward(gradient.contiguous(), query, key, value, answer, more), None
