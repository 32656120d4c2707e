"""Chooses the sequences that compare an architecture with its own code, within a budget of tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_trainer.batches.batch import Row
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.sizes import PACK_TOKENS
from headrace_trainer.torch_learner.model.sequence_bound import context_of

_PLAIN = (24, 57, 200)
"""Lengths of sequences that every model gets, in tokens."""
_BEYOND = 33
"""Number of tokens by which a sequence exceeds a length at which a model changes."""
_HEAD = 64
_LENGTHS = re.compile(r"window|chunk|block_size|original_max_position|floor_scale")
"""Settings of transformers' configurations that hold such a length."""


@dataclass(frozen=True)
class Plan:
    """Rows to compare. `places` marks, for each named place, the loss tokens of all rows that lie there."""

    rows: tuple[Row, ...]
    places: Mapping[str, NDArray[np.bool_]]
    unseen: tuple[str, ...]
    """Parts that the budget left out."""


def plan(config: Any, settings: TrainerSettings) -> Plan:
    """Plan the comparison for the model of this (text) configuration."""
    budget = settings.native.tokens
    if not budget:
        return Plan((), {}, ("anything",))
    longest = min(settings.memory.sequence_tokens or settings.memory.queue_tokens, context_of(config))
    lengths: list[int] = []
    unseen: list[str] = []

    def add(length: int, part: str, times: int = 1) -> None:
        if sum(lengths) + times * length <= budget:
            lengths.extend([length] * times)
        else:
            unseen.append(part)

    for length in sorted({min(plain, longest) for plain in _PLAIN}):
        add(length, f"sequences of {length} tokens")
    points = sorted(turning_points(config).items())
    for point, name in points:
        if point < longest:
            add(min(point + _BEYOND, longest), f"tokens beyond {name} = {point}")
        elif settings.compute.packing == "blocks" and point < (settings.compute.pack_tokens or PACK_TOKENS):
            missing = max(0, point + _BEYOND - sum(lengths))
            add(longest, f"rows of several sequences beyond {name} = {point}", -(-missing // longest))
    compared = [(point, name) for point, name in points if any(length > point for length in lengths)]
    rows = tuple(_row(config, length, [point for point, _ in compared], seed) for seed, length in enumerate(lengths))
    return Plan(rows, _place_masks(rows, compared), tuple(unseen))


def turning_points(config: Any) -> dict[int, str]:
    """Return the lengths at which the model may change its computation, with the settings that name them."""
    return {value: name for name, value in integers(config.to_dict()) if _LENGTHS.search(name) and value > 1}


def integers(settings: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the names and values of all integers, including those of inner sections."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from integers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name, value


def _row(config: Any, length: int, points: list[int], seed: int) -> Row:
    """Return a row of random tokens without special ones. Its loss tokens are the head, the tail, and those after each
    point."""
    special = {value for name, value in integers(config.to_dict()) if "token_i" in name}
    ordinary = np.setdiff1d(np.arange(config.vocab_size), list(special))
    tokens = np.random.default_rng(seed).choice(ordinary, length).astype(np.int32)
    mask = np.zeros(length, np.bool_)
    mask[:_HEAD] = mask[-_BEYOND:] = True
    for point in points:
        mask[max(0, point - 2) : point + _BEYOND] = True
    mask[0] = False
    zeros = np.zeros(length, np.float32)
    return Row("", 0, tokens, mask, zeros, zeros + 1, np.float32(0), ~mask)


def _place_masks(rows: tuple[Row, ...], points: list[tuple[int, str]]) -> dict[str, NDArray[np.bool_]]:
    """Return the places of the loss tokens: each is beyond the last point that it has passed."""
    if not rows:
        return {}
    at_N = np.concatenate([np.flatnonzero(row.loss_mask_T) for row in rows])
    passed_N = np.searchsorted([point for point, _ in points], at_N - 1, side="right")
    names = ["in short sequences", *(f"beyond {name} = {point}" for point, name in points)]
    return {name: passed_N == number for number, name in enumerate(names)}
