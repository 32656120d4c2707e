"""The learner of one rank, with torch, and the team of ranks that shares its passes and sums its gradients.

Each rank holds all weights, or a shard of them (`shard`). With sharded weights all ranks must call every method at
the same time; otherwise all ranks compute the same, and the first one reports it.

Collectives must be issued in the same order by every rank, so tensors are sorted by name first: the order in which a
dictionary was filled may differ from process to process.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace_runtime.settings.sections import complete
from headrace_schemas.values.blobs import Fingerprint
from headrace_trainer.batches.batch import Batch
from headrace_trainer.learner import OPTIMIZER, WEIGHTS, Abilities, StepResult
from headrace_trainer.ray_learner import sharded, version_parts
from headrace_trainer.ray_learner.pieces import Piece
from headrace_trainer.ray_learner.version_parts import version_of
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.torch_learner import tensors
from headrace_trainer.torch_learner.learner import TorchLearner, open_learner
from headrace_trainer.torch_learner.measures import Measures
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.step import train
from headrace_trainer.torch_learner.stored_tensors import StoredTensors, is_sharded

_GOING_ON = threading.Event()
"""An event that is never set: a rank is killed and not stopped in the middle of a step."""


@dataclass(frozen=True)
class CopyReport:
    """Report of one rank about a copy (`headrace_trainer.learner.Copy`): sizes of its files, and the fingerprint.

    Only the report of the first rank is complete.
    """

    sizes: Mapping[str, int]
    """Sizes in bytes of the files that all ranks write together; a version's are in the folder `VERSION`."""
    fingerprint: Fingerprint | None


class RankLearner:
    """Learner of one rank: its part of the computation, and its part of the weights if they are sharded."""

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
        """Return the longest sequence that this rank has memory for.

        Ranks of one machine share its memory, but not GPUs.
        """
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
        """Copy this rank's ranges of the files of copy `number` into host memory.

        They replace those of the last copy.
        """
        policy, about = self._inner.policy, tensors.state_metadata(self._settings.lineage)
        self._ranges, sizes = [], {}
        state = self._inner.optimizer.state_tensors() | tensors.random_state(policy)
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
        """Write this rank's ranges of copy `number` into the files in `folder`. It may run during steps."""
        return version_parts.write(folder, self._ranges_of(number))

    def pieces(self, number: int) -> list[Piece]:
        """Return file, position and size of each piece of copy `number` in this rank, whose content `piece` returns."""
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
        """Restore a snapshot (`Copy`) from `folder`. Each rank reads one tensor at a time, and keeps its part of it."""
        weights, state = StoredTensors(folder / WEIGHTS), StoredTensors(folder / OPTIMIZER)
        tensors.restore(self._inner.policy, self._inner.optimizer, weights, state, with_random=with_random)

    def load(self, folder: Path) -> None:
        self._inner.load(folder)

    def fingerprint_of_base(self) -> Fingerprint:
        return self._inner.fingerprint_of_base()


def pass_budget(lengths: Sequence[int], pack_tokens: int, ranks: int) -> int:
    """Return the number of tokens per pass: at most `pack_tokens`, fewer if otherwise some ranks had no pass.

    Args:
        lengths: numbers of tokens of the rows.
        pack_tokens: largest number of tokens per pass.
        ranks: number of ranks.
    """
    return max(1, min(pack_tokens, math.ceil(sum(lengths) / ranks)))


