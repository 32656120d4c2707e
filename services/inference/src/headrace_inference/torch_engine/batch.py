"""The running sequences of one version: continuous batching with one forward per token for all of them.

Sequences join and leave between steps. Rows are kept dense: decoding ones first, then those whose prompt is still being
computed, of which the oldest goes first. A step computes at most one portion of prompts and then one token for every
decoding row, so a long prompt delays the others by a bounded amount. A sequence decodes from its last token on, whose
KV the decode step itself writes; so prompts, resumed sequences and those set back for want of memory join the same way.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace_inference import metrics
from headrace_inference.engine import Tokens
from headrace_inference.errors import EngineFailed
from headrace_inference.torch_engine import sampler
from headrace_inference.torch_engine.kv import KV, LENGTH_STEP
from headrace_inference.torch_engine.model import Model
from headrace_inference.torch_engine.prefix import PrefixCache
from headrace_inference.torch_engine.quarantine import Quarantine
from headrace_inference.torch_engine.rows import HELD, PENALISED, TOP, TRUNCATED, Rows
from headrace_inference.torch_engine.sequence import Sequence
from headrace_runtime.logs import get_logger

log = get_logger(__name__)
_PADDING_MAX = 0.5
"""Share of a prefill that may be padding; prompts of very different length are computed one after the other."""

Delivery = tuple[Sequence, Tokens | EngineFailed]


@dataclass(frozen=True)
class BatchLimits:
    """What one version may take; `TorchSettings` says what each means."""

    sequences_max: int
    prefill_tokens_max: int
    kv_bytes_max: int
    prefix_bytes_max: int


class DecodeBatch:
    """Used by the worker's thread alone. After an exception from `step`, `recover` or `reset` before going on."""

    def __init__(self, model: Model, limits: BatchLimits) -> None:
        self.model = model
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._decoding = 0
        self._limits = limits
        self._kv = KV(model.kv_shape, limits.kv_bytes_max)
        self._prefixes = PrefixCache(limits.prefix_bytes_max)
        self._rows = Rows(limits.sequences_max, model.kv_shape.device)
        self._window = torch.arange(model.context_tokens + LENGTH_STEP, device=model.kv_shape.device)
        self._counts: Tensor | None = None
        self._quarantine = Quarantine()
        self._deliveries: list[Delivery] = []
        self._joining: Sequence | None = None
        self._arrivals = itertools.count()
        self._gauges = metrics.VersionGauges(model.version)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self._quarantine.active)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; its followers come after it once its prompt is computed."""
        sequence.arrival = next(self._arrivals)
        self.waiting.append(sequence)

    def abort(self, owner: object) -> None:
        """Drop every sequence of a generation."""
        self.waiting = deque(sequence for sequence in self.waiting if sequence.owner is not owner)
        self._quarantine.drop(owner)
        for row in range(len(self.running) - 1, -1, -1):
            if self.running[row].owner is owner:
                self._remove(row)
        self._report()

    def step(self) -> list[Delivery]:
        """One portion of prompts and one token for every decoding row; returns what is to be delivered."""
        self._deliveries = []
        self._admit()
        if self._decoding < len(self.running):
            self._prefill()
        if self._decoding:
            self._decode()
        if self._quarantine.active and not self._quarantine.group and self._decoding == len(self.running):
            self._release_group()
        self._report()
        return self._deliveries

    def recover(self, error: Exception) -> list[Delivery]:
        """Go on after a step that raised `error`, though the model can compute (`probe.compute_control`).

        The sequences of the step are retried apart, from their tokens, and only the one that fails alone ends with
        `EngineFailed`. Returns what is to be delivered.
        """
        deliveries = self._deliveries
        suspects = [sequence for sequence in self.running if not sequence.ended]
        if self._joining is not None:  # the others had no part in it, yet their rows may be half changed
            self._quarantine.release([sequence for sequence in suspects if sequence is not self._joining])
            suspects = [self._joining]
        self._release_rows()
        self._prefixes = PrefixCache(self._limits.prefix_bytes_max)
        cause = self._quarantine.split(suspects)
        if cause is not None:
            failed = EngineFailed(f"{self.model.version}: {type(error).__name__} while computing")
            deliveries.append((cause, failed))
        self._leave_quarantine()
        self._report()
        return deliveries

    def reset(self) -> list[Sequence]:
        """Forget every sequence and all KV, for example because the model cannot compute; returns the sequences."""
        lost = [*self.running, *self._quarantine, *self.waiting]
        self.waiting.clear()
        self._quarantine = Quarantine()
        self._release_rows()
        self._prefixes = PrefixCache(self._limits.prefix_bytes_max)
        self._report()
        return lost

    def close(self) -> list[Sequence]:
        """The version is gone; returns the sequences that it leaves unfinished."""
        lost = self.reset()
        self._gauges.remove()
        return lost

    # Joining

    def _admit(self) -> None:
        queue = self._quarantine.group if self._quarantine.active else self.waiting
        while queue and len(self.running) < self._limits.sequences_max:
            sequence = queue.popleft()
            self._joining = sequence
            if not self._kv.reserve(len(self.running) + 1, self._longest(sequence)):
                queue.appendleft(sequence)
                break
            self._join(sequence)
        self._joining = None

    def _join(self, sequence: Sequence) -> None:
        row = len(self.running)
        self.running.append(sequence)
        known = sequence.tokens[:-1]
        entry, shared = self._prefixes.longest(known, sequence.salt)
        sequence.filled = shared
        sequence.cached = min(shared, sequence.prompt_length)
        sequence.source = entry if entry is not None and shared == len(entry.tokens) else None
        if entry is not None:
            self._kv.restore(row, entry.kv, shared)
        metrics.PROMPT_TOKENS.labels("reused").inc(shared)
        if sequence.filled == len(known):
            self._start_decoding(row)

    def _prefill(self) -> None:
        """Compute the next portion of the first prompts, as many as fit into one portion without much padding."""
        first = self._decoding
        oldest = min(range(first, len(self.running)), key=lambda row: self.running[row].arrival)
        self._swap(oldest, first)
        counts: list[int] = []
        for sequence in self.running[first:]:
            count = min(len(sequence.tokens) - 1 - sequence.filled, self._limits.prefill_tokens_max)
            area = max([*counts, count]) * (len(counts) + 1)
            if counts and (area > self._limits.prefill_tokens_max or sum(counts) + count < area * (1 - _PADDING_MAX)):
                break
            counts.append(count)
        width = max(counts)
        group = self.running[first : first + len(counts)]
        ids = np.zeros((len(group), width), np.int64)
        start = np.empty((len(group), 1), np.int64)
        for place, (sequence, count) in enumerate(zip(group, counts, strict=True)):
            ids[place, :count] = sequence.tokens[sequence.filled : sequence.filled + count]
            start[place] = sequence.filled
        # Padding is written behind a row's own tokens, where decoding overwrites it before anything can see it.
        positions = np.minimum(start + np.arange(width), self._kv.length - 1)
        device = self.model.kv_shape.device
        self.model.program.prefill(
            self.model.weights,
            torch.from_numpy(ids).to(device),
            torch.from_numpy(positions).to(device),
            self._until(int(positions.max())),
            self._kv.view(first, len(group)),
        )
        metrics.PROMPT_TOKENS.labels("computed").inc(sum(counts))
        for place, (sequence, count) in enumerate(zip(group, counts, strict=True)):
            sequence.filled += count
            if sequence.filled == len(sequence.tokens) - 1:
                self._start_decoding(first + place)

    def _start_decoding(self, row: int) -> None:
        sequence = self.running[row]
        target = self._decoding
        self._swap(row, target)
        self._decoding += 1
        self._rows.place(target, sequence)
        self._count_earlier(target, sequence)
        if sequence.followers:
            self._prefixes.add(sequence.tokens[:-1], self._kv.snapshot(target, sequence.filled), sequence.salt)
            self.waiting.extendleft(reversed(sequence.followers))
            sequence.followers = []

    # Decoding

    def _decode(self) -> None:
        count = self._make_room()
        if not count:
            return
        rows = self._rows
        ids, logprobs, all_logprobs, logits = self.model.program.decode(
            self.model.weights,
            rows.tensor(rows.last, count)[:, None],
            rows.tensor(rows.position, count)[:, None],
            self._until(int(rows.position[:count].max())),
            self._kv.view(0, count),
            rows.tensor(rows.temperature, count),
            rows.uniform(count),
        )
        top: list[list[tuple[int, float]]] = []
        special = int(np.bitwise_or.reduce(rows.special[:count]))
        if special:
            ids, logprobs, all_logprobs = self._shaped(special, count, logits, (ids, logprobs, all_logprobs))
            if special & TOP:
                wanted = max(sequence.sampling.top_logprobs for sequence in self.running[:count])
                top = sampler.most_likely(all_logprobs, wanted)
        ids_host = ids.cpu().numpy()
        rows.advance(count, ids_host)
        metrics.BATCH_SIZE.observe(count)
        metrics.SAMPLED_TOKENS.inc(count)
        self._accept(ids_host.tolist(), logprobs.tolist(), top)

    def _accept(self, ids: list[int], logprobs: list[float], top: list[list[tuple[int, float]]]) -> None:
        finished: list[int] = []
        for row, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            sequence = self.running[row]
            ranked = top[row][: sequence.sampling.top_logprobs] if sequence.sampling.top_logprobs else None
            piece = sequence.advance(token, logprob, ranked, self.model.version)
            if piece is not None:
                self._deliveries.append((sequence, piece))
            if sequence.ended:
                finished.append(row)
        for row in reversed(finished):  # so that the rows that move into the holes are done with
            self._remember(row)
            self._remove(row)

    def _shaped(
        self, special: int, count: int, logits: Tensor, plain: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw again from held, penalised and truncated logits, when a row asks for that."""
        rows = self._rows
        if not special & (HELD | PENALISED | TRUNCATED):
            return plain
        temperature = rows.tensor(rows.temperature, count)
        if special & HELD:
            logits = self._held(logits, count)
        if special & PENALISED:
            assert self._counts is not None
            presence, frequency = rows.tensor(rows.presence, count), rows.tensor(rows.frequency, count)
            logits = sampler.penalise(logits, self._counts[:count], presence, frequency)
        if special & TRUNCATED:
            scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
            logits = sampler.truncate(scaled, rows.tensor(rows.top_p, count), rows.tensor(rows.top_k, count))
            temperature = (temperature > 0).to(temperature.dtype)
        drawn = sampler.draw(logits, temperature, rows.uniform(count))
        if special & PENALISED:
            assert self._counts is not None
            ids = drawn[0][:, None]
            self._counts[:count].scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.float32))
        return drawn

    def _held(self, logits: Tensor, count: int) -> Tensor:
        """A row whose guide has failed keeps no token: its logprob is no number then."""
        device = self.model.kv_shape.device
        held = [row for row in range(count) if self.running[row].guide is not None]
        allowed = np.zeros((len(held), (self.model.vocabulary + 31) // 32), np.int32)
        for place, row in enumerate(held):
            guide = self.running[row].guide
            assert guide is not None
            try:
                mask = guide.allowed()
            except Exception as error:
                log.exception("sequence_failed", version=self.model.version)
                self.running[row].fault = f"{type(error).__name__} in the grammar"
                continue
            if not guide.error:
                allowed[place] = mask[: allowed.shape[1]]
        rows = torch.tensor(held, device=device)
        return sampler.hold(logits, rows, torch.from_numpy(allowed).to(device))

    def _count_earlier(self, row: int, sequence: Sequence) -> None:
        """Penalties count what was sampled before, here or elsewhere."""
        if not self._rows.special[row] & PENALISED:
            return
        device = self.model.kv_shape.device
        if self._counts is None:
            self._counts = torch.zeros(self._limits.sequences_max, self.model.vocabulary, device=device)
        sampled = torch.tensor(sequence.tokens[sequence.prompt_length :], dtype=torch.int64, device=device)
        self._counts[row] = torch.bincount(sampled, minlength=self.model.vocabulary)

    def _make_room(self) -> int:
        """Grow the KV for the longest row; where memory forbids it, set back the latest sequences until it fits.

        Returns how many rows decode.
        """
        while self._decoding:
            needed = int(self._rows.position[: self._decoding].max()) + 1
            if needed <= self._kv.length:
                return self._decoding
            if self._kv.reserve(len(self.running), self._longest()):
                return self._decoding
            latest = max(range(len(self.running)), key=lambda row: self.running[row].arrival)
            sequence = self.running[latest]
            self._remove(latest)
            self.waiting.appendleft(sequence)
            metrics.PREEMPTIONS.inc()
        return 0

    # Leaving

    def _release_rows(self) -> None:
        self.running.clear()
        self._decoding = 0
        self._kv.release()
        self._counts = None

    def _release_group(self) -> None:
        """All of the group have computed a step: set them aside until the other groups have been tried."""
        released = [*self.running]
        self._release_rows()
        self._quarantine.release(released)
        self._quarantine.begin_next_group()
        self._leave_quarantine()

    def _leave_quarantine(self) -> None:
        if self._quarantine.active and not self._quarantine.group:
            self.waiting.extendleft(reversed(self._quarantine.leave()))

    def _remember(self, row: int) -> None:
        """Keep the KV of a finished sequence for a prompt that goes on with it."""
        sequence = self.running[row]
        if not self._limits.prefix_bytes_max or not sequence.filled:
            return
        tokens = sequence.tokens[: sequence.filled]
        held, shared = self._prefixes.longest(tokens, sequence.salt)
        if held is not None and shared == len(tokens):
            return
        if sequence.source is not None:
            self._prefixes.discard(sequence.source)
        self._prefixes.add(tokens, self._kv.snapshot(row, sequence.filled), sequence.salt)

    def _remove(self, row: int) -> None:
        """Close the hole: the last decoding row moves into it, the last of all rows into its place."""
        if row < self._decoding:
            self._decoding -= 1
            self._move(self._decoding, row)
            row = self._decoding
        self._move(len(self.running) - 1, row)
        self.running.pop()

    def _swap(self, one: int, other: int) -> None:
        """Exchange two rows that do not decode."""
        if one == other:
            return
        running = self.running
        self._kv.swap(one, other, max(running[one].filled, running[other].filled))
        running[one], running[other] = running[other], running[one]

    def _move(self, source: int, target: int) -> None:
        if source == target:
            return
        self.running[target] = self.running[source]
        self._kv.move(source, target, self.running[source].filled)
        self._rows.move(source, target)
        if self._counts is not None:
            self._counts[target] = self._counts[source]

    def _longest(self, *joining: Sequence) -> int:
        return max(len(sequence.tokens) for sequence in (*self.running, *joining))

    def _until(self, last: int) -> Tensor:
        """Positions up to `last`, and some more, so that the shape of attention changes rarely; never beyond the KV."""
        return self._window[: min((last // LENGTH_STEP + 1) * LENGTH_STEP, self._kv.length)]

    def _report(self) -> None:
        self._gauges.waiting.set(len(self.waiting))
        self._gauges.running.set(len(self.running))
        self._gauges.kv_running.set(self._kv.bytes)
        self._gauges.kv_prefixes.set(self._prefixes.bytes)
