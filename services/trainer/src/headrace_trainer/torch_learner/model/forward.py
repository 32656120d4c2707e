"""One forward pass over several sequences: the present weights' logprob of each token of the loss.

`blocks` joins the sequences of a pack into one row. `attention` runs sequence by sequence, so a token attends to its
own sequence only, no padding is computed, and the result equals one pass per sequence. Position ids restart with each
sequence. `padded` is the classical rectangle with an attention mask, for models whose layers mix along the row in other
ways. The last hidden states go to the output head in chunks (`head`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace_trainer.batches.batch import Row
from headrace_trainer.torch_learner.model import attention, head
from headrace_trainer.torch_learner.model.distillation import DistillationTarget
from headrace_trainer.torch_learner.model.head import Head, Slope
from headrace_trainer.torch_learner.model.pack_sets import PackSets


@dataclass(frozen=True)
class Pack:
    """Inputs of one forward pass as tensors. Those with the suffix `_N` have one entry per loss token, row by row."""

    token_ids_BT: Tensor
    position_ids_BT: Tensor
    attention_mask_BT: Tensor | None
    """None for blocks."""
    bounds: tuple[int, ...]
    """The start of each block, and the end of the last one; empty when padded."""
    predicting_N: Tensor
    """Flat positions whose logits predict the loss tokens."""
    targets_N: Tensor
    behaviour_N: Tensor
    temperature_N: Tensor
    advantage_N: Tensor
    weight_N: Tensor
    """The weight of each token in the loss."""
    fresh_N: Tensor
    row_N: Tensor
    """Index in `names` of the row that the token belongs to."""
    names: tuple[str, ...]
    """Names of the rows, in order."""
    written_N: Tensor | None = None
    """Tokens without logprobs of a sampling policy, because they were written or the engine reported none, or None
    where there are no such tokens."""
    pair_R: Tensor | None = None
    """Index of the row that each row is paired with, its own index where there is none, or None without pairs."""
    rows: tuple[Row, ...] = ()
    """The rows of the pack, from which a teacher builds other sequences."""
    sets: PackSets | None = None
    """The tokens that positions were sampled from, or None where every position allows all."""
    distillation: DistillationTarget | None = None
    """Tokens with a distillation target over all words; only with a head that is `plain`."""

    @property
    def idle(self) -> bool:
        """Whether no row has a name, so that the pass has no weight (`headrace_trainer.torch_learner.step`)."""
        return not any(self.names)


def collate(rows: Sequence[Row], device: torch.device, *, padded: bool) -> Pack:
    """Build the tensors of a forward pass over several rows. The logits that predict token t are at position t - 1."""
    lengths = [row.length for row in rows]
    width = max(lengths) if padded else sum(lengths)
    starts = [index * width for index in range(len(rows))] if padded else [0, *np.cumsum(lengths[:-1]).tolist()]
    shape = (len(rows), width) if padded else (1, width)
    token_ids = np.zeros(shape, np.int64)
    positions = np.zeros(shape, np.int64)
    attended = np.zeros(shape, np.int64)
    for row, start in zip(rows, starts, strict=True):
        tokens = slice(start, start + row.length)
        token_ids.reshape(-1)[tokens] = row.token_ids_T
        positions.reshape(-1)[tokens] = np.arange(row.length)
        attended.reshape(-1)[tokens] = 1
    predicting = [start + np.flatnonzero(row.loss_mask_T) - 1 for row, start in zip(rows, starts, strict=True)]

    def joined(values: Sequence[Any]) -> Tensor:
        return _to_device(device, np.concatenate(values))

    return Pack(
        _to_device(device, token_ids),
        _to_device(device, positions),
        _to_device(device, attended) if padded else None,
        () if padded else (*starts, width),
        joined(predicting),
        joined([row.token_ids_T[row.loss_mask_T].astype(np.int64) for row in rows]),
        joined([row.behaviour_T[row.loss_mask_T] for row in rows]),
        joined([row.temperature_T[row.loss_mask_T] for row in rows]),
        joined([_advantages(row) for row in rows]),
        joined([np.full(row.loss_mask_T.sum(), row.token_weight, np.float32) for row in rows]),
        joined([row.fresh_T[row.loss_mask_T] for row in rows]),
        joined([np.full(row.loss_mask_T.sum(), index, np.int64) for index, row in enumerate(rows)]),
        tuple(row.name for row in rows),
        joined([_written(row) for row in rows]) if any(_written(row).any() for row in rows) else None,
        _to_device(device, _pairs(rows)) if any(row.together for row in rows) else None,
        tuple(rows),
        PackSets.of(rows, device),
    )


def _written(row: Row) -> np.ndarray[Any, Any]:
    """Return for each loss token of a row whether it lacks a logprob of the sampling policy (written or unreported)."""
    if row.unsampled_T is None or row.written:
        return np.full(row.tokens, row.written)
    return row.unsampled_T[row.loss_mask_T]


def _advantages(row: Row) -> np.ndarray[Any, Any]:
    if row.advantage_T is None:
        return np.full(row.loss_mask_T.sum(), row.advantage, np.float32)
    return row.advantage_T[row.loss_mask_T]


def _pairs(rows: Sequence[Row]) -> np.ndarray[Any, Any]:
    """Return for each row (token sequence) the index of its partner, or its own index if it has none.

    Partners are two rows with the same `Row.together`, such as the chosen and the rejected answer of a preference.
    """
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.together, []).append(index)
    partners = np.arange(len(rows), dtype=np.int64)
    for together, (first, *partners_of_first) in groups.items():
        if together and partners_of_first:
            partners[first], partners[partners_of_first[0]] = partners_of_first[0], first
    return partners


def _to_device(device: torch.device, array: np.ndarray[Any, Any]) -> Tensor:
    """Copy an array to the device asynchronously."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def logprobs(model: Any, output: Head, pack: Pack) -> tuple[Tensor, Tensor]:
    """Return `(logprobs_N, entropy_N)` of the loss tokens in float32, under `model` with the head `output`."""
    if output.unchunked_reason is not None:
        logits_NV = logits(model, pack)
        if pack.sets is not None:
            logits_NV = pack.sets.restrict(logits_NV, slice(0, len(logits_NV)))
        return head.logprobs(logits_NV, pack.targets_N, pack.temperature_N)
    return output.logprobs(hidden(model, output, pack), pack.targets_N, pack.temperature_N, pack.sets)


