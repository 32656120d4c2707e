"""One forward pass of a transformers model over a batch whose KV is in our own tensors.

Shapes: `_R` row of the batch, `_Q` new token of a row, `_T` position that attention sees, `_V` vocabulary.
A row's positions are its own: rows of different lengths decode together, and a row may be prefilled further while
others wait. Everything here is tensors in, tensors out, so that a tracer can follow it (`program`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION = "headrace"
"""The name under which models find our attention (`attn_implementation`)."""

Forward = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor], Tensor]


_NOT_PLAIN = ("softcap", "s_aux", "position_bias")
"""What a model may ask of its attention that the fused one does not do, and does not mention either."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """SDPA without copies of grouped keys and values, which transformers makes and which cost more than the attention.

    A decoding row has one query: its heads that share keys become the queries of one head.
    """
    if any(asked.get(name) is not None for name in _NOT_PLAIN):
        raise NotImplementedError(f"{type(module).__name__} needs more than plain attention")
    rows, heads, queries, size = query.shape
    if queries == 1:
        grouped = query.view(rows, key.shape[1], -1, size)
        output = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
        return output.reshape(rows, 1, heads, size), None  # on a GPU it may stand otherwise
    if query.device.type == "cuda":  # no fused kernel there takes a mask and shared keys: theirs are one head's queries
        shared = key.shape[1]
        grouped = query.reshape(rows, shared, -1, size)
        folded = mask.expand(-1, heads // shared, -1, -1).reshape(rows, 1, -1, mask.shape[3])
        output = scaled_dot_product_attention(grouped, key, value, attn_mask=folded, scale=scaling)
        return output.reshape(rows, heads, queries, size).transpose(1, 2), None
    output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)


class Slots:
    """What a model sees as its cache: writes new keys and values at each row's own positions."""

    is_compileable = False

    def __init__(self, kv: Tensor, positions_RQ: Tensor, length: int) -> None:
        self._kv = kv
        self._index = positions_RQ[:, None, :, None]
        self._length = length

    def get_seq_length(self, _layer: int = 0) -> int:
        return 0  # positions are always given

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        keys, values = self._kv[2 * layer], self._kv[2 * layer + 1]
        index = self._index.expand_as(key)
        keys.scatter_(2, index, key)
        values.scatter_(2, index, value)
        return keys[:, :, : self._length], values[:, :, : self._length]


def forward(model: nn.Module, ids_RQ: Tensor, positions_RQ: Tensor, window_T: Tensor, kv: Tensor) -> Tensor:
    """Logits of each row's last new token, float32 `[R, V]`; the KV of all new tokens is written to `kv`.

    `window_T` counts from 0 to the last position that any row sees; `kv` is `[2 * layers, R, heads, length, size]`.
    """
    return run(model, ids_RQ, positions_RQ, window_T, kv, keep=1)[:, -1]


def run(model: nn.Module, ids_RQ: Tensor, positions_RQ: Tensor, window_T: Tensor, kv: Tensor, *, keep: int) -> Tensor:
    """As `forward`, with the logits of the last `keep` tokens, of all when 0: `[R, keep, V]`."""
    unseen = window_T > positions_RQ[:, None, :, None]
    mask = torch.zeros((), dtype=kv.dtype, device=kv.device).masked_fill(unseen, float("-inf"))
    output = model(
        input_ids=ids_RQ,
        position_ids=positions_RQ,
        attention_mask=mask,
        past_key_values=Slots(kv, positions_RQ, window_T.shape[0]),
        use_cache=True,
        logits_to_keep=keep,
    )
    logits: Tensor = output.logits.float()
    return logits
