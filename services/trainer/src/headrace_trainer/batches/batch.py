"""A batch: exactly what a step trains on, as arrays. The same experiences in the same order give the same bytes (P9).

Token ids are those that were sampled (P2): they are copied from the event and never made from text. A position is
trained when a span covers it; everything else is observation.
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


@dataclass(frozen=True)
class Hindsight:
    """What the user said after an answer, beside the row of that answer. All tokens are those of the branch."""

    prompt_T: NDArray[np.int32]
    """Up to where the answer's opening begins."""
    reply_T: NDArray[np.int32]
    """The user's next message, and the opening of an answer: after `prompt_T` it is the teacher's prompt."""
    next_T: NDArray[np.int32]
    """What the model answered to it."""
    next_temperature: float
    earlier_K: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Where answers before the contradicted one begin: what the user said may have been about one of them."""

    def digest(self) -> bytes:
        """Of all of it, little-endian."""
        arrays = [self.prompt_T, self.reply_T, self.next_T, *([self.earlier_K] if len(self.earlier_K) else ())]
        return b"".join(len(one).to_bytes(4, "little") + one.astype("<i4").tobytes() for one in arrays)


@dataclass(frozen=True)
class Row:
    """One branch. Arrays are as long as the sequence; `behaviour_T` is 0 and `temperature_T` 1 outside the loss."""

    experience_id: str
    revision: int
    token_ids_T: NDArray[np.int32]
    loss_mask_T: NDArray[np.bool_]
    behaviour_T: NDArray[np.float32]
    """The engine's logprobs of the sampled tokens, after temperature."""
    temperature_T: NDArray[np.float32]
    advantage: np.float32
    fresh_T: NDArray[np.bool_]
    """Sampled by the version that the weights are still equal to: here engine and trainer can be compared."""
    correction: bool = False
    """The weights hold something of it, and the advantage is what is missing."""
    token_weight: float = 0.0
    """What the gradient of each token is multiplied with. A correction has that of its first training, others get that
    of the batch; 0: not known yet."""
    part: str = ""
    """Which example of the experience it is (`headrace_trainer.experiences.examples`); empty: its branch."""
    together: str = ""
    """Rows with the same one go through one forward pass; empty: this one may go anywhere."""
    written: bool = False
    """Nobody sampled the tokens of the loss: `behaviour_T` says nothing."""
    share: float = 1.0
    """Of its run, where sequences are averaged and not tokens."""
    advantage_T: NDArray[np.float32] | None = None
    """The advantage of each token, where they differ; `advantage` is then their mean over the loss."""
    hindsight: Hindsight | None = None
    """Where the answer was contradicted, and a teacher that knows of it makes the advantages."""

    @property
    def name(self) -> str:
        """Of the row within its batch."""
        return f"{self.experience_id}#{self.part}" if self.part else self.experience_id

    @property
    def tokens(self) -> int:
        """In the loss."""
        return int(self.loss_mask_T.sum())

    @property
    def length(self) -> int:
        return len(self.token_ids_T)

    @property
    def has_advantage(self) -> bool:
        """Return whether the advantage of any of its tokens is not 0."""
        return bool(self.advantage) or (self.advantage_T is not None and bool(self.advantage_T.any()))

    @classmethod
    def of(
        cls, experience: Experience, advantage: float, current: str | None, token_weight: float | None = None
    ) -> Row:
        """`current` is the version that the weights equal now, None when they have moved on from it. A correction has
        the `token_weight` of its first training."""
        branch = experience.branch
        assert branch is not None
        length = len(branch.token_ids)
        mask, fresh = np.zeros(length, np.bool_), np.zeros(length, np.bool_)
        behaviour, temperature = np.zeros(length, np.float32), np.ones(length, np.float32)
        for span in branch.spans:
            place = slice(span.start, span.stop)
            mask[place] = True
            behaviour[place] = span.logprobs
            temperature[place] = span.temperature
            fresh[place] = span.version == current and experience.origin == "sampled"
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
        )


