"""The running sequences of one version: continuous batching with one forward pass per token for all of them.

Sequences join and leave between steps. Rows are dense: first the decoding rows, then the rows whose prompt is not yet
computed, the oldest first. A step computes at most one portion of prompts and then one token for every decoding row, so
a long prompt delays the others by a bounded time. A sequence decodes from its last token on, whose KV the decode step
itself writes. So new, resumed and preempted sequences join in the same way. `fairness` selects the sequence that joins,
the prompt that is computed next, and the rows that pause.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace_inference import metrics
from headrace_inference.engine import Tokens
from headrace_inference.errors import EngineFailed
from headrace_inference.torch_engine import fairness, sampler
from headrace_inference.torch_engine.fairness import Quarantine
from headrace_inference.torch_engine.kv import KV, LENGTH_STEP, PrefixCache
from headrace_inference.torch_engine.loader import Model
from headrace_inference.torch_engine.row_sampler import RowSampler
from headrace_inference.torch_engine.sequence import TOP, RowParameters, Sequence

_PADDING_MAX = 0.5
"""Largest share of padding in a prefill. Prompts of very different lengths are computed one after the other."""

Delivery = tuple[Sequence, Tokens | EngineFailed]


@dataclass(frozen=True)
class BatchLimits:
    """Limits of one version's batch (see `TorchSettings`): sequences, prompt tokens per step, bytes of KV."""

    sequences_max: int
    prefill_tokens_max: int
    kv_bytes_max: int
    prefix_bytes_max: int


