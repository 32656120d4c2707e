"""Draws the tokens of rows that ask for more than the plain path: grammars, penalties and truncation."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from headrace_inference.torch_engine import sampler
from headrace_inference.torch_engine.model import Model
from headrace_inference.torch_engine.rows import HELD, PENALISED, TRUNCATED, Rows
from headrace_inference.torch_engine.sequence import Sequence
from headrace_runtime.logs import get_logger

log = get_logger(__name__)


class RowSampler:
    """The counts of sampled tokens, a row each once a row is penalised; they follow the rows of the batch."""

    def __init__(self, model: Model, rows: Rows, sequences_max: int) -> None:
        self.counts: Tensor | None = None
        self._model = model
        self._rows = rows
        self._sequences_max = sequences_max

    def draw(
        self, running: SequenceOf[Sequence], special: int, logits: Tensor, plain: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw again from held, penalised and truncated logits, when a row asks for that."""
        rows, count = self._rows, len(running)
        if not special & (HELD | PENALISED | TRUNCATED):
            return plain
        temperature = rows.tensor(rows.temperature, count)
        if special & HELD:
            logits = self.hold(running, logits)
        if special & PENALISED:
            assert self.counts is not None
            presence, frequency = rows.tensor(rows.presence, count), rows.tensor(rows.frequency, count)
            logits = sampler.penalise(logits, self.counts[:count], presence, frequency)
        if special & TRUNCATED:
            scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
            logits = sampler.truncate(scaled, rows.tensor(rows.top_p, count), rows.tensor(rows.top_k, count))
            temperature = (temperature > 0).to(temperature.dtype)
        drawn = sampler.draw(logits, temperature, rows.uniform(count))
        if special & PENALISED:
            assert self.counts is not None
            ids = drawn[0][:, None]
            self.counts[:count].scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.float32))
        return drawn

    def hold(self, running: SequenceOf[Sequence], logits: Tensor) -> Tensor:
        """Mask what the grammars of rows forbid. A row whose guide has failed keeps no token: its logprob is no number
        then."""
        device = self._model.kv_shape.device
        held = [row for row, sequence in enumerate(running) if sequence.guide is not None]
        allowed = np.zeros((len(held), (self._model.vocabulary + 31) // 32), np.int32)
        for place, row in enumerate(held):
            guide = running[row].guide
            assert guide is not None
            try:
                mask = guide.allowed()
            except Exception as error:
                log.exception("sequence_failed", version=self._model.version)
                running[row].fault = f"{type(error).__name__} in the grammar"
                continue
            if not guide.error:
                allowed[place] = mask[: allowed.shape[1]]
        rows = torch.tensor(held, device=device)
        return sampler.hold(logits, rows, torch.from_numpy(allowed).to(device))

    def count_earlier(self, row: int, sequence: Sequence) -> None:
        """Count what was sampled before, here or elsewhere, for the penalties of a row that begins to decode."""
        if not self._rows.special[row] & PENALISED:
            return
        device = self._model.kv_shape.device
        if self.counts is None:
            self.counts = torch.zeros(self._sequences_max, self._model.vocabulary, device=device)
        sampled = torch.tensor(sequence.tokens[sequence.prompt_length :], dtype=torch.int64, device=device)
        self.counts[row] = torch.bincount(sampled, minlength=self._model.vocabulary)

    def move(self, source: int, target: int) -> None:
        if self.counts is not None:
            self.counts[target] = self.counts[source]

    def swap(self, one: int, other: int) -> None:
        if self.counts is not None:
            self.counts[[one, other]] = self.counts[[other, one]]

    def release(self) -> None:
        """Forget all counts."""
        self.counts = None
