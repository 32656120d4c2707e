"""The team of ranks: passes are assigned alike in every rank, and gradients are summed by torch.distributed.

Collectives must be issued in the same order by every rank, so tensors are sorted by name first: the order in which a
dictionary was filled may differ from process to process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace_trainer.torch_learner.measures import Measures
from headrace_trainer.torch_learner.shards import is_sharded


def pass_budget(lengths: Sequence[int], pack_tokens: int, ranks: int) -> int:
    """Return the number of tokens of a pass, so that a small batch is divided among all ranks."""
    return max(1, min(pack_tokens, math.ceil(sum(lengths) / ranks)))


def deal_passes(packs: Sequence[Sequence[int]], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the numbers of each rank's passes, in order.

    The longest pass comes first. Each goes to the rank with the fewest tokens so far, the first one of several.
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
    """A `headrace_trainer.torch_learner.step.Team` of the default process group."""

    def __init__(self, rank: int, ranks: int, *, sharded: bool) -> None:
        """`sharded`: whether every pass needs all ranks, because each holds a shard of the weights."""
        self._rank = rank
        self._ranks = ranks
        self._sharded = sharded

    def budget(self, lengths: Sequence[int], pack_tokens: int) -> int:
        return pass_budget(lengths, pack_tokens, self._ranks)

    def mine(self, packs: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
        hands = deal_passes(packs, lengths, self._ranks)
        own_packs = [packs[number] for number in hands[self._rank]]
        idle = max(map(len, hands)) - len(own_packs) if self._sharded else 0
        return own_packs + [[] for _ in range(idle)]

    @torch.no_grad()
    def add_up(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum the gradients of all ranks. With sharded weights FSDP2 has already done so, pass by pass."""
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
    """Return whether an observation belongs to an idle pass."""
    return isinstance(value, tuple) and any(getattr(part, "idle", False) for part in value)


def _merge(parts: Sequence[Measures]) -> Measures:
    """Concatenate the observations rank by rank, without those of idle passes."""
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
