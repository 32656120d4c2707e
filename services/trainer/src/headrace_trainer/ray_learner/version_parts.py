"""What a rank adds to a version's files: the very files that one process would write, and nobody has all of them.

Which tensor is in which file, under which name, the library tells the first rank, when that gives it tensors without
values.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from headrace_schemas.manifest import Fingerprint
from headrace_trainer.learner import VERSION
from headrace_trainer.ray_learner import parts
from headrace_trainer.ray_learner.parts import FileRange, OwnPart
from headrace_trainer.torch_learner import version_files
from headrace_trainer.torch_learner.learner import TorchLearner
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.rounding import round_stochastically
from headrace_trainer.torch_learner.version_files import WritePlan


@dataclass(frozen=True)
class VersionPart:
    """Of one rank."""

    fingerprint: Fingerprint | None = None
    ranges: tuple[FileRange, ...] = ()
    sizes: Mapping[str, int] | None = None
    """Of all files. The first rank says it, as the fingerprint."""


@dataclass(frozen=True)
class _Entry:
    """A tensor of a file: one of ours, by its name in the model, or one that the first rank has."""

    name: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bare(self) -> Tensor:
        """Without values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


_Files = Mapping[str, Mapping[str, _Entry]]


def version_of(inner: TorchLearner, base: str, *, first: bool, sharded: bool) -> VersionPart:
    """Asked of all ranks at once. `sharded`: each holds parts of the weights; else the first has all of it to say."""
    if not (first or sharded):
        return VersionPart()
    if inner.policy.lora:
        return _adapter(inner.policy, base, first=first)
    policy, dtype = inner.policy, inner.served_as
    mine = {name: parts.own(parameter, first=first) for name, parameter in policy.parameters.items()}
    given = {name: _rounded(one, dtype, name) for name, one in mine.items() if one is not None}
    fingerprint = policy.fingerprint({name: one.values for name, one in given.items()})
    bare = {name: torch.empty(p.shape, dtype=dtype, device="meta") for name, p in policy.parameters.items()}
    plan = version_files.plan_files(policy, bare) if first else None
    files = _agreed(None if plan is None else _entries(plan, bare), sharded=sharded)
    if files is None:
        # The files hold tensors in another form than the model does: experts that are one tensor here, say.
        trained = policy.tensors()
        if first:
            weights = {name: round_stochastically(tensor, dtype, name) for name, tensor in trained.items()}
            plan = version_files.plan_files(policy, weights)
            files = _entries(plan, {})
    if files is None:
        return VersionPart()
    found: list[FileRange] = []
    sizes: dict[str, int] = {}
    for file, entries in files.items():
        held = {
            name: given.get(entry.name)
            if entry.name is not None
            else parts.own(plan.files[file][name], first=first)
            if plan is not None
            else None
            for name, entry in entries.items()
        }
        name = f"{VERSION}/{file}"
        tensors = {name: entry.bare for name, entry in entries.items()}
        sizes[name], ranges = parts.ranges(name, tensors, held, version_files.ABOUT, first=first)
        found += ranges
    texts = _texts(plan.texts) if plan is not None else ()
    return VersionPart(fingerprint, (*found, *texts), sizes | {one.file: len(one.content) for one in texts})


def _entries(plan: WritePlan, bare: Mapping[str, Tensor]) -> _Files | None:
    """None where a file holds what is made of ours. What the library has not touched is the very object that it was
    given."""
    names = {id(tensor): name for name, tensor in bare.items()}
    if any(tensor.is_meta and id(tensor) not in names for one in plan.files.values() for tensor in one.values()):
        return None
    return {
        file: {
            name: _Entry(names.get(id(tensor)), tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
        }
        for file, tensors in plan.files.items()
    }


def _agreed(files: _Files | None, *, sharded: bool) -> _Files | None:
    """The first rank's, in all of them."""
    if not sharded:
        return files
    told: list[_Files | None] = [files]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def _rounded(one: OwnPart, dtype: torch.dtype, name: str) -> OwnPart:
    return OwnPart(round_stochastically(one.values, dtype, name, start=one.start), one.start)


def _texts(texts: Mapping[str, bytes]) -> tuple[FileRange, ...]:
    return tuple(FileRange(f"{VERSION}/{name}", 0, memoryview(content)) for name, content in texts.items())


def _adapter(policy: Policy, base: str, *, first: bool) -> VersionPart:
    """Small: it comes together in the first rank."""
    trained, fingerprint = policy.tensors(), policy.fingerprint()
    if not first:
        return VersionPart(fingerprint)
    with tempfile.TemporaryDirectory(prefix="headrace-adapter-") as folder:
        version_files.save_adapter(policy, Path(folder), base, trained)
        texts = _texts({path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()})
    return VersionPart(fingerprint, texts, {one.file: len(one.content) for one in texts})