class DecodeBatch:
    """Sequences of one version, for the worker's thread alone. If `step` fails, call `recover` or `reset`."""

    def __init__(self, model: Model, limits: BatchLimits) -> None:
        self.model = model
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._decoding = 0
        self._limits = limits
        self._kv = KV(model.kv_shape, limits.kv_bytes_max)
        self._prefixes = PrefixCache(limits.prefix_bytes_max)
        self._rows = RowParameters(limits.sequences_max, model.kv_shape.device)
        self._window = torch.arange(model.context_tokens + LENGTH_STEP, device=model.kv_shape.device)
        self._sampler = RowSampler(model, self._rows, limits.sequences_max)
        self._shares = fairness.TimeShares()
        self._quarantine = Quarantine()
        self._deliveries: list[Delivery] = []
        self._joining: Sequence | None = None
        self._arrivals = itertools.count()
        self._gauges = metrics.VersionGauges(model.version)

    @property
    def is_busy(self) -> bool:
        """Whether there are unfinished sequences."""
        return bool(self.waiting or self.running or self._quarantine.active)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Its `followers`, the other choices of the prompt, start when the prompt is computed."""
        sequence.arrival = next(self._arrivals)
        for follower in sequence.followers:
            follower.arrival = sequence.arrival
        self.waiting.append(sequence)

    def abort(self, owner: object) -> None:
        """Remove every sequence of the generation `owner`."""
        self.waiting = deque(sequence for sequence in self.waiting if sequence.owner is not owner)
        self._quarantine.drop(owner)
        for row in range(len(self.running) - 1, -1, -1):
            if self.running[row].owner is owner:
                self._remove(row)
        self._report()

    def step(self) -> list[Delivery]:
        """Compute part of the waiting prompts and one token for every decoding row. Return what to deliver to
        streams."""
        self._deliveries = []
        self._admit()
        self._shares.begin_step(self.running)
        if self._decoding < len(self.running):
            self._prefill()
        if self._decoding:
            self._decode()
        if self._quarantine.active and not self._quarantine.group and self._decoding == len(self.running):
            self._release_group()
        self._report()
        return self._deliveries

    def recover(self, error: Exception) -> list[Delivery]:
        """Continue after a step that raised `error` although the model can compute (`probe.compute_control`).

        The sequences of the failed step will be retried in groups, until the one that causes the failure is isolated.
        Return what to deliver to streams: if the step had a single sequence, its `EngineFailed`.
        """
        deliveries = self._deliveries
        suspects = [sequence for sequence in self.running if not sequence.ended]
        if (
            self._joining is not None
        ):  # the others did not cause the error, but their rows may be in an inconsistent state
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
        """Remove and return all sequences, and release all KV, for example because the model cannot compute."""
        lost = [*self.running, *self._quarantine, *self.waiting]
        self.waiting.clear()
        self._quarantine = Quarantine()
        self._release_rows()
        self._prefixes = PrefixCache(self._limits.prefix_bytes_max)
        self._report()
        return lost

    def close(self) -> list[Sequence]:
        """Close the batch of an unloaded version, and return its unfinished sequences."""
        lost = self.reset()
        self._gauges.remove()
        return lost

    # Joining

    def _admit(self) -> None:
        queue = self._quarantine.group if self._quarantine.active else self.waiting
        while queue:
            index = 0 if self._quarantine.active else fairness.select_joining(queue, self.running)
            sequence = queue[index]
            del queue[index]
            self._joining = sequence
            full = len(self.running) >= self._limits.sequences_max
            if full or not self._kv.reserve(len(self.running) + 1, self._longest(sequence)):
                queue.appendleft(sequence)
                row = None if self._quarantine.active else fairness.find_row_to_preempt(self.running, sequence)
                if row is None:
                    break
                self._preempt(row)
                continue
            self._join(sequence)
        self._joining = None

    def _preempt(self, row: int) -> None:
        """Move a running sequence back to the queue, and its KV to the cache."""
        sequence = self.running[row]
        self._cache_kv(row)
        self._remove(row)
        self.waiting.appendleft(sequence)
        metrics.PREEMPTIONS.inc()

    def _join(self, sequence: Sequence) -> None:
        row = len(self.running)
        self.running.append(sequence)
        prefix = sequence.tokens[:-1]
        entry, shared = self._prefixes.find_longest(prefix, sequence.salt)
        sequence.filled = shared
        sequence.cached = min(shared, sequence.prompt_length)
        sequence.source = entry if entry is not None and shared == len(entry.tokens) else None
        if entry is not None:
            self._kv.restore(row, entry.kv, shared)
        metrics.PROMPT_TOKENS.labels("reused").inc(shared)
        if sequence.filled == len(prefix):
            self._start_decoding(row)

    def _prefill(self) -> None:
        """Compute one portion of tokens of the next prompts, as many prompts as fit into a pass without much
        padding."""
        first = self._decoding
        following = self._shares.next_prompt(self.running, first)
        if following is None:
            return
        self._swap(following, first)
        contended = self._shares.contended
        divisor = fairness.PORTION_DIVISOR if self._shares.several_tenants else 1
        tokens_max = self._limits.prefill_tokens_max // divisor
        counts: list[int] = []
        for sequence in self.running[first:]:
            count = min(len(sequence.tokens) - 1 - sequence.filled, tokens_max)
            area = max([*counts, count]) * (len(counts) + 1)
            if counts and (area > tokens_max or sum(counts) + count < area * (1 - _PADDING_MAX)):
                break
            if counts and contended and (sequence.background or self._shares.is_in_debt(sequence)):
                break
            counts.append(count)
        width = max(counts)
        group = self.running[first : first + len(counts)]
        ids = np.zeros((len(group), width), np.int64)
        start = np.empty((len(group), 1), np.int64)
        for index, (sequence, count) in enumerate(zip(group, counts, strict=True)):
            ids[index, :count] = sequence.tokens[sequence.filled : sequence.filled + count]
            start[index] = sequence.filled
        # Padding is written after a row's own tokens. Decoding overwrites it before attention can see it.
        positions = np.minimum(start + np.arange(width), self._kv.length - 1)
        device = self.model.kv_shape.device
        began_s = time.perf_counter()
        self.model.program.prefill(
            self.model.weights,
            torch.from_numpy(ids).to(device),
            torch.from_numpy(positions).to(device),
            self._until(int(positions.max())),
            self._kv.view(first, len(group)),
        )
        if contended:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # so that the measured time is that of this portion
            self._shares.charge_prompts(list(zip(group, counts, strict=True)), time.perf_counter() - began_s)
        metrics.PROMPT_TOKENS.labels("computed").inc(sum(counts))
        for index, (sequence, count) in enumerate(zip(group, counts, strict=True)):
            sequence.filled += count
            if sequence.filled == len(sequence.tokens) - 1:
                self._start_decoding(first + index)

    def _start_decoding(self, row: int) -> None:
        sequence = self.running[row]
        target = self._decoding
        self._swap(row, target)
        self._decoding += 1
        self._rows.fill(target, sequence)
        self._sampler.count_earlier(target, sequence)
        if sequence.followers:
            self._prefixes.add(sequence.tokens[:-1], self._kv.snapshot(target, sequence.filled), sequence.salt)
            self.waiting.extendleft(reversed(sequence.followers))
            sequence.followers = []

    # Decoding

    def _decode(self) -> None:
        if not self._reserve_kv():
            return
        count = self._choose_rows()
        began_s = time.perf_counter()
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
            ids, logprobs, all_logprobs = self._sampler.draw(
                self.running[:count], special, logits, (ids, logprobs, all_logprobs)
            )
            if special & TOP:
                top_count = max(sequence.sampling.top_logprobs for sequence in self.running[:count])
                top = sampler.most_likely(all_logprobs, top_count)
        ids_host = ids.cpu().numpy()
        self._shares.charge_step(self.running[:count], time.perf_counter() - began_s)
        rows.advance(count, ids_host)
        metrics.BATCH_SIZE.observe(count)
        metrics.SAMPLED_TOKENS.inc(count)
        self._accept(ids_host.tolist(), logprobs.tolist(), top)

    def _choose_rows(self) -> int:
        """Move the rows that decode in the next step before the paused rows, and return their number."""
        paused = frozenset() if self._quarantine.active else self._shares.paused_flows(self.running[: self._decoding])
        if not paused:
            return self._decoding
        count, last = 0, self._decoding - 1
        while count <= last:
            if self._shares.flow_of(self.running[count]) in paused:
                self._exchange(count, last)
                last -= 1
            else:
                count += 1
        return count

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
        for row in reversed(finished):  # backwards, so that only rows that were handled move into the gaps
            self._cache_kv(row)
            self._remove(row)

    def _reserve_kv(self) -> int:
        """Grow the KV for the longest row, by preempting sequences if needed. Return the number of decoding rows."""
        while self._decoding:
            needed = int(self._rows.position[: self._decoding].max()) + 1
            if needed <= self._kv.length:
                return self._decoding
            if self._kv.reserve(len(self.running), self._longest()):
                return self._decoding
            rows = range(len(self.running))
            latest = max(rows, key=lambda row: (self.running[row].background, self.running[row].arrival))
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
        self._sampler.release()

    def _release_group(self) -> None:
        """Remove the rows of the quarantine's present group, which has computed a step, until all groups were tried."""
        released = [*self.running]
        self._release_rows()
        self._quarantine.release(released)
        self._quarantine.begin_next_group()
        self._leave_quarantine()

    def _leave_quarantine(self) -> None:
        if self._quarantine.active and not self._quarantine.group:
            self.waiting.extendleft(reversed(self._quarantine.leave()))

    def _cache_kv(self, row: int) -> None:
        """Add the KV of a row to the prefix cache, for prompts that continue the sequence."""
        sequence = self.running[row]
        if not self._limits.prefix_bytes_max or not sequence.filled:
            return
        tokens = sequence.tokens[: sequence.filled]
        cached, shared = self._prefixes.find_longest(tokens, sequence.salt)
        if cached is not None and shared == len(tokens):
            return
        if sequence.source is not None:
            self._prefixes.discard(sequence.source)
        self._prefixes.add(tokens, self._kv.snapshot(row, sequence.filled), sequence.salt)

    def _remove(self, row: int) -> None:
        """Remove a row. The last decoding row moves into the gap, and the last row of all into the new gap."""
        if row < self._decoding:
            self._decoding -= 1
            self._move(self._decoding, row)
            row = self._decoding
        self._move(len(self.running) - 1, row)
        self.running.pop()

    def _swap(self, left: int, right: int) -> None:
        """Exchange two rows of which at most one decodes."""
        if left == right:
            return
        running = self.running
        self._kv.swap(left, right, max(running[left].filled, running[right].filled))
        running[left], running[right] = running[right], running[left]

    def _exchange(self, left: int, right: int) -> None:
        """Exchange two rows that decode."""
        if left == right:
            return
        self._swap(left, right)
        self._rows.swap(left, right)
        self._sampler.swap(left, right)

    def _move(self, source: int, target: int) -> None:
        if source == target:
            return
        self.running[target] = self.running[source]
        self._kv.move(source, target, self.running[source].filled)
        self._rows.move(source, target)
        self._sampler.move(source, target)

    def _longest(self, *joining: Sequence) -> int:
        return max(len(sequence.tokens) for sequence in (*self.running, *joining))

    def _until(self, last: int) -> Tensor:
        """Return the positions from 0 to `last` that attention sees, rounded up so that shapes change rarely, but
        not beyond the KV."""
        return self._window[: min((last // LENGTH_STEP + 1) * LENGTH_STEP, self._kv.length)]

    def _report(self) -> None:
        self._gauges.waiting.set(len(self.waiting))
        self._gauges.running.set(len(self.running))
        self._gauges.kv_running.set(self._kv.bytes)
        self._gauges.kv_prefixes.set(self._prefixes.bytes)