@dataclass(frozen=True)
class Batch:
    """Rows in order of arrival."""

    rows: tuple[Row, ...]
    whole: float | None = None
    """Rows of a whole batch; None when this is one."""
    agg_mode: str = "token-mean"
    """How the losses of tokens are added up (`trainer.loss.agg_mode`)."""
    horizon_tokens: int = 1
    """See the setting of this name."""

    @property
    def first(self) -> tuple[Row, ...]:
        """Those that correct nothing."""
        return tuple(row for row in self.rows if not row.correction)

    @property
    def corrections(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.correction)

    @cached_property
    def loss_tokens(self) -> int:
        return int(sum(row.loss_mask_T.sum() for row in self.rows))

    @property
    def weight(self) -> float:
        """Its size as a share of a whole batch's: a batch that time has cut is no full step."""
        return len(self.rows) / (self.whole or len(self.rows))

    @property
    def first_weight(self) -> float:
        """The same of the rows that correct nothing."""
        return len(self.first) / (self.whole or len(self.rows))

    @cached_property
    def token_weight(self) -> float:
        """Of a token in a row that corrects nothing. The loss is a mean over these tokens, however the batch is cut
        into forward passes, times the share of a whole batch that they are."""
        tokens = sum(int(row.loss_mask_T.sum()) for row in self.first)
        return self.first_weight / tokens if tokens else self.weight / max(1, self.loss_tokens)

    def weighted(self, row: Row) -> Row:
        """`row` with the weight of its tokens. A correction whose own is not known, because an earlier release trained
        it, has that of this batch."""
        if row.correction and row.token_weight:
            return row
        return replace(row, token_weight=self.token_weight * self.factor(row))

    def factor(self, row: Row) -> float:
        """What a token of `row` weighs beside one of a mean over all tokens; 1 where that is what is taken."""
        if self.agg_mode == "token-mean" or not self.first:
            return 1.0
        return self._weight_of(row) / (self.first_weight / sum(one.tokens for one in self.first))

    def _weight_of(self, row: Row) -> float:
        """Of one of its tokens, where that is not `token_weight`."""
        if self.agg_mode == "token-mean-by-origin":
            return self.first_weight / max(1, self._tokens_by_origin[row.written])
        share = self.first_weight / self._sequences
        if self.agg_mode == "seq-mean-token-mean":
            return share * row.share / max(1, row.tokens)
        return share / (self.horizon_tokens if self.agg_mode == "seq-mean-token-sum-norm" else 1)

    @cached_property
    def _sequences(self) -> float:
        """Runs, and single answers."""
        return math.fsum(row.share for row in self.first)

    @cached_property
    def _tokens_by_origin(self) -> dict[bool, int]:
        return {origin: sum(one.tokens for one in self.first if one.written == origin) for origin in (False, True)}

    def digest(self) -> str:
        """SHA-256 over ids, tokens, masks, behaviour, temperatures and advantages, little-endian, in order. Weights of
        tokens follow from these, and from the batches before. What only some algorithms have is in it where it is
        there, so batches without it have the digests that they always had."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(f"{row.experience_id}\0{row.revision}\0{row.length}\0".encode())
            digest.update(row.token_ids_T.astype("<i4").tobytes())
            digest.update(row.loss_mask_T.astype("<u1").tobytes())
            for floats in (row.behaviour_T, row.temperature_T, row.advantage):
                digest.update(np.asarray(floats).astype("<f4").tobytes())
            if special := _special(row):
                digest.update(special)
        return digest.hexdigest()


def _special(row: Row) -> bytes:
    """What a plain row has not, so that no two rows give the same."""
    told = [row.part, row.together, "written" if row.written else "", "" if row.share == 1.0 else repr(row.share)]
    by_token = b"" if row.advantage_T is None else row.advantage_T.astype("<f4").tobytes()
    known = b"" if row.hindsight is None else row.hindsight.digest()
    return json.dumps(told).encode() + by_token + known if any(told) or by_token else b""


def passes(rows: Sequence[Row], budget: int) -> list[list[int]]:
    """Row numbers of each forward pass: `pack` of what has to stay together."""
    units: dict[object, list[int]] = {}
    for index, row in enumerate(rows):
        units.setdefault(row.together or index, []).append(index)
    several = list(units.values())
    packed = pack([sum(rows[index].length for index in unit) for unit in several], budget)
    return [[index for unit in chosen for index in several[unit]] for chosen in packed]


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Row numbers of each forward pass: first-fit decreasing, deterministic. A row longer than `budget` runs alone."""
    packs: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = next((place for place, free in enumerate(room) if free >= lengths[index]), None)
        if fitting is None:
            packs.append([index])
            room.append(budget - lengths[index])
        else:
            packs[fitting].append(index)
            room[fitting] -= lengths[index]
    return packs
