"""Sampling of rows with grammars, biases, penalties or truncation, which the traced program does not support."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from headrace_inference.torch_engine import sampler
from headrace_inference.torch_engine.loader import Model
from headrace_inference.torch_engine.sequence import BIASED, HELD, PENALISED, TRUNCATED, RowParameters, Sequence
from headrace_runtime.process.logs import get_logger

log = get_logger(__name__)


class RowSampler:
    """Sampler for rows of a batch with grammars, biases, penalties or truncation such as top-p.

    It also counts the sampled tokens of each row, for penalties.
    """

    def __init__(self, model: Model, rows: RowParameters, sequences_max: int) -> None:
        self.counts: Tensor | None = None
        self._model = model
        self._rows = rows
        self._sequences_max = sequences_max

    def draw(
        self, running: SequenceOf[Sequence], special: int, logits: Tensor, plain: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sample one token for each row: return `plain` if `special` is 0, otherwise sample with the rows' options.

        Args:
            running: the sequences of the rows.
            special: combined option bits of all rows (`HELD` and others).
            logits: logits of the rows.
            plain: ids, logprobs and all logprobs that the traced program has sampled without these options.

        Returns:
            The ids of the sampled tokens, their logprobs, and all logprobs.
        """
        rows, count = self._rows, len(running)
        if not special & (HELD | PENALISED | TRUNCATED | BIASED):
            return plain
        temperature = rows.tensor(rows.temperature, count)
        if special & HELD:
            logits = self.apply_grammars(running, logits)
        if special & BIASED:
            self._add_biases(running, logits)
        if special & PENALISED:
            assert self.counts is not None
            presence, frequency = rows.tensor(rows.presence, count), rows.tensor(rows.frequency, count)
            logits = sampler.penalise(logits, self.counts[:count], presence, frequency)
        if special & TRUNCATED:
            scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
            columns = (rows.tensor(column, count) for column in (rows.top_p, rows.top_k, rows.min_p))
            logits = sampler.truncate(scaled, *columns)
            temperature = (temperature > 0).to(temperature.dtype)
        drawn = sampler.draw(logits, temperature, rows.uniform(count))
        if special & TRUNCATED:
            self._find_sets(running, drawn[2])
        if special & PENALISED:
            assert self.counts is not None
            ids = drawn[0][:, None]
            self.counts[:count].scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.float32))
        return drawn

    def apply_grammars(self, running: SequenceOf[Sequence], logits: Tensor) -> Tensor:
        """Mask the tokens that the grammars of rows forbid.

        If the guide of a row has failed, all of its tokens are masked, so its logprob becomes NaN.
        """
        device = self._model.kv_shape.device
        guided = [row for row, sequence in enumerate(running) if sequence.guide is not None]
        allowed = np.zeros((len(guided), (self._model.vocabulary + 31) // 32), np.int32)
        for index, row in enumerate(guided):
            guide = running[row].guide
            assert guide is not None
            try:
                mask = guide.allowed()
            except Exception as error:
                log.exception("sequence_failed", version=self._model.version)
                running[row].fault = f"{type(error).__name__} in the grammar"
                continue
            if not guide.error:
                allowed[index] = mask[: allowed.shape[1]]
        rows = torch.tensor(guided, device=device)
        return sampler.mask_forbidden(logits, rows, torch.from_numpy(allowed).to(device))

    def _add_biases(self, running: SequenceOf[Sequence], logits: Tensor) -> None:
        """Add the logit biases of rows, in place."""
        biases = [(row, *pair) for row, sequence in enumerate(running) for pair in sequence.sampling.logit_bias]
        rows, tokens, values = zip(*biases, strict=True)
        index = torch.tensor((rows, tokens), device=logits.device)
        added = torch.tensor(values, dtype=logits.dtype, device=logits.device)
        logits.index_put_((index[0], index[1]), added, accumulate=True)

    def _find_sets(self, running: SequenceOf[Sequence], logprobs: Tensor) -> None:
        """Store in each truncated sequence the set of tokens that top-p, top-k and min-p did not mask in this step."""
        rows = [row for row, sequence in enumerate(running) if sequence.sets is not None]
        if not rows:
            return
        allowed = logprobs[torch.tensor(rows, device=logprobs.device)] > float("-inf")
        for row, count, allowed_V in zip(rows, allowed.sum(1).tolist(), allowed, strict=True):
            fits = count < running[row].sets_room
            running[row].allowed = allowed_V.nonzero().flatten().tolist() if fits else None

    def count_earlier(self, row: int, sequence: Sequence) -> None:
        """Initialize the token counts of a row that begins to decode, from the tokens of its answer so far."""
        if not self._rows.special[row] & PENALISED:
            return
        device = self._model.kv_shape.device
        if self.counts is None:
            self.counts = torch.zeros(self._sequences_max, self._model.vocabulary, device=device)
        sampled = torch.tensor(sequence.tokens[sequence.prompt_length :], dtype=torch.int64, device=device)
        self.counts[row] = torch.bincount(sampled, minlength=self._model.vocabulary)

    def move(self, source: int, target: int) -> None:
        """Copy the token counts of row `source` to row `target`, to which its sequence moves."""
        if self.counts is not None:
            self.counts[target] = self.counts[source]

    def swap(self, left: int, right: int) -> None:
        """Exchange the token counts of two rows, when their sequences change places in the batch."""
        if self.counts is not None:
            self.counts[[left, right]] = self.counts[[right, left]]

    def release(self) -> None:
        """Release the memory of all counts."""
        self.counts = None
