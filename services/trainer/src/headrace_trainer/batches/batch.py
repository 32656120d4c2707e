"""A batch: the arrays that a step trains on. The same experiences in the same order give the same bytes.

Token ids are those that were sampled: they are copied from the event and never made from text. A position is
trained when a span covers it; all other positions are observation.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headrace_schemas import Experience
from headrace_trainer.experiences.restrictions import TokenSets


@dataclass(frozen=True)
class Hindsight:
    """The user's reply to a row's answer, after which a teacher computes the logprobs of that answer's tokens.

    All token ids are copied from the branch.
    """

    prompt_T: NDArray[np.int32]
    """The tokens before the answer's opening."""
    reply_T: NDArray[np.int32]
    """The user's next message, and the opening of an answer. After `prompt_T` it completes the teacher's prompt."""
    next_T: NDArray[np.int32]
    """The model's answer to that message."""
    next_temperature: float
    earlier_K: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Start positions of answers before the contradicted one, which the user's message may have been about."""

    def digest(self) -> bytes:
        """Serialize all token arrays (little-endian, each with its length) for the digest of the batch."""
        arrays = [self.prompt_T, self.reply_T, self.next_T, *([self.earlier_K] if len(self.earlier_K) else ())]
        return b"".join(len(array).to_bytes(4, "little") + array.astype("<i4").tobytes() for array in arrays)


@dataclass(frozen=True)
class Row:
    """Training data of one branch or example, in arrays of the sequence's length.

    Outside the loss `behaviour_T` is 0 and `temperature_T` is 1.
    """

    experience_id: str
    revision: int
    token_ids_T: NDArray[np.int32]
    loss_mask_T: NDArray[np.bool_]
    behaviour_T: NDArray[np.float32]
    """The engine's logprobs of the sampled tokens, after temperature; 0 where it has none."""
    temperature_T: NDArray[np.float32]
    advantage: np.float32
    fresh_T: NDArray[np.bool_]
    """Positions sampled by the version whose weights are still the present ones: there engine and trainer can be
    compared."""
    correction: bool = False
    """Whether the weights already hold contributions of the row; `advantage` is then the missing one."""
    token_weight: float = 0.0
    """Factor of the gradient of each token. A correction has the one of its first training, other rows get that of the
    batch; 0 while it is unknown."""
    part: str = ""
    """The example of the experience (`headrace_trainer.experiences.examples`); empty for its branch."""
    together: str = ""
    """Rows with the same value go through one forward pass; empty where the row may go into any pass."""
    written: bool = False
    """Whether the tokens of the loss were written and not sampled, so that `behaviour_T` has no meaning."""
    share: float = 1.0
    """Share of the run that the row is, where sequences are averaged and not tokens."""
    advantage_T: NDArray[np.float32] | None = None
    """The advantage of each token, where they differ; `advantage` is then their mean over the loss."""
    sets: TokenSets | None = None
    """The tokens that positions were sampled from, where these are not all tokens. Logprobs are those of the softmax
    over these tokens."""
    hindsight: Hindsight | None = None
    """The reply to a contradicted answer, from which a teacher computes the advantages."""
    unsampled_T: NDArray[np.bool_] | None = None
    """Positions of the loss without logprobs of the policy that sampled them, or None where all have some. There
    `behaviour_T` has no meaning, as where tokens were written."""

    @property
    def name(self) -> str:
        """Name of the row within its batch."""
        return f"{self.experience_id}#{self.part}" if self.part else self.experience_id

    @property
    def tokens(self) -> int:
        """Number of tokens in the loss."""
        return int(self.loss_mask_T.sum())

    @property
    def length(self) -> int:
        return len(self.token_ids_T)

    @property
    def has_advantage(self) -> bool:
        """Whether at least one token of the row has an advantage other than 0."""
        return bool(self.advantage) or (self.advantage_T is not None and bool(self.advantage_T.any()))

    @classmethod
    def of(
        cls,
        experience: Experience,
        advantage: float,
        current: str | None,
        token_weight: float | None = None,
        sets: TokenSets | None = None,
    ) -> Row:
        """Build the row of a whole branch.

        Args:
            experience: must have a branch.
            advantage: advantage of all its tokens.
            current: version whose weights equal the present ones; None when steps have changed them since.
            token_weight: token weight of the first training, for a correction; None for a first training.
            sets: tokens that its spans were sampled from; None for all tokens.
        """
        branch = experience.branch
        assert branch is not None
        assert sets is not None or not any(span.restricted for span in branch.spans), "sets are missing"
        length = len(branch.token_ids)
        mask, fresh, unsampled = np.zeros(length, np.bool_), np.zeros(length, np.bool_), np.zeros(length, np.bool_)
        behaviour, temperature = np.zeros(length, np.float32), np.ones(length, np.float32)
        for span in branch.spans:
            positions = slice(span.start, span.stop)
            mask[positions] = True
            unsampled[positions] = span.no_logprobs is not None
            behaviour[positions] = span.logprobs
            temperature[positions] = span.temperature if span.no_logprobs is None else 1.0
            sampled = span.no_logprobs is None and experience.origin == "sampled"
            fresh[positions] = sampled and span.version == current
        return cls(
            experience.experience_id,
            experience.revision,
            np.array(branch.token_ids, np.int32),
            mask,
            behaviour,
            temperature,
            np.float32(advantage),
            fresh,
            token_weight is not None,
            token_weight or 0.0,
            written=experience.origin == "written",
            sets=sets,
            unsampled_T=unsampled if unsampled.any() else None,
        )


