"""One choice while it is sampled, and the parameters of a decode step's rows as arrays. A choice's KV can be
discarded and computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_inference.engine import Finish, Guide, Sampling, Tokens
from headrace_inference.errors import EngineFailed
from headrace_inference.torch_engine.kv import Entry
from headrace_inference.torch_engine.sampler import uniform
from headrace_runtime.process.logs import get_logger
from headrace_schemas.events.turn import STORED_SETS_MAX

log = get_logger(__name__)
PENALISED, TRUNCATED, TOP, HELD, BIASED = 1, 2, 4, 8, 16
"""Bits of `special`: penalties, truncation, top logprobs, grammars and logit biases, which the traced program does not
support."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice that is being sampled, with its tokens and logprobs. Only the worker's thread uses it."""

    owner: object
    """Generation that the tokens are delivered to. All its sequences are aborted together."""
    choice: int
    tokens: list[int]
    """Prompt, resumed and sampled tokens."""
    prompt_length: int
    limit: int
    """Length of `tokens` at which the sequence ends with `length`."""
    sampling: Sampling
    seed: int
    stream: bool
    resumed: int = 0
    until: Callable[[int], bool] | None = None
    guide: Guide | None = None
    """Guide that has accepted all sampled tokens. It stays with a sequence that is preempted."""
    salt: str = ""
    """Salt of the tenant. Only cached KV with the same salt is used."""
    session: str = ""
    """Session, among which the rows of a tenant are shared."""
    background: bool = False
    """Whether it is an evaluation, which gets the capacity that users leave."""
    followers: list[Sequence] = field(default_factory=list)
    """Choices of the same prompt that wait for its KV."""

    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    sets: list[list[int]] | None = field(init=False)
    """Tokens that truncation left at each sampled position, or None without truncation and if there are too many."""
    sets_room: int = STORED_SETS_MAX
    """Integers that `sets` may still take."""
    allowed: list[int] | None = None
    """Tokens that truncation left in the present step, or None if they do not fit `sets_room`."""
    filled: int = 0
    """Tokens whose KV is in the row."""
    cached: int = 0
    source: Entry | None = None
    """Cache entry whose tokens are all at the beginning of this sequence."""
    arrival: int = 0
    ended: bool = False
    """Whether its last tokens, or its failure, were delivered or are about to be."""
    fault: str = ""
    """Error of the grammar that the guide itself could not report."""

    def __post_init__(self) -> None:
        sampling = self.sampling
        self.sets = [] if sampling.temperature > 0 and sampling.truncated else None

    @property
    def tenant(self) -> tuple[bool, str]:
        """Key by which rows are counted. Users and background work of a tenant count separately."""
        return self.background, self.salt

    @property
    def drawn(self) -> int:
        """Number of tokens drawn so far, which is the position in the sequence's stream of random numbers."""
        return len(self.tokens) - self.prompt_length

    def accept(self, token: int, logprob: float) -> Finish | None:
        """Append a sampled token, and return the reason if the sequence ends with it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.sets is not None:
            self._store_set(self.sets)
        if token in self.sampling.stop_ids:
            return "stop"
        if self.guide is not None:
            self.guide.accept(token)
        if self.until is not None and self.until(token):
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None

    def advance(
        self, token: int, logprob: float, ranked: list[tuple[int, float]] | None, version: str
    ) -> Tokens | EngineFailed | None:
        """Append a sampled token and return the tokens to deliver, or the failure of this sequence."""
        if not math.isfinite(logprob):  # overflow, diverged weights, or a grammar that allows no token
            return self._fail(version, self.fault or (self.guide and self.guide.error) or "the logits are NaN")
        try:
            if ranked is not None:
                self.top.append(ranked)
            finish = self.accept(token, logprob)
        except Exception as error:
            log.exception("sequence_failed", version=version)
            return self._fail(version, f"{type(error).__name__} while reading a token")
        self.filled += 1
        self.ended = finish is not None
        return self.tokens_to_deliver(finish)

    def _store_set(self, sets: list[list[int]]) -> None:
        if self.allowed is None:
            self.sets = None
            return
        sets.append(self.allowed)
        self.sets_room -= len(self.allowed) + 1
        self.allowed = None

    def _fail(self, version: str, reason: str) -> EngineFailed:
        self.ended = True
        self.filled = 0  # its KV may contain NaN, so it must not be cached
        return EngineFailed(f"{version}: {reason} after {len(self.tokens)} tokens")

    def tokens_to_deliver(self, finish: Finish | None) -> Tokens | None:
        """Return the tokens to deliver after a step: the new token when streaming, otherwise all tokens at the end.

        Args:
            finish: reason for which the sequence ended in this step; None if it continues.

        Returns:
            The tokens, or None if there are none to deliver yet.
        """
        if self.stream:
            last = self.top[-1:] if self.sampling.top_logprobs else []
            return Tokens(
                self.choice,
                self.tokens[-1:],
                self.logprobs[-1:],
                last,
                finish,
                self.cached,
                _flatten_last(self.sets, 1),
            )
        if finish is None:
            return None
        begin = self.prompt_length + self.resumed
        sets = _flatten_last(self.sets, len(self.tokens) - begin)
        return Tokens(self.choice, self.tokens[begin:], self.logprobs, self.top, finish, self.cached, sets)


def _flatten_last(sets: list[list[int]] | None, count: int) -> list[int] | None:
    """Return the last `count` sets as one flat list: for each set its size, then its ids."""
    if sets is None:
        return None
    return [number for ids in sets[len(sets) - count :] for number in (len(ids), *ids)]


class RowParameters:
    """Sampling parameters and positions of the batch's rows, one array on the host for each parameter."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._device = device
        self.last = np.zeros(capacity, np.int64)
        """The newest token, whose KV is not computed yet."""
        self.position = np.zeros(capacity, np.int64)
        """Position of this token."""
        self.temperature = np.ones(capacity, np.float32)
        self.seed = np.zeros(capacity, np.uint64)
        self.drawn = np.zeros(capacity, np.uint64)
        self.top_p = np.ones(capacity, np.float32)
        self.top_k = np.zeros(capacity, np.int64)
        self.min_p = np.zeros(capacity, np.float32)
        self.presence = np.zeros(capacity, np.float32)
        self.frequency = np.zeros(capacity, np.float32)
        self.special = np.zeros(capacity, np.uint8)
        self._columns = [value for value in vars(self).values() if isinstance(value, np.ndarray)]

    def fill(self, row: int, sequence: Sequence) -> None:
        """Set the parameters of a row to those of a sequence that begins to decode."""
        sampling = sequence.sampling
        self.last[row] = sequence.tokens[-1]
        self.position[row] = len(sequence.tokens) - 1
        self.temperature[row] = sampling.temperature
        self.seed[row] = sequence.seed
        self.drawn[row] = sequence.drawn
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.min_p[row] = sampling.min_p
        self.presence[row] = sampling.presence_penalty
        self.frequency[row] = sampling.frequency_penalty
        penalised = PENALISED if sampling.presence_penalty or sampling.frequency_penalty else 0
        truncated = TRUNCATED if sampling.truncated else 0
        guided = HELD if sequence.guide is not None else 0
        biased = BIASED if sampling.logit_bias else 0
        self.special[row] = penalised | truncated | guided | biased | (TOP if sampling.top_logprobs else 0)

    def move(self, source: int, target: int) -> None:
        """Copy all columns of the row `source` to the row `target`."""
        for column in self._columns:
            column[target] = column[source]

    def swap(self, left: int, right: int) -> None:
        """Exchange the parameters and positions of two rows of the batch."""
        for column in self._columns:
            column[[left, right]] = column[[right, left]]

    def advance(self, count: int, ids: NDArray[np.int64]) -> None:
        """Update the first `count` rows, which have drawn `ids`."""
        self.last[:count] = ids
        self.position[:count] += 1
        self.drawn[:count] += np.uint64(1)

    def uniform(self, count: int) -> Tensor:
        """Return the random number of each of the first `count` rows for this step."""
        return torch.from_numpy(uniform(self.seed[:count], self.drawn[:count])).to(self._device)

    def tensor(self, column: NDArray[np.generic], count: int) -> Tensor:
        """Return the first `count` elements of one of the arrays on the device. On a CPU this is a view."""
        return torch.from_numpy(column[:count]).to(self._device)
