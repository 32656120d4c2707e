"""One forward pass of a transformers model over a batch whose KV is in the engine's own tensors.

Shapes: `_R` row of the batch, `_Q` new token of a row, `_T` position that attention sees, `_V` vocabulary.
Each row has its own positions: rows of different lengths decode together, and a prompt may be continued while other
    rows wait. All functions map tensors to tensors, so that they can be traced (`program`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION = "headrace"
"""Name of the engine's attention in transformers (`attn_implementation`)."""

_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments of attention that the fused implementation would ignore."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute scaled dot-product attention without copies of grouped keys and values.

    Transformers makes these copies, and they cost more than the attention. A decoding row has one query; its heads that
    share keys become the queries of one head.
    """
    if any(options.get(name) is not None for name in _UNSUPPORTED):
        raise NotImplementedError(f"{type(module).__name__} needs more than plain attention")
    rows, heads, queries, size = query.shape
    if queries == 1:
        grouped = query.view(rows, key.shape[1], -1, size)
        output = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
        return output.reshape(rows, 1, heads, size), None  # the strides differ between devices
    if query.device.type == "cuda":  # no fused kernel takes a mask and shared keys, so heads become queries of one head
        shared = key.shape[1]
        grouped = query.reshape(rows, shared, -1, size)
        folded = mask.expand(-1, heads // shared, -1, -1).reshape(rows, 1, -1, mask.shape[3])
        output = scaled_dot_product_attention(grouped, key, value, attn_mask=folded, scale=scaling)
        return output.reshape(rows, heads, queries, size).transpose(1, 2), None
    output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)


class RowCache:
    """KV cache in the interface of transformers.

    It writes each row's new keys and values at that row's own positions.
    """

    is_compileable = False

    def __init__(self, kv: Tensor, positions_RQ: Tensor, length: int) -> None:
        self._kv = kv
        self._index = positions_RQ[:, None, :, None]
        self._length = length

    def get_seq_length(self, _layer: int = 0) -> int:
        return 0  # positions are always passed explicitly

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        keys, values = self._kv[2 * layer], self._kv[2 * layer + 1]
        index = self._index.expand_as(key)
        keys.scatter_(2, index, key)
        values.scatter_(2, index, value)
        return keys[:, :, : self._length], values[:, :, : self._length]


def forward(model: nn.Module, ids_RQ: Tensor, positions_RQ: Tensor, window_T: Tensor, kv: Tensor) -> Tensor:
    """Return the logits of each row's last new token, float32 `[R, V]`, and write the KV of all new tokens to `kv`.

    Args:
        window_T: 0 up to the last position that any row sees.
        kv: `[2 * layers, R, heads, length, size]`.
    """
    return run(model, ids_RQ, positions_RQ, window_T, kv, keep=1)[:, -1]


def run(model: nn.Module, ids_RQ: Tensor, positions_RQ: Tensor, window_T: Tensor, kv: Tensor, *, keep: int) -> Tensor:
    """Run the forward pass, and return the logits of each row's last `keep` tokens, `[R, keep, V]`; 0 keeps all."""
    unseen = window_T > positions_RQ[:, None, :, None]
    mask = torch.zeros((), dtype=kv.dtype, device=kv.device).masked_fill(unseen, float("-inf"))
    output = model(
        input_ids=ids_RQ,
        position_ids=positions_RQ,
        attention_mask=mask,
        past_key_values=RowCache(kv, positions_RQ, window_T.shape[0]),
        use_cache=True,
        logits_to_keep=keep,
    )
    logits: Tensor = output.logits.float()
    return logits