@dataclass(frozen=True)
class Batch:
    """Rows of one training step, in order of arrival."""

    rows: tuple[Row, ...]
    full_rows: float | None = None
    """Number of rows of a full batch, or None when this batch is full."""
    agg_mode: str = "token-mean"
    """How the losses of tokens are aggregated (`trainer.loss.agg_mode`)."""
    horizon_tokens: int = 1
    """See the setting of this name."""

    @property
    def first_rows(self) -> tuple[Row, ...]:
        """Rows that are trained for the first time."""
        return tuple(row for row in self.rows if not row.correction)

    @property
    def corrections(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.correction)

    @cached_property
    def loss_tokens(self) -> int:
        return int(sum(row.loss_mask_T.sum() for row in self.rows))

    @property
    def weight(self) -> float:
        """Size of the batch as a share of a full batch.

        A batch that was cut by time counts as less than a full step.
        """
        return len(self.rows) / (self.full_rows or len(self.rows))

    @property
    def first_weight(self) -> float:
        """Number of rows that are trained for the first time, divided by the number of rows of a full batch."""
        return len(self.first_rows) / (self.full_rows or len(self.rows))

    @cached_property
    def token_weight(self) -> float:
        """Weight of each loss token of rows that are trained for the first time.

        It makes the loss a mean over all these tokens, independent of the division into forward passes; a smaller batch
        than usual counts proportionally less.
        """
        tokens = sum(int(row.loss_mask_T.sum()) for row in self.first_rows)
        return self.first_weight / tokens if tokens else self.weight / max(1, self.loss_tokens)

    def with_token_weight(self, row: Row) -> Row:
        """Return `row` with `token_weight` set.

        A correction keeps the weight of its first training, or gets this batch's if an earlier release has not stored
        it.
        """
        if row.correction and row.token_weight:
            return row
        return replace(row, token_weight=self.token_weight * self.weight_factor(row))

    def weight_factor(self, row: Row) -> float:
        """Return the weight of each token of `row` in the loss, relative to its weight in a mean over all tokens."""
        if self.agg_mode == "token-mean" or not self.first_rows:
            return 1.0
        return self._weight_of(row) / (self.first_weight / sum(first.tokens for first in self.first_rows))

    def _weight_of(self, row: Row) -> float:
        """Return the weight of each token of `row` with an `agg_mode` other than `token-mean`."""
        if self.agg_mode == "token-mean-by-origin":
            return self.first_weight / max(1, self._tokens_by_origin[row.written])
        share = self.first_weight / self._sequences
        if self.agg_mode == "seq-mean-token-mean":
            return share * row.share / max(1, row.tokens)
        return share / (self.horizon_tokens if self.agg_mode == "seq-mean-token-sum-norm" else 1)

    @cached_property
    def _sequences(self) -> float:
        """Number of sequences that are averaged: runs, each divided among its branches, and single answers."""
        return math.fsum(row.share for row in self.first_rows)

    @cached_property
    def _tokens_by_origin(self) -> dict[bool, int]:
        return {origin: sum(row.tokens for row in self.first_rows if row.written == origin) for origin in (False, True)}

    def digest(self) -> str:
        """Return the SHA-256 over ids, tokens, masks, behaviour, temperatures and advantages, little-endian, in order.

        Token weights follow from these and from earlier batches. Fields that only some algorithms use are included
        where they are set, so batches without them have the same digests as before these fields existed.
        """
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(f"{row.experience_id}\0{row.revision}\0{row.length}\0".encode())
            digest.update(row.token_ids_T.astype("<i4").tobytes())
            digest.update(row.loss_mask_T.astype("<u1").tobytes())
            for floats in (row.behaviour_T, row.temperature_T, row.advantage):
                digest.update(np.asarray(floats).astype("<f4").tobytes())
            if special := _special_fields(row):
                digest.update(special)
        return digest.hexdigest()


def _special_fields(row: Row) -> bytes:
    """Return the optional fields of a row that are set, as bytes for the digest; different rows give different
    bytes."""
    fields = [row.part, row.together, "written" if row.written else "", "" if row.share == 1.0 else repr(row.share)]
    by_token = b"" if row.advantage_T is None else row.advantage_T.astype("<f4").tobytes()
    hindsight = b"" if row.hindsight is None else row.hindsight.digest()
    if row.unsampled_T is not None and row.unsampled_T.any():
        fields.append(hashlib.sha256(row.unsampled_T.astype("<u1").tobytes()).hexdigest())
    sets = b"" if row.sets is None else row.sets.digest()
    return json.dumps(fields).encode() + by_token + hindsight + sets if any(fields) or by_token or sets else b""


def split_into_passes(rows: Sequence[Row], budget: int) -> list[list[int]]:
    """Divide rows into forward passes of about `budget` tokens. Rows with the same `together` stay in one pass.

    Returns:
        The row numbers of each pass.
    """
    units: dict[object, list[int]] = {}
    for index, row in enumerate(rows):
        units.setdefault(row.together or index, []).append(index)
    groups = list(units.values())
    packed = pack([sum(rows[index].length for index in group) for group in groups], budget)
    return [[index for unit in chosen for index in groups[unit]] for chosen in packed]


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Divide rows of these lengths into packs of at most `budget` tokens (first-fit decreasing, deterministic).

    A row longer than `budget` gets a pack of its own.

    Returns:
        The row numbers of each pack.
    """
    packs: list[list[int]] = []
    free_tokens: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = next((number for number, free in enumerate(free_tokens) if free >= lengths[index]), None)
        if fitting is None:
            packs.append([index])
            free_tokens.append(budget - lengths[index])
        else:
            packs[fitting].append(index)
            free_tokens[fitting] -= lengths[index]
    return packs
