"""What one rank holds, and what it does with it when all ranks are told to. torch is in here.

Weights are whole in each rank or in parts (`shard`). Where they are in parts, every method is one that all ranks are in
at the same time; where they are whole, all ranks compute the same, and the first one says it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace_runtime.settings import complete
from headrace_schemas.manifest import Fingerprint
from headrace_trainer.batches.batch import Batch
from headrace_trainer.learner import OPTIMIZER, WEIGHTS, Abilities, StepResult
from headrace_trainer.ray_learner import parts, sharded
from headrace_trainer.ray_learner.pieces import Piece
from headrace_trainer.ray_learner.rank_team import RankTeam
from headrace_trainer.ray_learner.version_parts import version_of
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.torch_learner import tensors
from headrace_trainer.torch_learner.learner import TorchLearner, open_learner
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.step import train
from headrace_trainer.torch_learner.stored_tensors import StoredTensors

_GOING_ON = threading.Event()
"""A rank is not told to stop in the middle of a step: it is ended."""


@dataclass(frozen=True)
class Copied:
    """What a rank says of a copy. The first one says all of it."""

    sizes: Mapping[str, int]
    """Of the files that all ranks write together, in bytes; a version's are in the folder `VERSION`."""
    fingerprint: Fingerprint | None


class Held:
    """A rank's share of a learner."""

    def __init__(
        self,
        inner: TorchLearner,
        settings: TrainerSettings,
        team: RankTeam,
        number: int,
        peers: int,
        *,
        sharded: bool,
    ) -> None:
        self._inner = inner
        self._settings = settings
        self._team = team
        self._first = number == 0
        self._peers = peers
        self._sharded = sharded
        self._number, self._ranges = -1, list[parts.FileRange]()
        """The copy that is held, and what is ours of it."""

    @classmethod
    def open(
        cls, folder: Path, table: Mapping[str, Any], number: int, ranks: int, peers: int, *, in_parts: bool
    ) -> Held:
        """`table`: all of `[trainer]`. Raises `SettingError`."""
        settings = complete(TrainerSettings).model_validate(table)
        if in_parts:
            sharded.check(settings)
        inner = open_learner(folder, settings, sharded.ShardedPolicy if in_parts else Policy)
        torch.manual_seed(settings.seed)  # whatever this process has drawn before
        return cls(inner, settings, RankTeam(number, ranks, sharded=in_parts), number, peers, sharded=in_parts)

    @property
    def abilities(self) -> Abilities:
        return self._inner.abilities

    def sequence_bound(self) -> int:
        """Ranks of one machine share its memory; a GPU's belongs to one of them."""
        found = self._inner.sequence_bound()
        return max(2, found // self._peers) if self._inner.policy.device.type == "cpu" else found

    def step(self, batch: Batch, *, from_base: bool) -> StepResult:
        settings, inner = self._settings, self._inner
        return train(
            inner.policy,
            inner.optimizer,
            batch,
            settings.loss,
            settings.compute.pack_tokens,
            _GOING_ON,
            from_base=from_base,
            team=self._team,
        )

    def copy(self, number: int, base: str | None) -> Copied:
        """Into the host's memory: what this rank adds to the files of copy `number`, which replaces the one before."""
        policy, about = self._inner.policy, tensors.about_state(self._settings.lineage)
        self._ranges, sizes = [], {}
        state = self._inner.optimizer.references() | tensors.random_state(policy)
        for file, held in ((WEIGHTS, policy.parameters), (OPTIMIZER, state)):
            mine = {name: parts.own(tensor, first=self._first) for name, tensor in held.items()}
            sizes[file], found = parts.ranges(file, held, mine, about, first=self._first)
            self._ranges += found
        fingerprint = None
        if base is not None:
            version = version_of(self._inner, base, first=self._first, sharded=self._sharded)
            self._ranges += version.ranges
            sizes |= version.sizes or {}
            fingerprint = version.fingerprint
        self._number = number
        return Copied(sizes, fingerprint)

    def write_copy(self, number: int, folder: Path) -> list[Piece]:
        """Our ranges into the files there, beside steps."""
        return parts.write(folder, self._of(number))

    def pieces(self, number: int) -> list[Piece]:
        """Of our ranges, for one who fetches them by `piece`."""
        return [piece for one in self._of(number) for piece, _ in one.pieces()]

    def piece(self, number: int, wanted: Piece) -> bytes:
        for one in self._of(number):
            if one.file == wanted.file and one.start <= wanted.start < one.start + len(one.content):
                at = wanted.start - one.start
                return bytes(one.content[at : at + wanted.size])
        raise LookupError(f"{wanted} is not ours")

    def drop(self, number: int) -> None:
        if number == self._number:
            self._ranges, self._number = [], -1

    def _of(self, number: int) -> Sequence[parts.FileRange]:
        if number != self._number:
            raise LookupError(f"copy {number} is asked for, and copy {self._number} is held")
        return self._ranges

    def restore(self, folder: Path, *, with_random: bool) -> None:
        """Each rank reads a tensor at a time, and keeps its own part of it."""
        weights, state = StoredTensors(folder / WEIGHTS), StoredTensors(folder / OPTIMIZER)
        tensors.restore(self._inner.policy, self._inner.optimizer, weights, state, with_random=with_random)

    def load(self, folder: Path) -> None:
        self._inner.load(folder)

    def fingerprint_of_base(self) -> Fingerprint:
        return self._inner.fingerprint_of_base()
