"""One forward pass over several sequences: what the present weights think of each sampled token.

`blocks` joins the sequences of a pack into one row. `attention` runs sequence by sequence, so a token sees its own and
nothing else, no padding is computed, and the result is that of one pass per sequence. Position ids restart with each
sequence. `padded` is the classical rectangle with an attention mask, for models whose layers mix along the row in other
ways. What the layers answer goes to the output head in chunks (`head`).
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
from headrace_trainer.torch_learner.model.head import Head, Slope
from headrace_trainer.torch_learner.model.taught import Taught


@dataclass(frozen=True)
class Pack:
    """Tensors of one forward pass. `_N` are the positions of the loss, row by row, in order."""

    token_ids_BT: Tensor
    position_ids_BT: Tensor
    attention_mask_BT: Tensor | None
    """None for blocks."""
    bounds: tuple[int, ...]
    """Where each block starts, and where the last one ends; empty when padded."""
    predicting_N: Tensor
    """Flat positions whose logits predict the loss tokens."""
    targets_N: Tensor
    behaviour_N: Tensor
    temperature_N: Tensor
    advantage_N: Tensor
    weight_N: Tensor
    """Each token's share of the loss."""
    fresh_N: Tensor
    row_N: Tensor
    """Which of `names` the token belongs to."""
    names: tuple[str, ...]
    """Of the rows, in order."""
    written_N: Tensor | None = None
    """Tokens that nobody sampled; None where there are none."""
    pair_R: Tensor | None = None
    """Of each row the one that it has to be together with, itself where there is none; None where no row has one."""
    rows: tuple[Row, ...] = ()
    """What it is made of, for who asks a teacher about other sequences."""
    taught: Taught | None = None
    """Tokens at which a teacher is followed in all words; only with a head that is `plain`."""

    @property
    def idle(self) -> bool:
        """Nobody's, and of no weight (`headrace_trainer.torch_learner.team`)."""
        return not any(self.names)


def collate(rows: Sequence[Row], device: torch.device, *, padded: bool) -> Pack:
    """Join the rows of one pack. The logits that predict token t stand at position t - 1."""
    lengths = [row.length for row in rows]
    width = max(lengths) if padded else sum(lengths)
    starts = [index * width for index in range(len(rows))] if padded else [0, *np.cumsum(lengths[:-1]).tolist()]
    shape = (len(rows), width) if padded else (1, width)
    token_ids = np.zeros(shape, np.int64)
    positions = np.zeros(shape, np.int64)
    attended = np.zeros(shape, np.int64)
    for row, start in zip(rows, starts, strict=True):
        place = slice(start, start + row.length)
        token_ids.reshape(-1)[place] = row.token_ids_T
        positions.reshape(-1)[place] = np.arange(row.length)
        attended.reshape(-1)[place] = 1
    predicting = [start + np.flatnonzero(row.loss_mask_T) - 1 for row, start in zip(rows, starts, strict=True)]

    def chosen(values: Sequence[Any]) -> Tensor:
        return _onto(device, np.concatenate(values))

    return Pack(
        _onto(device, token_ids),
        _onto(device, positions),
        _onto(device, attended) if padded else None,
        () if padded else (*starts, width),
        chosen(predicting),
        chosen([row.token_ids_T[row.loss_mask_T].astype(np.int64) for row in rows]),
        chosen([row.behaviour_T[row.loss_mask_T] for row in rows]),
        chosen([row.temperature_T[row.loss_mask_T] for row in rows]),
        chosen([_advantages(row) for row in rows]),
        chosen([np.full(row.loss_mask_T.sum(), row.token_weight, np.float32) for row in rows]),
        chosen([row.fresh_T[row.loss_mask_T] for row in rows]),
        chosen([np.full(row.loss_mask_T.sum(), index, np.int64) for index, row in enumerate(rows)]),
        tuple(row.name for row in rows),
        chosen([np.full(row.tokens, row.written) for row in rows]) if any(row.written for row in rows) else None,
        _onto(device, _pairs(rows)) if any(row.together for row in rows) else None,
        tuple(rows),
    )


def _advantages(row: Row) -> np.ndarray[Any, Any]:
    if row.advantage_T is None:
        return np.full(row.loss_mask_T.sum(), row.advantage, np.float32)
    return row.advantage_T[row.loss_mask_T]


def _pairs(rows: Sequence[Row]) -> np.ndarray[Any, Any]:
    """Two rows that are together point at each other."""
    places: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        places.setdefault(row.together, []).append(index)
    found = np.arange(len(rows), dtype=np.int64)
    for together, (one, *others) in places.items():
        if together and others:
            found[one], found[others[0]] = others[0], one
    return found


def _onto(device: torch.device, array: np.ndarray[Any, Any]) -> Tensor:
    """On its way to the device, which nobody waits for."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def logprobs(model: Any, output: Head, pack: Pack) -> tuple[Tensor, Tensor]:
    """`(logprobs_N, entropy_N)` in float32: what `model`, whose head is `output`, thinks of each sampled token."""
    if output.whole is not None:
        return head.logprobs(logits(model, pack), pack.targets_N, pack.temperature_N)
    return output.logprobs(hidden(model, output, pack), pack.targets_N, pack.temperature_N)


def backward(model: Any, output: Head, pack: Pack, slope: Slope) -> tuple[Tensor, Tensor]:
    """`logprobs`, and the gradients of a loss with this `slope` added to those of the parameters."""
    kind = pack.token_ids_BT.device.type
    if not output.plain:
        logprobs_N, entropy_N = logprobs(model, output, pack)
        with torch.autocast(kind, enabled=False):
            torch.autograd.backward(logprobs_N, slope(logprobs_N.detach(), slice(0, len(logprobs_N))))
        return logprobs_N.detach(), entropy_N
    hidden_NH = hidden(model, output, pack)
    given = (hidden_NH, pack.targets_N, pack.temperature_N, slope, pack.taught)
    logprobs_N, entropy_N, gradient_NH = output.backward(*given)
    if gradient_NH is not None:
        with torch.autocast(kind, enabled=False):
            torch.autograd.backward(hidden_NH, gradient_NH)
    return logprobs_N, entropy_N


def hidden(model: Any, output: Head, pack: Pack) -> Tensor:
    """What `model` asks its head about the tokens of the loss, `hidden_NH`."""
    with head.caught(output.module) as asked:
        _ask(model, pack)
    (hidden_BTH,) = asked
    return hidden_BTH.flatten(0, 1)[pack.predicting_N]


def logits(model: Any, pack: Pack) -> Tensor:
    """`logits_NV` in float32, at the positions of the loss only, and all at once: for models whose head cannot be had
    apart."""
    if pack.attention_mask_BT is None:
        kept_NV: Tensor = _ask(model, pack, logits_to_keep=pack.predicting_N).logits[0]
        return kept_NV.float()
    logits_BTV: Tensor = _ask(model, pack).logits
    return logits_BTV.flatten(0, 1)[pack.predicting_N].float()


def _ask(model: Any, pack: Pack, **more: Any) -> Any:
    inputs = {"input_ids": pack.token_ids_BT, "position_ids": pack.position_ids_BT, "use_cache": False, **more}
    if pack.attention_mask_BT is not None:
        return model(**inputs, attention_mask=pack.attention_mask_BT)
    # Ones: without a mask, transformers tells sequences apart by their positions, in a mask of the whole row.
    ones_BT = torch.ones_like(pack.token_ids_BT, dtype=torch.bool)
    with attention.sequences(pack.bounds):
        return model(**inputs, attention_mask=ones_BT)
