"""A rank's team: passes by `dealing`, sums by torch.distributed.

Collectives are issued in the same order by every rank, so whatever is summed is sorted by name first: the order in
which a dictionary was filled may differ from process to process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace_trainer.ray_learner import dealing
from headrace_trainer.torch_learner.measures import Measures
from headrace_trainer.torch_learner.shards import is_sharded

_BUCKET_WEIGHTS = 1 << 25
"""Gradients that one sum is about, together; a copy of so many is held meanwhile."""


class RankTeam:
    """`headrace_trainer.torch_learner.team.Team`, of the default process group."""

    def __init__(self, rank: int, ranks: int, *, sharded: bool) -> None:
        """`sharded`: each pass of one rank needs a pass of every other, which hold its weights."""
        self._rank = rank
        self._ranks = ranks
        self._sharded = sharded

    def budget(self, lengths: Sequence[int], pack_tokens: int) -> int:
        return dealing.budget(lengths, pack_tokens, self._ranks)

    def mine(self, packs: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
        hands = dealing.deal(packs, lengths, self._ranks)
        own = [packs[number] for number in hands[self._rank]]
        idle = max(map(len, hands)) - len(own) if self._sharded else 0
        return own + [[] for _ in range(idle)]

    @torch.no_grad()
    def add_up(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Where weights are in parts, FSDP2 has done it, pass by pass."""
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

    def together(self, measures: Measures) -> Measures:
        found: list[Any] = [None] * self._ranks
        dist.all_gather_object(found, _on_cpu(measures))
        return _joined(found)

    def _with_gradient(self, parameters: Mapping[str, nn.Parameter]) -> list[str]:
        """Those to which some rank's passes have given a gradient."""
        names = sorted(parameters)
        if not names:
            return []
        flags = [int(parameters[name].grad is not None) for name in names]
        there = torch.tensor(flags, dtype=torch.int32, device=parameters[names[0]].device)
        dist.all_reduce(there, dist.ReduceOp.MAX)
        return [name for name, flag in zip(names, there.tolist(), strict=True) if flag]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    assert not is_sharded(parameter)
    return parameter.grad


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """One type each, and no larger than there is room for, unless a single one is."""
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
    found = Measures()
    for name in (field.name for field in fields(Measures)):
        there = getattr(measures, name)
        if isinstance(there, dict):
            setattr(found, name, {key: _moved(value) for key, value in there.items()})
        else:
            setattr(found, name, [_moved(value) for value in there])
    return found


def _moved(value: Any) -> Any:
    """To the CPU, whatever is made of tensors."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, tuple):
        return tuple(map(_moved, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _moved(getattr(value, one.name)) for one in fields(value)})
    return value


def _nobodys(value: Any) -> bool:
    """Of an idle pass."""
    return isinstance(value, tuple) and any(getattr(part, "idle", False) for part in value)


def _joined(parts: Sequence[Measures]) -> Measures:
    """Rank by rank. What nobody's row has left is nobody's."""
    found = Measures()
    for name in (field.name for field in fields(Measures)):
        there = getattr(found, name)
        for part in parts:
            more = getattr(part, name)
            if isinstance(there, dict):
                there.update({key: value for key, value in more.items() if any(key)})
            else:
                there.extend(value for value in more if not _nobodys(value))
    return found
