"""The ranges of a version's files that a rank writes. Together the ranks write the files of a single process.

The first rank finds out which tensor is in which file, under which name, by calling the library with tensors without
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

from headrace_schemas.values.blobs import Fingerprint
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
    """The part of a version that one rank writes."""

    fingerprint: Fingerprint | None = None
    ranges: tuple[FileRange, ...] = ()
    sizes: Mapping[str, int] | None = None
    """Sizes of all files. Only the first rank reports them, as well as the fingerprint."""


@dataclass(frozen=True)
class _Entry:
    """A tensor of a file: a trained one, by its name in the model, or another one that the first rank has."""

    name: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bare(self) -> Tensor:
        """A `meta` tensor of this shape and type, which takes no memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


_Files = Mapping[str, Mapping[str, _Entry]]


def version_of(inner: TorchLearner, base: str, *, first: bool, sharded: bool) -> VersionPart:
    """Collect this rank's part of a version. Called in all ranks at once.

    `sharded`: whether every rank holds a shard; otherwise the first rank holds all weights.
    """
    if not (first or sharded):
        return VersionPart()
    if inner.policy.lora:
        return _adapter(inner.policy, base, first=first)
    policy, dtype = inner.policy, inner.served_as
    own_parts = {name: parts.own_part(parameter, first=first) for name, parameter in policy.parameters.items()}
    rounded = {name: _round_part(part, dtype, name) for name, part in own_parts.items() if part is not None}
    fingerprint = policy.fingerprint({name: part.values for name, part in rounded.items()})
    bare = {name: torch.empty(p.shape, dtype=dtype, device="meta") for name, p in policy.parameters.items()}
    plan = version_files.plan_files(policy, bare) if first else None
    files = _broadcast(None if plan is None else _entries(plan, bare), sharded=sharded)
    if files is None:
        # The files hold tensors in another form than the model does, for example experts that are one tensor in the
        # model.
        trained = policy.tensors()
        if first:
            weights = {name: round_stochastically(tensor, dtype, name) for name, tensor in trained.items()}
            plan = version_files.plan_files(policy, weights)
            files = _entries(plan, {})
    if files is None:
        return VersionPart()
    file_ranges: list[FileRange] = []
    sizes: dict[str, int] = {}
    for file, entries in files.items():
        own_tensors = {
            name: rounded.get(entry.name)
            if entry.name is not None
            else parts.own_part(plan.files[file][name], first=first)
            if plan is not None
            else None
            for name, entry in entries.items()
        }
        name = f"{VERSION}/{file}"
        tensors = {name: entry.bare for name, entry in entries.items()}
        sizes[name], ranges = parts.ranges(name, tensors, own_tensors, version_files.ABOUT, first=first)
        file_ranges += ranges
    texts = _texts(plan.texts) if plan is not None else ()
    return VersionPart(fingerprint, (*file_ranges, *texts), sizes | {text.file: len(text.content) for text in texts})


def _entries(plan: WritePlan, bare: Mapping[str, Tensor]) -> _Files | None:
    """Return the entries of all files, or None where a file holds a tensor that the library derived from a trained one.

    A tensor that the library stores unchanged is the very object that it was given.
    """
    names = {id(tensor): name for name, tensor in bare.items()}
    if not plan.is_exact(names):
        return None
    return {
        file: {
            name: _Entry(names.get(id(tensor)), tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
        }
        for file, tensors in plan.files.items()
    }


def _broadcast(files: _Files | None, *, sharded: bool) -> _Files | None:
    """Send the first rank's entries to all ranks."""
    if not sharded:
        return files
    broadcast: list[_Files | None] = [files]
    dist.broadcast_object_list(broadcast, src=0)
    return broadcast[0]


def _round_part(part: OwnPart, dtype: torch.dtype, name: str) -> OwnPart:
    return OwnPart(round_stochastically(part.values, dtype, name, start=part.start), part.start)


def _texts(texts: Mapping[str, bytes]) -> tuple[FileRange, ...]:
    return tuple(FileRange(f"{VERSION}/{name}", 0, memoryview(content)) for name, content in texts.items())


def _adapter(policy: Policy, base: str, *, first: bool) -> VersionPart:
    """Return the part of an adapter, which is small enough to be gathered in the first rank."""
    trained, fingerprint = policy.tensors(), policy.fingerprint()
    if not first:
        return VersionPart(fingerprint)
    with tempfile.TemporaryDirectory(prefix="headrace-adapter-") as folder:
        version_files.save_adapter(policy, Path(folder), base, trained)
        texts = _texts({path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()})
    return VersionPart(fingerprint, texts, {text.file: len(text.content) for text in texts})