def assign_passes(packs: Sequence[Sequence[int]], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign forward passes to ranks, and return the indices of each rank's passes.

    The passes are assigned by descending length, each to the rank that has the fewest tokens so far.

    Args:
        packs: indices of the rows in each pass.
        lengths: numbers of tokens of the rows.
        ranks: number of ranks.
    """
    tokens = [sum(lengths[row] for row in rows) for rows in packs]
    hands: list[list[int]] = [[] for _ in range(ranks)]
    assigned = [0] * ranks
    for number in sorted(range(len(packs)), key=lambda pack: (-tokens[pack], pack)):
        rank = min(range(ranks), key=lambda candidate: (assigned[candidate], candidate))
        hands[rank].append(number)
        assigned[rank] += tokens[number]
    return [sorted(hand) for hand in hands]


_BUCKET_WEIGHTS = 1 << 25
"""Number of gradients that are summed together; a copy of that many is held meanwhile."""


class RankTeam:
    """The ranks of the default `torch.distributed` process group, which share the forward and backward passes of each
    training step. Implements the protocol `headrace_trainer.torch_learner.step.Team`.
    """

    def __init__(self, rank: int, ranks: int, *, sharded: bool) -> None:
        """Create the team for one of its ranks.

        Args:
            rank: number of this rank.
            ranks: number of all ranks.
            sharded: whether every pass needs all ranks, because each holds a shard of the weights.
        """
        self._rank = rank
        self._ranks = ranks
        self._sharded = sharded

    def budget(self, lengths: Sequence[int], pack_tokens: int) -> int:
        return pass_budget(lengths, pack_tokens, self._ranks)

    def own_passes(self, packs: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
        """Return this rank's passes. With sharded weights empty ones follow until every rank has equally many."""
        hands = assign_passes(packs, lengths, self._ranks)
        own_packs = [packs[number] for number in hands[self._rank]]
        idle = max(map(len, hands)) - len(own_packs) if self._sharded else 0
        return own_packs + [[] for _ in range(idle)]

    @torch.no_grad()
    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum the gradients of all ranks into every rank's `grad` (all-reduce).

        With sharded weights nothing is left to do: FSDP2 has summed them in each backward pass.
        """
        if self._sharded:
            return
        names = self._with_gradient(parameters)
        for name in names:
            parameter = parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([_gradient(parameters[name]) for name in names]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            parts = torch.split(flat, [gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.reshape(gradient.shape))

    def merge_measures(self, measures: Measures) -> Measures:
        by_rank: list[Any] = [None] * self._ranks
        dist.all_gather_object(by_rank, _on_cpu(measures))
        return _merge(by_rank)

    def _with_gradient(self, parameters: Mapping[str, nn.Parameter]) -> list[str]:
        """Return the names of the parameters that have a gradient in any rank."""
        names = sorted(parameters)
        if not names:
            return []
        flags = [int(parameters[name].grad is not None) for name in names]
        has_gradient = torch.tensor(flags, dtype=torch.int32, device=parameters[names[0]].device)
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX)
        return [name for name, flag in zip(names, has_gradient.tolist(), strict=True) if flag]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    assert not is_sharded(parameter)
    return parameter.grad


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Divide gradients into buckets of one type and bounded size. A larger gradient gets a bucket of its own."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        total = sum(each.numel() for each in bucket) + gradient.numel()
        if bucket and (total > _BUCKET_WEIGHTS or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


def _on_cpu(measures: Measures) -> Measures:
    copy = Measures()
    for name in (field.name for field in fields(Measures)):
        observations = getattr(measures, name)
        if isinstance(observations, dict):
            setattr(copy, name, {key: _to_cpu(value) for key, value in observations.items()})
        else:
            setattr(copy, name, [_to_cpu(value) for value in observations])
    return copy


def _to_cpu(value: Any) -> Any:
    """Copy tensors to the CPU, within tuples and dataclasses too."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, tuple):
        return tuple(map(_to_cpu, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _to_cpu(getattr(value, field.name)) for field in fields(value)})
    return value


def _is_of_idle_pass(value: Any) -> bool:
    """Return whether an entry of `Measures` belongs to an idle pass, which has no rows of the batch."""
    return isinstance(value, tuple) and any(getattr(part, "idle", False) for part in value)


def _merge(parts: Sequence[Measures]) -> Measures:
    """Return the measurements of all ranks concatenated in the order of the ranks, without those of idle passes."""
    merged = Measures()
    for name in (field.name for field in fields(Measures)):
        target = getattr(merged, name)
        for part in parts:
            observations = getattr(part, name)
            if isinstance(target, dict):
                target.update({key: value for key, value in observations.items() if any(key)})
            else:
                target.extend(value for value in observations if not _is_of_idle_pass(value))
    return merged
