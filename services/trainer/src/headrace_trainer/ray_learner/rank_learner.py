"""The learner of one rank, with torch.

Each rank holds all weights, or a shard of them (`shard`). With sharded weights all ranks must call every method at the
same time; otherwise all ranks compute the same, and the first one reports it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace_runtime.settings.sections import complete
from headrace_schemas.values.blobs import Fingerprint
from headrace_trainer.batches.batch import Batch
from headrace_trainer.learner import OPTIMIZER, WEIGHTS, Abilities, StepResult
from headrace_trainer.ray_learner import sharded, version_parts
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
"""An event that is never set: a rank is killed and not stopped in the middle of a step."""


@dataclass(frozen=True)
class CopyReport:
    """A rank's report of a copy. Only the first rank reports all of it."""

    sizes: Mapping[str, int]
    """Sizes in bytes of the files that all ranks write together; a version's are in the folder `VERSION`."""
    fingerprint: Fingerprint | None


class RankLearner:
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
        self._number, self._ranges = -1, list[version_parts.FileRange]()
        """The number of the stored copy, and this rank's ranges of its files."""

    @classmethod
    def open(
        cls, folder: Path, table: Mapping[str, Any], number: int, ranks: int, peers: int, *, in_parts: bool
    ) -> RankLearner:
        """Open the learner from the whole table of `[trainer]`. Raises `SettingError`."""
        settings = complete(TrainerSettings).model_validate(table)
        if in_parts:
            sharded.check(settings)
        inner = open_learner(folder, settings, sharded.ShardedPolicy if in_parts else Policy)
        torch.manual_seed(settings.seed)  # independent of random numbers that this process has drawn before
        return cls(inner, settings, RankTeam(number, ranks, sharded=in_parts), number, peers, sharded=in_parts)

    @property
    def abilities(self) -> Abilities:
        return self._inner.abilities

    def sequence_bound(self) -> int:
        """Return the bound of this rank. Ranks of one machine share its memory; a GPU belongs to one rank."""
        bound = self._inner.sequence_bound()
        return max(2, bound // self._peers) if self._inner.policy.device.type == "cpu" else bound

    def step(self, batch: Batch, *, from_base: bool) -> StepResult:
        settings, inner = self._settings, self._inner
        return train(
            inner.policy,
            inner.optimizer,
            batch,
            settings.loss,
            inner.policy.pack_tokens,
            _GOING_ON,
            from_base=from_base,
            team=self._team,
        )

    def copy(self, number: int, base: str | None) -> CopyReport:
        """Copy this rank's ranges of the files of copy `number` into host memory. They replace those of the last
        copy."""
        policy, about = self._inner.policy, tensors.about_state(self._settings.lineage)
        self._ranges, sizes = [], {}
        state = self._inner.optimizer.references() | tensors.random_state(policy)
        for file, file_tensors in ((WEIGHTS, policy.parameters), (OPTIMIZER, state)):
            own_parts = {
                name: version_parts.own_part(tensor, first=self._first) for name, tensor in file_tensors.items()
            }
            sizes[file], ranges = version_parts.compute_ranges(file, file_tensors, own_parts, about, first=self._first)
            self._ranges += ranges
        fingerprint = None
        if base is not None:
            version = version_of(self._inner, base, first=self._first, sharded=self._sharded)
            self._ranges += version.ranges
            sizes |= version.sizes or {}
            fingerprint = version.fingerprint
        self._number = number
        return CopyReport(sizes, fingerprint)

    def write_copy(self, number: int, folder: Path) -> list[Piece]:
        """Write this rank's ranges into the files in `folder`, while steps go on."""
        return version_parts.write(folder, self._ranges_of(number))

    def pieces(self, number: int) -> list[Piece]:
        """Return the pieces of this rank's ranges, for a caller that fetches them by `piece`."""
        return [piece for file_range in self._ranges_of(number) for piece, _ in file_range.pieces()]

    def piece(self, number: int, piece: Piece) -> bytes:
        for file_range in self._ranges_of(number):
            end = file_range.start + len(file_range.content)
            if file_range.file == piece.file and file_range.start <= piece.start < end:
                at = piece.start - file_range.start
                return bytes(file_range.content[at : at + piece.size])
        raise LookupError(f"{piece} belongs to another rank")

    def drop(self, number: int) -> None:
        if number == self._number:
            self._ranges, self._number = [], -1

    def _ranges_of(self, number: int) -> Sequence[version_parts.FileRange]:
        if number != self._number:
            raise LookupError(f"copy {number} was requested, but copy {self._number} is stored")
        return self._ranges

    def restore(self, folder: Path, *, with_random: bool) -> None:
        """Restore a copy. Each rank reads one tensor at a time, and keeps its own part of it."""
        weights, state = StoredTensors(folder / WEIGHTS), StoredTensors(folder / OPTIMIZER)
        tensors.restore(self._inner.policy, self._inner.optimizer, weights, state, with_random=with_random)

    def load(self, folder: Path) -> None:
        self._inner.load(folder)

    def fingerprint_of_base(self) -> Fingerprint:
        return self._inner.fingerprint_of_base()