def backward(model: Any, output: Head, pack: Pack, slope: Slope) -> tuple[Tensor, Tensor]:
    """Return the result of `logprobs`, and add the gradients of a loss to those of the parameters.

    Args:
        model: the model.
        output: its output head.
        pack: inputs of the pass.
        slope: function that returns the derivative of the loss with respect to each logprob.
    """
    kind = pack.token_ids_BT.device.type
    if not output.plain:
        logprobs_N, entropy_N = logprobs(model, output, pack)
        with torch.autocast(kind, enabled=False):
            torch.autograd.backward(logprobs_N, slope(logprobs_N.detach(), slice(0, len(logprobs_N))))
        return logprobs_N.detach(), entropy_N
    hidden_NH = hidden(model, output, pack)
    inputs = (hidden_NH, pack.targets_N, pack.temperature_N, slope, pack.distillation, pack.sets)
    logprobs_N, entropy_N, gradient_NH = output.backward(*inputs)
    if gradient_NH is not None:
        with torch.autocast(kind, enabled=False):
            torch.autograd.backward(hidden_NH, gradient_NH)
    return logprobs_N, entropy_N


def hidden(model: Any, output: Head, pack: Pack) -> Tensor:
    """Return the last hidden states before the loss tokens, `hidden_NH`, which are the inputs of the head `output`."""
    with head.intercept(output.module) as head_inputs:
        _run(model, pack)
    (hidden_BTH,) = head_inputs
    return hidden_BTH.flatten(0, 1)[pack.predicting_N]


def logits(model: Any, pack: Pack) -> Tensor:
    """Return the logits of the loss tokens in float32, `logits_NV`, for models whose head cannot be computed
    separately.
    """
    if pack.attention_mask_BT is None:
        logits_NV: Tensor = _run(model, pack, logits_to_keep=pack.predicting_N).logits[0]
        return logits_NV.float()
    logits_BTV: Tensor = _run(model, pack).logits
    return logits_BTV.flatten(0, 1)[pack.predicting_N].float()


def _run(model: Any, pack: Pack, **more: Any) -> Any:
    inputs = {"input_ids": pack.token_ids_BT, "position_ids": pack.position_ids_BT, "use_cache": False, **more}
    if pack.attention_mask_BT is not None:
        return model(**inputs, attention_mask=pack.attention_mask_BT)
    # A mask of ones, because without one transformers separates sequences by their positions in a mask of the whole
    # row.
    ones_BT = torch.ones_like(pack.token_ids_BT, dtype=torch.bool)
    with attention.row_of_sequences(pack.bounds):
        return model(**inputs, attention_mask=ones_BT)
